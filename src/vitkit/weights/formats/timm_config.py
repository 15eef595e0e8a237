"""timm's `config.json`, read and written, and the timm model that computes what a spec does."""

import functools
import re
from collections.abc import Mapping
from fnmatch import fnmatchcase, translate
from typing import Any, NamedTuple

from vitkit import errors, other_names
from vitkit.io.untrusted import refuse
from vitkit.models.interface.pretrained import pretrained_config
from vitkit.models.presets import preset, table
from vitkit.spec import Preprocess, ViTSpec
from vitkit.weights.files import Header
from vitkit.weights.formats.format import as_pair, how_to_state

EQUAL_PRESETS = {
    "vit_so400m_patch14_siglip_384": "vit_so400m_patch14_siglip_378",
    "vit_so400m_patch14_siglip_gap_384": "vit_so400m_patch14_siglip_gap_378",
}
"""timm's name -> preset of the same 27 x 27 patches of 14, which cover 378 of 384 pixels."""
TIMM_ACTIVATIONS = {name: name for name in ("gelu", "gelu_tanh", "quick_gelu", "relu", "silu")}
_FROM_PRESET = (
    "num_heads",
    "norm_eps",
    "activation",
    "pooling",
    "position_resampling",
    "block",
    "positions",
    "rope_temperature",
    "image_size",
    "positions_cover_prefix",
    "layer_scale",
    "resnet_variant",
    "distilled_readout",
)
"""Spec fields that tensors do not decide, or not for sure."""
_ROTARY = ("*rope*", "eva02*", "vit_pe_*", "*sapiens*")
"""Models of timm with rotary positions other than DINOv3's, which leave no tensors."""
_TIMM_NAMES = {"config.json": re.compile(r".*\d.*"), "arch": re.compile(r".*_\d{3}|test_.*")}
"""Patterns of timm's names; DeiT, MAE and MoCo write others into their checkpoints."""
_UNDERSTOOD = frozenset(other_names.TIMM_KEYWORDS) | frozenset(
    [
        "depth",
        "num_heads",
        "num_classes",
        "patch_size",
        "class_token",
        "qkv_bias",
        "qk_norm",
        "final_norm",
        "rope_temperature",
        "dynamic_img_size",
        "dynamic_img_pad",
        "strict_img_size",
        "fix_init",
    ]
)
"""Keywords that are read here, that shapes decide, or that change no logits of a trained model."""


class StatedModel(NamedTuple):
    """A model's description in the document beside a file.

    Attributes:
        origin: `config.json`, or `arch` of a training checkpoint, for messages.
        fields: fields of `ViTSpec`.
        preprocess: fields of `Preprocess`.
        classes: class names, or none.
        width: D of the architecture, if it is known.
        warnings: one line each.
    """

    origin: str
    fields: Mapping[str, Any] = {}
    preprocess: Mapping[str, Any] = {}
    classes: tuple[str, ...] = ()
    width: int | None = None
    warnings: tuple[str, ...] = ()


def _config_of(header: Header) -> tuple[str, Mapping[str, Any]]:
    """Return the `config.json` beside a file, else a training checkpoint's own statement."""
    config = header.documents.get("config", {})
    if "architecture" in config or not header.stated:
        return "config.json", config
    return "arch", {**header.stated, **config}


def architecture_name(header: Header) -> str | None:
    """Return the model's name without the tag of its weights; of two equal models, the preset."""
    name = _config_of(header)[1].get("architecture")
    if not isinstance(name, str):
        return None
    # "vit_base_patch16_224.augreg_in1k" -> "vit_base_patch16_224"
    name = name.partition(".")[0]
    return EQUAL_PRESETS.get(name, name)


def read_statement(header: Header, overrides: Mapping[str, Any]) -> StatedModel:
    """Return the model that a document describes; an empty description where it is not timm's.

    Args:
        header: header of the file.
        overrides: spec fields of the caller; positions among them settle what a name leaves open.

    Raises:
        CheckpointError: a model that vitkit does not know and that the caller does not declare
            plain; positions, a pooling or an activation that vitkit does not compute.
    """
    origin, config = _config_of(header)
    name = architecture_name(header)
    if name is None:
        return StatedModel(origin)
    arguments = config.get("model_args") or {}
    # Older documents have the entries of pretrained_cfg at the top.
    pretrained = config.get("pretrained_cfg") or config
    fields: dict[str, Any] = {}
    width = arguments.get("embed_dim")
    warnings: list[str] = []
    if name in table():
        spec = preset(name)
        fields = {field: getattr(spec, field) for field in _FROM_PRESET}
        # The keyword goes before the preset: timm's constructor takes it so.
        width = width or spec.width
    else:
        _refuse_unknown_model(name, overrides, origin)
        warnings.append(
            f"{origin}: {name} is not a preset; fields that shapes do not show have their usual "
            "values"
        )
    if pretrained.get("input_size"):
        fields["image_size"] = tuple(pretrained["input_size"][1:])  # (C, H, W)
    fields |= _fields_of_arguments(arguments)
    pool = arguments.get("global_pool") or config.get("global_pool")
    if pool is not None:
        is_of_all = pool == "avg" and arguments.get("pool_include_prefix")
        fields["pooling"] = (
            "mean_all" if is_of_all else _known(pool, other_names.POOLINGS, "global_pool")
        )
    unknown = sorted(set(arguments) - _UNDERSTOOD)
    if unknown:
        warnings.append(f"{origin}: model_args not supported: {', '.join(unknown)}")
    preprocess, image_warnings = _preprocess_fields(pretrained)
    names = config.get("label_names") or pretrained.get("label_names") or ()
    if isinstance(names, Mapping):  # number -> name, as transformers writes it
        names = [names.get(str(number)) for number in range(len(names))]
    kind = f"label_names is {type(names).__name__}; expected a list of class names"
    refuse("config.json", {kind: not isinstance(names, list | tuple)})
    if None in names:
        warnings.append("config.json: label_names does not name every class and is left out")
        names = ()
    classes = tuple(map(str, names))
    return StatedModel(origin, fields, preprocess, classes, width, (*warnings, *image_warnings))


def _known(value: Any, known: Mapping[str, str], keyword: str) -> str:
    """Return our name of a value of a keyword.

    Raises:
        CheckpointError: a value that vitkit does not compute.
    """
    if value not in known:
        raise errors.CheckpointError(
            f"config.json: {keyword} {value!r} is none of {', '.join(known)}"
        )
    return known[value]


def _refuse_unknown_model(name: str, overrides: Mapping[str, Any], origin: str) -> None:
    """Refuse a model of timm that may compute more than its tensors show."""
    # Their tensors are those of a plain ViT: read as one, they would give wrong logits.
    problem = ""
    if any(fnmatchcase(name, pattern) for pattern in _ROTARY):
        problem = "has rotary positions that are not supported"
    elif "positions" not in overrides and _TIMM_NAMES[origin].fullmatch(name):
        problem = (
            "is not a known model, and tensors do not show everything a model computes; if it is a "
            f"plain ViT, {how_to_state('positions', 'learned')}"
        )
    if problem:
        raise errors.CheckpointError(f"{origin}: {name} {problem}")


def _fields_of_arguments(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return the spec fields of `model_args` that shapes do not decide."""
    fields: dict[str, Any] = {}
    for name in ("num_heads", "rope_temperature"):
        if name in arguments:
            fields[name] = arguments[name]
    if "img_size" in arguments:
        fields["image_size"] = as_pair(arguments["img_size"])
    if "no_embed_class" in arguments:
        fields["positions_cover_prefix"] = not arguments["no_embed_class"]
    if arguments.get("init_values") is not None:
        fields["layer_scale"] = arguments["init_values"]
    if "pos_embed" in arguments:
        fields["positions"] = "learned" if arguments["pos_embed"] == "learn" else "none"
    if arguments.get("act_layer") is not None:
        fields["activation"] = _known(arguments["act_layer"], TIMM_ACTIVATIONS, "act_layer")
    if arguments.get("norm_layer") in ("layernorm", "rmsnorm"):  # by name, with timm's epsilon
        fields["norm_eps"] = 1e-6
    return fields


def _preprocess_fields(pretrained: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Return the stated fields of `Preprocess`, and a line for each that is read otherwise."""
    fields: dict[str, Any] = {}
    warnings: list[str] = []
    for name in ("mean", "std"):
        if pretrained.get(name):
            fields[name] = tuple(map(float, pretrained[name]))
    interpolation = pretrained.get("interpolation")
    if interpolation in ("nearest", "bilinear", "bicubic"):
        fields["interpolation"] = interpolation
    elif interpolation:
        warnings.append(f"config.json: interpolation {interpolation!r} is read as bicubic")
        fields["interpolation"] = "bicubic"
    ratio = pretrained.get("crop_pct")
    if ratio:
        fields["crop_ratio"] = float(ratio)
    # timm's "center" is a crop of the shorter side, "squash" with a ratio a crop after squashing.
    crop = pretrained.get("crop_mode")
    if crop == "squash":
        fields["fit"] = "squash-crop" if fields.get("crop_ratio", 1) < 1 else "squash"
    elif crop or ratio:
        fields["fit"] = "crop"
        if crop not in (None, "center"):
            warnings.append(f"config.json: crop_mode {crop!r} is read as 'crop'")
    return fields, warnings


# The timm model that computes what a spec does: its name, its keywords, and its `config.json`.
#
# `architecture` names a function of timm, `model_args` are keywords for it, `pretrained_cfg` is the
# preprocessing (timm 1.0.31, models/_hub.py: `_parse_model_cfg`). timm reads such a folder with
# `timm.create_model("local-dir:FOLDER", pretrained=True)`.

PRESETS_UNKNOWN_TO_TIMM = (
    "vit_lite_*",
    "vit_cifar_*",
    "vit_mnist_*",
    "mae_vit_*",
    "vit_e_patch14_224",
    "vit_tiny_patch8_*",
    "vit_tiny_patch14_224",
    "vit_tiny_patch32_*",
    "vit_small_patch8_384",
    "vit_small_patch14_224",
    "vit_base_patch8_384",
    "vit_base_patch14_224",
    "vit_large_patch8_*",
    "vit_huge_patch8_*",
    "vit_huge_patch16_224",
    "vit_huge_patch16_384",
    "vit_huge_patch32_*",
)
_KEYWORDS = {
    "image_size": "img_size",
    "patch_size": "patch_size",
    "in_channels": "in_chans",
    "width": "embed_dim",
    "depth": "depth",
    "num_heads": "num_heads",
    "class_token": "class_token",
    "num_registers": "reg_tokens",
    "embedding_norm": "pre_norm",
    "qk_norm": "qk_norm",
    "activation": "act_layer",
    "rope_temperature": "rope_temperature",
    "final_norm": "final_norm",
}
"""Spec field -> keyword of timm's classes, with the same value."""
_EVA_KEYWORDS = {
    "reg_tokens": "num_reg_tokens",
    "pre_norm": "use_pre_transformer_norm",
    "fc_norm": "use_fc_norm",
}
"""Keyword of timm's `VisionTransformer` -> that of its `Eva`."""
_BY_NAME = (
    "distillation_token",
    "block",
    "norm",
    "norm_eps",
    "mlp",
    "resnet_layers",
    "head_width",
    "representation_width",
)
"""Spec fields that timm decides by the model's name; no keyword changes them."""


def is_eva(spec: ViTSpec) -> bool:
    """Return True if timm computes the model by its class `Eva`, with other names and keywords."""
    return spec.positions == "rope" or spec.qkv_bias == "no_key"


def timm_architecture(spec: ViTSpec) -> tuple[str, dict[str, Any]] | None:
    """Return the model of timm that computes what ours does, or None where there is none.

    Returns:
        Its name and `model_args`; of several models, the one with the fewest arguments.
    """
    found: list[tuple[str, dict[str, Any]]] = []
    if not _is_computed_by_timm(spec):
        return None
    # Any model of a class becomes another one by keywords, so all are compared.
    for name, base in _timm_presets().items():
        arguments = _model_args(base, spec)
        if arguments is not None:
            found.append((name, arguments))
    return min(found, key=lambda pair: len(pair[1]), default=None)


@functools.cache
def _timm_presets() -> dict[str, ViTSpec]:
    """Return the presets whose names timm knows."""
    ours_alone = re.compile("|".join(map(translate, PRESETS_UNKNOWN_TO_TIMM)))
    return {name: preset(name) for name in table() if not ours_alone.match(name)}


def _is_computed_by_timm(spec: ViTSpec) -> bool:
    """Return True if no field has a value that timm's classes never compute."""
    if is_eva(spec) and (spec.qkv_bias is True or spec.pooling == "mean_all"):
        return False
    # The convolution has no bias where a norm follows it; a ResNet's always has one.
    if spec.stem != "resnet" and spec.patch_bias == spec.embedding_norm:
        return False
    # Its split SwiGLU rounds the width to a multiple of 8.
    if spec.mlp == "swiglu_split" and spec.mlp_width % 8:
        return False
    return (
        spec.stem in ("convolution", "linear", "resnet")
        and spec.positions in ("learned", "none", "rope")
        and spec.pooling != "cls_mean"
    )


def _can_become(base: ViTSpec, spec: ViTSpec) -> bool:
    """Return True if two specs differ only in fields that `model_args` can change."""
    fixed = list(_BY_NAME)
    if spec.stem == "resnet":
        fixed += ["resnet_variant", "patch_size"]
    if is_eva(spec):
        fixed += ["positions", "activation", "final_norm", "qk_norm"]
    if spec.distillation_token:  # decided by timm's distilled class
        fixed += ["positions_cover_prefix", "num_registers"]
    same_class = (base.stem == "resnet", is_eva(base)) == (spec.stem == "resnet", is_eva(spec))
    return same_class and all(getattr(base, name) == getattr(spec, name) for name in fixed)


def _keywords(spec: ViTSpec) -> dict[str, Any]:
    """Return the keywords of `VisionTransformer` whose values are those of single fields."""
    return {
        **{keyword: getattr(spec, field) for field, keyword in _KEYWORDS.items()},
        "qkv_bias": bool(spec.qkv_bias),
        "pos_embed": "learn" if spec.positions == "learned" else "none",
        "global_pool": _global_pool(spec),
        "pool_include_prefix": spec.pooling == "mean_all",
    }


def _model_args(base: ViTSpec, spec: ViTSpec) -> dict[str, Any] | None:
    """Return the keywords that make timm's `base` the model of `spec`, or None."""
    if not _can_become(base, spec):
        return None
    before = _keywords(base)
    arguments = {name: value for name, value in _keywords(spec).items() if value != before[name]}
    if (base.width, base.mlp_width) != (spec.width, spec.mlp_width):
        arguments["mlp_ratio"] = _mlp_ratio(spec)
    has_prefix_rows = spec.num_prefix_tokens > 0 and spec.positions == "learned"
    if has_prefix_rows and base.positions_cover_prefix != spec.positions_cover_prefix:
        arguments["no_embed_class"] = not spec.positions_cover_prefix
    # Its initial value does not matter to weights that are there, only that it exists.
    if (base.layer_scale is None) != (spec.layer_scale is None):
        arguments["init_values"] = spec.layer_scale
    # timm derives fc_norm from the others, so it is stated beside any of them.
    moved = base.norm_before_pool != spec.norm_before_pool
    if moved or arguments.keys() & {"final_norm", "global_pool", "pool_include_prefix"}:
        arguments["fc_norm"] = not spec.norm_before_pool
    if is_eva(spec):
        return {_EVA_KEYWORDS.get(name, name): value for name, value in arguments.items()}
    return arguments


def _mlp_ratio(spec: ViTSpec) -> float:
    """Return `mlp_ratio`, of which timm takes int(width * ratio).

    A packed SwiGLU counts both halves.
    """
    hidden = spec.mlp_width
    if spec.mlp == "swiglu_packed":
        hidden *= 2
    ratio = hidden / spec.width
    if int(spec.width * ratio) == hidden:
        return ratio
    # The quotient was rounded down: half a unit more, which int() cuts off.
    return (hidden + 0.5) / spec.width


def _global_pool(spec: ViTSpec) -> str | None:
    """Return timm's name of a pooling; `mean_all` is "avg" with another keyword."""
    pooling: str = spec.pooling
    if pooling == "mean_all":
        pooling = "mean"
    return next((name for name, ours in other_names.POOLINGS.items() if ours == pooling), None)


def config_document(
    spec: ViTSpec, preprocess: Preprocess, classes: tuple[str, ...] = ()
) -> dict[str, Any]:
    """Return the `config.json` for a model; without `architecture` where timm has no equal one."""
    architecture = timm_architecture(spec)
    document: dict[str, Any] = {}
    if architecture is None:
        document["note"] = (
            "no model in timm's registry computes this; load the tensors into your own model"
        )
    else:
        document["architecture"] = architecture[0]
    document |= {"num_classes": spec.num_classes, "num_features": spec.width}
    global_pool = _global_pool(spec)
    if global_pool is not None:
        document["global_pool"] = global_pool
    if classes:
        document["label_names"] = list(classes)
    if architecture is not None and architecture[1]:
        document["model_args"] = architecture[1]
    document["pretrained_cfg"] = pretrained_config(spec, preprocess)
    return document
