"""Reading timm's `config.json`, and the model's name in its training checkpoints."""

from __future__ import annotations

import re
from collections.abc import Mapping
from fnmatch import fnmatchcase
from typing import Any, NamedTuple

from vitkit.errors import CheckpointError
from vitkit.models.presets import preset, table
from vitkit.other_names import POOLINGS, TIMM_KEYWORDS
from vitkit.weights.files.source import Header
from vitkit.weights.formats.infer_spec import as_pair, how_to_state

EQUAL_PRESETS = {
    "vit_so400m_patch14_siglip_384": "vit_so400m_patch14_siglip_378",
    "vit_so400m_patch14_siglip_gap_384": "vit_so400m_patch14_siglip_gap_378",
}
"""timm's name -> preset of the same 27 x 27 patches of 14, which cover 378 of 384 pixels."""
TIMM_ACTIVATIONS = ("gelu", "gelu_tanh", "quick_gelu", "relu", "silu")
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
_UNDERSTOOD = frozenset(TIMM_KEYWORDS) | frozenset(
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
        fields: fields of `ViTSpec`.
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
    """Return the `config.json` beside a file, else a training checkpoint's own statement."""
    config = header.documents.get("config", {})
    return config if "architecture" in config else {**header.stated, **config}


def origin_of(header: Header) -> str:
    """Return `config.json` or `arch`, the origin of the model's name, for messages."""
    is_beside = "architecture" in header.documents.get("config", {})
    return "config.json" if is_beside or not header.stated else "arch"


def architecture_name(config: Mapping[str, Any]) -> str | None:
    """Return the model's name without the tag of its weights; of two equal models, the preset."""
    name = config.get("architecture")
    if not isinstance(name, str):
        return None
    # "vit_base_patch16_224.augreg_in1k" -> "vit_base_patch16_224"
    name = name.partition(".")[0]
    return EQUAL_PRESETS.get(name, name)


def read_statement(
    config: Mapping[str, Any], overrides: Mapping[str, Any], origin: str = "config.json"
) -> StatedModel:
    """Return the model that a document describes; an empty description where it is not timm's.

    Args:
        config: the document.
        overrides: spec fields of the caller; positions among them settle what a name leaves open.
        origin: origin of the name: `config.json`, or `arch` of a training checkpoint.

    Raises:
        CheckpointError: a model that vitkit does not know and that the caller does not declare
            plain; positions, a pooling or an activation that vitkit does not compute.
    """
    name = architecture_name(config)
    if name is None:
        return StatedModel({}, {})
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
    fields |= _fields_of_arguments(arguments, origin)
    pool = arguments.get("global_pool") or config.get("global_pool")
    if pool is not None:
        fields["pooling"] = _pooling(pool, arguments, origin)
    unknown = sorted(set(arguments) - _UNDERSTOOD)
    if unknown:
        warnings.append(f"{origin}: model_args not supported: {', '.join(unknown)}")
    preprocess, image_warnings = _preprocess_fields(pretrained)
    label_names = config.get("label_names") or pretrained.get("label_names") or ()
    classes, class_warnings = _class_names(label_names)
    all_warnings = (*warnings, *image_warnings, *class_warnings)
    return StatedModel(fields, preprocess, classes, width, all_warnings)


def _refuse_unknown_model(name: str, overrides: Mapping[str, Any], origin: str) -> None:
    """Refuse a model of timm that may compute more than its tensors show."""
    # Their tensors are those of a plain ViT: read as one, they would give wrong logits.
    if any(fnmatchcase(name, pattern) for pattern in _ROTARY):
        raise CheckpointError(f"{origin}: {name} has rotary positions that are not supported")
    if "positions" not in overrides and _TIMM_NAMES[origin].fullmatch(name):
        raise CheckpointError(
            f"{origin}: {name} is not a known model, and tensors do not show everything a model "
            f"computes; if it is a plain ViT, {how_to_state('positions', 'learned')}"
        )


def _pooling(pool: Any, arguments: Mapping[str, Any], origin: str) -> str:
    if pool not in POOLINGS:
        raise CheckpointError(f"{origin}: global_pool {pool!r} is none of {list(POOLINGS)}")
    if pool == "avg" and arguments.get("pool_include_prefix"):
        return "mean_all"
    return POOLINGS[pool]


def _class_names(names: Any) -> tuple[tuple[str, ...], list[str]]:
    """Return the class names in the order of the logits, or none and a warning."""
    if isinstance(names, Mapping):  # number -> name, as transformers writes it
        by_number = {str(number): name for number, name in names.items()}
        numbers = list(map(str, range(len(names))))
        if set(by_number) != set(numbers):
            warning = "config.json: label_names lacks the numbers of the classes and is left out"
            return (), [warning]
        names = list(map(by_number.__getitem__, numbers))
    if not isinstance(names, list | tuple):
        raise CheckpointError(
            f"config.json: label_names is {type(names).__name__}; expected a list of class names"
        )
    return tuple(map(str, names)), []


def _fields_of_arguments(arguments: Mapping[str, Any], origin: str) -> dict[str, Any]:
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
    activation = arguments.get("act_layer")
    if activation is not None:
        if activation not in TIMM_ACTIVATIONS:
            known = ", ".join(TIMM_ACTIVATIONS)
            raise CheckpointError(f"{origin}: act_layer {activation!r} is none of {known}")
        fields["activation"] = activation
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
    crop = pretrained.get("crop_mode") or "center"
    if pretrained.get("crop_mode") or ratio:
        if crop != "squash":
            fields["fit"] = "crop"
        elif fields.get("crop_ratio", 1) < 1:
            fields["fit"] = "squash-crop"
        else:
            fields["fit"] = "squash"
    if crop not in ("center", "squash"):
        warnings.append(f"config.json: crop_mode {crop!r} is read as {fields['fit']!r}")
    return fields, warnings
