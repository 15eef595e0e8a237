"""The timm model that computes what a spec does: its name, its keywords, and its `config.json`.

`architecture` names a function of timm, `model_args` are keywords for it, `pretrained_cfg` is the
preprocessing (timm 1.0.31, models/_hub.py: `_parse_model_cfg`). timm reads such a folder with
`timm.create_model("local-dir:FOLDER", pretrained=True)`.
"""

from __future__ import annotations

import functools
from fnmatch import fnmatchcase
from typing import Any

from vitkit.models.interface.pretrained import pretrained_config
from vitkit.models.presets import preset, table
from vitkit.other_names import POOLINGS
from vitkit.spec import Preprocess, ViTSpec

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
_SAME_VALUES = {
    "depth": "depth",
    "num_heads": "num_heads",
    "in_channels": "in_chans",
    "class_token": "class_token",
    "qk_norm": "qk_norm",
}
"""Spec field -> keyword of timm's classes, with the same value."""
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
    best: tuple[str, dict[str, Any]] | None = None
    # Any model of a class becomes another one by keywords, so all are compared.
    for name, base in _timm_presets().items():
        arguments = _model_args(base, spec)
        if arguments is not None and (best is None or len(arguments) < len(best[1])):
            best = (name, arguments)
            if not arguments:  # equal as it is: no other can have fewer
                break
    return best


@functools.cache
def _timm_presets() -> dict[str, ViTSpec]:
    """Return the presets whose names timm knows."""
    return {name: preset(name) for name in table() if not _is_ours_alone(name)}


def _is_ours_alone(name: str) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in PRESETS_UNKNOWN_TO_TIMM)


def _can_become(base: ViTSpec, spec: ViTSpec) -> bool:
    """Return True if two specs differ only in fields that `model_args` can change."""
    fixed = list(_BY_NAME)
    if spec.stem == "resnet":
        fixed += ["resnet_variant", "patch_size"]
    if is_eva(spec):
        fixed += ["positions", "activation", "final_norm", "qk_norm"]
    if spec.distillation_token:  # decided by timm's distilled class
        fixed += ["positions_cover_prefix", "num_registers"]
    if any(getattr(base, name) != getattr(spec, name) for name in fixed):
        return False
    same_stem = (base.stem == "resnet") == (spec.stem == "resnet")
    return same_stem and is_eva(base) == is_eva(spec) and _is_computed_by_timm(spec)


def _is_computed_by_timm(spec: ViTSpec) -> bool:
    """Return True if no field has a value that timm's classes never compute."""
    poolings = list(POOLINGS.values())
    if is_eva(spec):
        if spec.qkv_bias is True:
            return False
    else:
        poolings.append("mean_all")
    # The convolution has no bias where a norm follows it; a ResNet's always has one.
    patch_bias = spec.patch_bias != spec.embedding_norm or spec.stem == "resnet"
    # Its split SwiGLU rounds the width to a multiple of 8.
    mlp_width = spec.mlp != "swiglu_split" or spec.mlp_width % 8 == 0
    return (
        spec.stem in ("convolution", "linear", "resnet")
        and spec.positions in ("learned", "none", "rope")
        and spec.pooling in poolings
        and patch_bias
        and mlp_width
    )


def _model_args(base: ViTSpec, spec: ViTSpec) -> dict[str, Any] | None:
    """Return the keywords that make timm's `base` the model of `spec`, or None."""
    if not _can_become(base, spec):
        return None
    differing = {name for name, value in vars(base).items() if value != getattr(spec, name)}
    arguments: dict[str, Any] = {}
    for field, keyword in _SAME_VALUES.items():
        if field in differing:
            arguments[keyword] = getattr(spec, field)
    if "image_size" in differing:
        arguments["img_size"] = list(spec.image_size)
    if "patch_size" in differing:
        arguments["patch_size"] = list(spec.patch_size)
    if "width" in differing:
        arguments["embed_dim"] = spec.width
    if differing & {"width", "mlp_width"}:
        arguments["mlp_ratio"] = _mlp_ratio(spec)
    return arguments | _encoder_args(base, spec, differing) | _readout_args(base, spec)


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


def _encoder_args(base: ViTSpec, spec: ViTSpec, differing: set[str]) -> dict[str, Any]:
    """Return the keywords for tokens, positions and blocks; `Eva` has other names for some."""
    eva = is_eva(spec)
    arguments: dict[str, Any] = {}
    if "num_registers" in differing:
        arguments["num_reg_tokens" if eva else "reg_tokens"] = spec.num_registers
    has_prefix_rows = spec.num_prefix_tokens > 0 and spec.positions == "learned"
    if "positions_cover_prefix" in differing and has_prefix_rows:
        arguments["no_embed_class"] = not spec.positions_cover_prefix
    if "qkv_bias" in differing:
        arguments["qkv_bias"] = bool(spec.qkv_bias)
    # Its initial value does not matter to weights that are there, only that it exists.
    if (base.layer_scale is None) != (spec.layer_scale is None):
        arguments["init_values"] = spec.layer_scale
    if "embedding_norm" in differing:
        arguments["use_pre_transformer_norm" if eva else "pre_norm"] = spec.embedding_norm
    if "activation" in differing:
        arguments["act_layer"] = spec.activation
    if "positions" in differing:
        arguments["pos_embed"] = "learn" if spec.positions == "learned" else "none"
    if "rope_temperature" in differing and spec.positions == "rope":
        arguments["rope_temperature"] = spec.rope_temperature
    return arguments


def _readout_args(base: ViTSpec, spec: ViTSpec) -> dict[str, Any]:
    """Return the keywords for pooling and the norms around it."""
    arguments: dict[str, Any] = {}
    if base.pooling != spec.pooling:
        arguments["global_pool"] = _global_pool(spec)
    if spec.pooling == "mean_all":
        arguments["pool_include_prefix"] = True
    if base.final_norm != spec.final_norm:
        arguments["final_norm"] = spec.final_norm
    # timm derives fc_norm from the others, so it is stated beside any of them.
    if arguments or base.norm_before_pool != spec.norm_before_pool:
        keyword = "use_fc_norm" if is_eva(spec) else "fc_norm"
        arguments[keyword] = not spec.norm_before_pool
    return arguments


def _global_pool(spec: ViTSpec) -> str | None:
    """Return timm's name of a pooling; `mean_all` is "avg" with another keyword."""
    pooling: str = spec.pooling
    if pooling == "mean_all":
        pooling = "mean"
    return next((name for name, ours in POOLINGS.items() if ours == pooling), None)


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
