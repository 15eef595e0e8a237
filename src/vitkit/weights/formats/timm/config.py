"""timm's `config.json`: what it says of a model, and the one that lets timm build ours.

`architecture` names a function of timm, `model_args` are keywords for it, `pretrained_cfg` says
what images become (timm 1.0.31, models/_hub.py: `_parse_model_cfg`). timm reads a folder with
`timm.create_model("local-dir:FOLDER", pretrained=True)`.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping
from fnmatch import fnmatchcase
from typing import Any, NamedTuple

from vitkit.errors import CheckpointError
from vitkit.models.presets import preset, table
from vitkit.spec import Preprocess, ViTSpec
from vitkit.weights.files.open import Header

OURS_ALONE = (
    "vit_lite_*", "vit_cifar_*", "vit_mnist_*", "mae_vit_*", "vit_e_patch14_224",
    "vit_tiny_patch8_*", "vit_tiny_patch14_224", "vit_tiny_patch32_*", "vit_small_patch8_384",
    "vit_small_patch14_224", "vit_base_patch8_384", "vit_base_patch14_224", "vit_large_patch8_*",
    "vit_huge_patch8_*", "vit_huge_patch16_224", "vit_huge_patch16_384", "vit_huge_patch32_*",
)  # fmt: skip
"""Presets whose names timm does not know."""
EQUAL = {
    "vit_so400m_patch14_siglip_384": "vit_so400m_patch14_siglip_378",
    "vit_so400m_patch14_siglip_gap_384": "vit_so400m_patch14_siglip_gap_378",
}
"""timm's name -> preset of the same 27 x 27 patches of 14, which cover 378 of 384 pixels."""
POOLINGS = {"token": "cls", "avg": "mean", "map": "map"}
ACTIVATIONS = ("gelu", "gelu_tanh", "quick_gelu", "relu", "silu")
FROM_PRESET = ("num_heads", "norm_eps", "activation", "pooling", "position_resampling", "block",
               "positions", "rope_temperature", "image_size", "positions_cover_prefix",
               "layer_scale", "resnet_variant", "distilled_readout")  # fmt: skip
"""What tensors do not say, or not for sure."""
ROTARY = ("*rope*", "eva02*", "vit_pe_*", "*sapiens*")
"""Models of timm with rotary positions other than DINOv3's, which leave no tensors."""
THEIRS = {"config.json": re.compile(r".*\d.*"), "arch": re.compile(r".*_\d{3}|test_.*")}
"""What names of timm's look like; DeiT, MAE and MoCo write others into their checkpoints."""
KEYWORDS = {"depth": "depth", "num_heads": "num_heads", "in_channels": "in_chans",
            "class_token": "class_token", "qk_norm": "qk_norm"}  # fmt: skip
"""Spec field -> keyword of timm's classes, with the same value."""
UNDERSTOOD = frozenset((
    *KEYWORDS.values(), "num_classes", "img_size", "patch_size", "embed_dim", "mlp_ratio",
    "qkv_bias", "init_values", "no_embed_class", "reg_tokens", "num_reg_tokens", "pre_norm",
    "use_pre_transformer_norm", "final_norm", "fc_norm", "use_fc_norm", "global_pool",
    "pool_include_prefix", "pos_embed", "act_layer", "norm_layer", "rope_temperature",
    "dynamic_img_size", "dynamic_img_pad", "strict_img_size", "weight_init", "fix_init",
    "drop_rate", "pos_drop_rate", "patch_drop_rate", "proj_drop_rate", "attn_drop_rate",
    "drop_path_rate",
))  # fmt: skip
"""Keywords that are read here, that shapes say, or that change no logits of a trained model."""


class Stated(NamedTuple):
    """What the document beside a file says.

    Attributes:
        fields: of `ViTSpec`.
        preprocess: fields of `Preprocess`.
        classes: class names, or none.
        width: D of the architecture, if it is known.
        warnings: one line each.
    """

    fields: dict[str, Any]
    preprocess: dict[str, Any]
    classes: tuple[str, ...] = ()
    width: int | None = None
    warnings: tuple[str, ...] = ()


def config_of(header: Header) -> Mapping[str, Any]:
    """The `config.json` beside a file; else what a training checkpoint says of its model."""
    config = header.documents.get("config", {})
    return config if "architecture" in config else {**header.stated, **config}


def place_of(header: Header) -> str:
    """Where `config_of` finds the name of the model, for messages."""
    beside = "architecture" in header.documents.get("config", {})
    return "config.json" if beside or not header.stated else "arch"


def architecture_of(config: Mapping[str, Any]) -> str | None:
    """The name in the document, without the tag of its weights; of two equal models, the preset."""
    name = config.get("architecture")
    if not isinstance(name, str):
        return None
    name = name.partition(".")[0]
    return EQUAL.get(name, name)


def is_eva(spec: ViTSpec) -> bool:
    """Whether timm computes the model by its class `Eva`, which has other names and keywords."""
    return spec.positions == "rope" or spec.qkv_bias == "no_key"


def read(
    config: Mapping[str, Any], overrides: Mapping[str, Any], said_by: str = "config.json"
) -> Stated:
    """What the document says; a `Stated` without anything where it is not timm's.

    Args:
        config: the document.
        overrides: what the caller says; positions among them settle what a name leaves open.
        said_by: where the name stands: `config.json`, or `arch` of a training checkpoint.

    Raises:
        CheckpointError: a model that vitkit does not know and that nobody says to be plain;
            positions, a pooling or an activation that vitkit does not compute.
    """
    name = architecture_of(config)
    if name is None:
        return Stated({}, {})
    arguments, pretrained = config.get("model_args") or {}, config.get("pretrained_cfg") or config
    fields, width, warnings = {}, arguments.get("embed_dim"), []
    if name in table():
        spec = preset(name)
        fields = {field: getattr(spec, field) for field in FROM_PRESET}
        width = width or spec.width
    elif any(fnmatchcase(name, pattern) for pattern in ROTARY):
        raise CheckpointError(f"{said_by}: {name} has rotary positions that vitkit does not know")
    elif "positions" not in overrides and THEIRS[said_by].fullmatch(name):
        raise CheckpointError(
            f"{said_by}: {name} is no model that vitkit knows, and tensors do not show all that "
            f"a model computes; if it is a plain ViT, say --spec.positions learned "
            f"(positions='learned')"
        )
    else:
        warnings.append(f"{said_by}: {name} is no preset: what shapes do not say is only usual")
    if size := pretrained.get("input_size"):
        fields["image_size"] = tuple(size[1:])
    fields |= _from_arguments(arguments, said_by)
    pool = arguments.get("global_pool") or config.get("global_pool")
    if pool is not None:
        if pool not in POOLINGS:
            raise CheckpointError(f"{said_by}: global_pool {pool!r} is none of {list(POOLINGS)}")
        everything = pool == "avg" and arguments.get("pool_include_prefix")
        fields["pooling"] = "mean_all" if everything else POOLINGS[pool]
    if unknown := sorted(set(arguments) - UNDERSTOOD):
        warnings.append(f"{said_by}: model_args not understood: {', '.join(unknown)}")
    images, remarks = _images(pretrained)
    names, doubt = _class_names(config.get("label_names") or pretrained.get("label_names") or ())
    return Stated(fields, images, names, width, (*warnings, *remarks, *doubt))


def _class_names(names: Any) -> tuple[tuple[str, ...], list[str]]:
    """The class names in the order of the logits, or none and why."""
    if isinstance(names, Mapping):  # number -> name, as transformers writes it
        numbers = [str(number) for number in range(len(names))]
        if set(map(str, names)) != set(numbers):
            return (), ["config.json: label_names is an object without the numbers of the classes; "
                        "left out"]  # fmt: skip
        names = [{str(key): name for key, name in names.items()}[number] for number in numbers]
    if not isinstance(names, list | tuple):
        raise CheckpointError(
            f"config.json: label_names is {type(names).__name__}; expected a list of class names"
        )
    return tuple(map(str, names)), []


def _from_arguments(arguments: Mapping[str, Any], said_by: str) -> dict[str, Any]:
    fields = {field: arguments[field] for field in ("num_heads", "rope_temperature")
              if field in arguments}  # fmt: skip
    if "img_size" in arguments:
        size = arguments["img_size"]
        fields["image_size"] = (size, size) if isinstance(size, int) else tuple(size)
    if "no_embed_class" in arguments:
        fields["positions_cover_prefix"] = not arguments["no_embed_class"]
    if arguments.get("init_values") is not None:
        fields["layer_scale"] = arguments["init_values"]
    if "pos_embed" in arguments:
        fields["positions"] = "learned" if arguments["pos_embed"] == "learn" else "none"
    if arguments.get("act_layer") is not None:
        fields["activation"] = arguments["act_layer"]
        if fields["activation"] not in ACTIVATIONS:
            known = ", ".join(ACTIVATIONS)
            raise CheckpointError(
                f"{said_by}: act_layer {fields['activation']!r} is none of {known}"
            )
    if arguments.get("norm_layer") in ("layernorm", "rmsnorm"):  # by name, with timm's epsilon
        fields["norm_eps"] = 1e-6
    return fields


def _images(pretrained: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Fields of `Preprocess`, all of those that are stated; a line for what is read otherwise."""
    fields: dict[str, Any] = {}
    warnings = []
    for name in ("mean", "std"):
        if pretrained.get(name):
            fields[name] = tuple(map(float, pretrained[name]))
    mode = pretrained.get("interpolation")
    if mode in ("nearest", "bilinear", "bicubic"):
        fields["interpolation"] = mode
    elif mode:
        warnings.append(f"config.json: interpolation {mode!r} is read as bicubic")
        fields["interpolation"] = "bicubic"
    if ratio := pretrained.get("crop_pct"):
        fields["crop_ratio"] = float(ratio)
    crop = pretrained.get("crop_mode") or "center"
    if pretrained.get("crop_mode") or ratio:
        squash = "squash-crop" if fields.get("crop_ratio", 1) < 1 else "squash"
        fields["fit"] = squash if crop == "squash" else "crop"
    if crop not in ("center", "squash"):
        warnings.append(f"config.json: crop_mode {crop!r} is read as {fields['fit']!r}")
    return fields, warnings


def document(
    spec: ViTSpec, preprocess: Preprocess, classes: tuple[str, ...] = ()
) -> dict[str, Any]:
    """The `config.json` for a model; without `architecture` where timm has none that is equal."""
    found = architecture(spec)
    root = f"patch_embed.backbone.{'stem.' if spec.resnet_layers else ''}conv"
    made: dict[str, Any] = {"architecture": found[0]} if found else {
        "note": "no model of timm's registry computes this; load the tensors into one of your own"
    }  # fmt: skip
    made |= {"num_classes": spec.num_classes, "num_features": spec.width}
    for theirs, ours in POOLINGS.items():
        if spec.pooling == ours or (theirs == "avg" and spec.pooling == "mean_all"):
            made["global_pool"] = theirs
    if classes:
        made["label_names"] = list(classes)
    if found and found[1]:
        made["model_args"] = found[1]
    made["pretrained_cfg"] = {
        "num_classes": spec.num_classes,
        "input_size": [spec.in_channels, *spec.image_size],
        "fixed_input_size": True,
        "mean": list(preprocess.mean),
        "std": list(preprocess.std),
        "interpolation": preprocess.interpolation,
        "crop_pct": 1.0 if preprocess.fit == "squash" else preprocess.crop_ratio,
        "crop_mode": "center" if preprocess.fit == "crop" else "squash",
        "first_conv": root if spec.stem == "resnet" else "patch_embed.proj",
        "classifier": ["head", "head_dist"] if spec.distillation_token else "head",
    }
    return made


def architecture(spec: ViTSpec) -> tuple[str, dict[str, Any]] | None:
    """The model of timm that computes what ours does, with the fewest `model_args`; or none."""
    best: tuple[str, dict[str, Any]] | None = None
    for name, base in _theirs().items():
        arguments = _arguments(base, spec)
        if arguments is not None and (best is None or len(arguments) < len(best[1])):
            best = name, arguments
            if not arguments:
                break
    return best


@functools.cache
def _theirs() -> dict[str, ViTSpec]:
    """The presets whose names timm knows."""
    ours = {name for name in table() for pattern in OURS_ALONE if fnmatchcase(name, pattern)}
    return {name: preset(name) for name in table() if name not in ours}


def _same_class(base: ViTSpec, spec: ViTSpec) -> bool:
    """Whether the two differ in nothing that `model_args` cannot say."""
    firm = ["distillation_token", "block", "norm", "norm_eps", "mlp", "resnet_layers", "head_width",
            "representation_width"]  # fmt: skip
    if spec.stem == "resnet":
        firm += ["resnet_variant", "patch_size"]
    if is_eva(spec):
        firm += ["positions", "activation", "final_norm", "qk_norm"]
    if spec.distillation_token:
        firm += ["positions_cover_prefix", "num_registers"]
    return (
        all(getattr(base, name) == getattr(spec, name) for name in firm)
        and (base.stem == "resnet") == (spec.stem == "resnet")
        and spec.stem in ("convolution", "linear", "resnet")
        and is_eva(base) == is_eva(spec)
        and (spec.qkv_bias is not True or not is_eva(spec))
        and spec.positions in ("learned", "none", "rope")
        and spec.pooling in (*POOLINGS.values(), "mean_all")
        and (spec.pooling != "mean_all" or not is_eva(spec))
        and (spec.patch_bias != spec.embedding_norm or spec.stem == "resnet")
        and (spec.mlp != "swiglu_split" or spec.mlp_width % 8 == 0)
    )


def _arguments(base: ViTSpec, spec: ViTSpec) -> dict[str, Any] | None:
    """Keywords that make timm's `base` the model of `spec`, or `None` where none do."""
    if not _same_class(base, spec):
        return None
    eva = is_eva(spec)
    differ = {name for name, value in vars(base).items() if value != getattr(spec, name)}
    made = {theirs: getattr(spec, field) for field, theirs in KEYWORDS.items() if field in differ}
    for field, theirs in (("image_size", "img_size"), ("patch_size", "patch_size")):
        if field in differ:
            made[theirs] = list(getattr(spec, field))
    if "width" in differ:
        made["embed_dim"] = spec.width
    if differ & {"width", "mlp_width"}:
        made["mlp_ratio"] = _ratio(spec)
    if "num_registers" in differ:
        made["num_reg_tokens" if eva else "reg_tokens"] = spec.num_registers
    if (
        "positions_cover_prefix" in differ
        and spec.num_prefix_tokens
        and spec.positions == "learned"
    ):
        made["no_embed_class"] = not spec.positions_cover_prefix
    if "qkv_bias" in differ:
        made["qkv_bias"] = bool(spec.qkv_bias)
    if (base.layer_scale is None) != (spec.layer_scale is None):
        made["init_values"] = spec.layer_scale
    if "embedding_norm" in differ:
        made["use_pre_transformer_norm" if eva else "pre_norm"] = spec.embedding_norm
    if "activation" in differ:
        made["act_layer"] = spec.activation
    if "positions" in differ:
        made["pos_embed"] = "learn" if spec.positions == "learned" else "none"
    if "rope_temperature" in differ and spec.positions == "rope":
        made["rope_temperature"] = spec.rope_temperature
    return made | _readout(base, spec, eva)


def _readout(base: ViTSpec, spec: ViTSpec, eva: bool) -> dict[str, Any]:
    made: dict[str, Any] = {}
    if base.pooling != spec.pooling:
        pooling = "mean" if spec.pooling == "mean_all" else spec.pooling
        made["global_pool"] = next(name for name, ours in POOLINGS.items() if ours == pooling)
    if spec.pooling == "mean_all":
        made["pool_include_prefix"] = True
    if base.final_norm != spec.final_norm:
        made["final_norm"] = spec.final_norm
    if made or base.norm_before_pool != spec.norm_before_pool:
        made["use_fc_norm" if eva else "fc_norm"] = not spec.norm_before_pool
    return made


def _ratio(spec: ViTSpec) -> float:
    """`mlp_ratio`, of which timm takes int(width * ratio); a packed SwiGLU counts both halves."""
    hidden = spec.mlp_width * (2 if spec.mlp == "swiglu_packed" else 1)
    ratio = hidden / spec.width
    return ratio if int(spec.width * ratio) == hidden else (hidden + 0.5) / spec.width
