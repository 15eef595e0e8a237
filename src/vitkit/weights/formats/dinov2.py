"""facebookresearch's DINOv2 files, and DINOv3's for reading.

`teacher_checkpoint.pth` of a training run, the hub's backbones with and without registers, and its
linear classifiers (`backbone.*`, `linear_head`) over class token and mean of the patches.

Their position table has one row for the class token and none for registers. With registers, ours
gets rows of zeros for them: the file can be written again with the same bits.
`positions_cover_prefix=False` adds the class row to the token instead, as timm does.
"""

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch

from vitkit.errors import CheckpointError
from vitkit.io.atomic import FileWriter
from vitkit.spec import ViTSpec
from vitkit.weights.files import Header, Shapes, Source
from vitkit.weights.formats import format as shared
from vitkit.weights.formats.format import COMMON, Bundle, Format, Inferred
from vitkit.weights.formats.keys import BLOCK, Parts, Table, Transform, row, token_rows

_PERIODS = "rope_embed.periods"
_DINOV2_PREPROCESS = shared.IMAGENET_MEAN.replace(interpolation="bicubic", crop_ratio=0.875)
_DINOV3_PREPROCESS = shared.IMAGENET_MEAN.replace(
    interpolation="bilinear", fit="squash", crop_ratio=1.0
)
_SATELLITE = (
    "weights trained on satellite images (SAT-493M) look the same and need mean (0.430, 0.411, "
    "0.296) and std (0.213, 0.156, 0.143)"
)
_ROUNDED = (
    "rope_embed.periods are rounded to bfloat16, as DINOv3 trains by default; vitkit computes them "
    "exactly, which changes tokens by about 2e-3 of their scale"
)
_IGNORED = (
    ("mask_token", "only masked training uses it"),
    ("dino_head.*", "the head of self-supervised training"),
    ("ibot_head.*", "the head of self-supervised training"),
    ("local_cls_norm.*", "only training on small crops uses it"),
)


def _plain(name: str) -> str:
    """Remove `backbone.`, and the chunk that FSDP puts before a block's number."""
    return re.sub(r"^blocks\.\d+\.(\d+)\.", r"blocks.\1.", name.removeprefix("backbone."))


def _detect(header: Header) -> bool:
    """Return True for timm's names with a (1, D) mask token, or with parts of these files alone."""
    shapes = {_plain(name): shape for name, shape in header.shapes.items()}
    if not {"cls_token", "patch_embed.proj.weight", "blocks.0.norm1.weight"} <= shapes.keys():
        return False
    # MAE's mask token has three axes, (1, 1, D).
    if len(shapes.get("mask_token", ())) == 2:
        return True
    own = {"register_tokens", "storage_tokens", _PERIODS, "blocks.0.mlp.w12.weight"}
    return not own.isdisjoint(shapes)


def _prepare(source: Source) -> Source:
    """Remove `backbone.` (training runs, classifiers) and chunks of blocks (sharded runs).

    Raises:
        CheckpointError: two tensors would get one name.
    """
    clash = "a block occurs twice, with and without the number of a chunk"
    source = source.renamed_by(_plain, clash=clash)
    if len(source.header.shapes.get(_PERIODS, ())) != 1:
        return source
    # DINOv3's angles: 100^(i / n) for the n periods of a head.
    periods = source[_PERIODS].double()
    usual = 100.0 ** (torch.arange(len(periods), dtype=torch.float64) / len(periods))
    if torch.allclose(periods, usual, rtol=1e-5, atol=0):
        return source
    return source.replaced(source.tensors, _ROUNDED)


def _infer(header: Header, overrides: Mapping[str, Any]) -> Inferred:
    """Infer everything from shapes, except epsilon, activation and (DINOv2) number of heads."""
    shapes = header.shapes
    is_dinov3 = _PERIODS in shapes
    width = shapes["cls_token"][-1]
    # A classifier reads the class token beside the mean of the patches: (K, 2 D).
    num_classes, head_inputs = shapes.get("linear_head.weight", (0, 2 * width))
    if head_inputs != 2 * width:
        raise CheckpointError(
            f"linear_head reads {head_inputs} features, from several layers; use the one-layer "
            f"classifier, which reads {2 * width}"
        )
    registers_name = "register_tokens"
    if is_dinov3:
        registers_name = "storage_tokens"
    fields: dict[str, Any] = {
        "num_registers": shapes.get(registers_name, (1, 0))[1],  # (1, R, D)
        "pooling": "cls_mean" if num_classes else "cls",
        "layer_scale": 1e-5 if "blocks.0.ls1.gamma" in shapes else None,
        "qkv_bias": "blocks.0.attn.qkv.bias" in shapes,
    }
    usual = ["layer_scale", *shared.FIXED_BY_CODE, "preprocess", "image_size"]
    if is_dinov3:
        fields |= _dinov3_fields(shapes) | {"num_classes": num_classes}
        warnings = (_SATELLITE,) if width in (1024, 4096) else ()
        return shared.finish(fields, overrides, _DINOV3_PREPROCESS, usual=usual, warnings=warnings)
    fields |= shared.plain_fields(
        shapes,
        overrides.get("image_size"),
        kernel="patch_embed.proj.weight",
        positions="pos_embed",
        block=BLOCK,
        head="linear_head.weight",
        mlp="mlp.fc1",
        packed="mlp.w12",
        gate="mlp.w1",
    )
    fields["position_resampling"] = (
        "bicubic_antialias" if fields["num_registers"] else "bicubic_offset"
    )
    return shared.finish(fields, overrides, _DINOV2_PREPROCESS, usual=[*usual, "num_heads"])


def _dinov3_fields(shapes: Shapes) -> dict[str, Any]:
    """Return the fields of DINOv3: one period for every four numbers of a head."""
    width, channels, *patch = shapes["patch_embed.proj.weight"]  # (D, C, P, P)
    fields = {
        # Without a table nothing shows the size: the one of most published models.
        "image_size": tuple(224 // side * side for side in patch),
        "patch_size": tuple(patch),
        "in_channels": channels,
        "width": width,
        "depth": shared.depth_of(shapes, BLOCK),
        "num_heads": width // (4 * shapes[_PERIODS][0]),
        "positions": "rope",
        "norm_eps": 1e-5,
        **shared.mlp_fields(shapes, "blocks.0.mlp.fc1.weight", gate="blocks.0.mlp.w1.weight"),
    }
    if "blocks.0.attn.qkv.bias_mask" in shapes:
        fields["qkv_bias"] = "no_key"
    return fields


_MLP_LAYERS = {
    "plain": {"fc1": "fc1", "fc2": "fc2"},
    "swiglu_packed": {"w12": "fc1", "w3": "fc2"},
    "swiglu_split": {"w1": "fc1_g", "w2": "fc1_x", "w3": "fc2"},
}
"""Kind of MLP -> their name of each layer -> ours."""


def _table(spec: ViTSpec) -> Table:
    """Return a table of our names, but for the MLP, the head, and DINOv3's masked biases."""
    is_dinov3 = spec.positions == "rope"
    tokens = {"cls_token": "cls_token", "reg_token": "register_tokens"}
    rows = [row("linear_head.{p}", "head.{p}")]
    for theirs, ours in _MLP_LAYERS[spec.mlp].items():
        rows.append(row(f"{BLOCK}mlp.{theirs}.{{p}}", f"{BLOCK}mlp.{ours}.{{p}}"))
    if is_dinov3:  # which can be read and not written
        tokens["reg_token"] = "storage_tokens"
        bias = f"{BLOCK}attn.qkv."
        parts, ours_of = ("bias", "bias_mask"), ("q_bias", "v_bias")
        unmasked = Transform(_without_key_bias)
        rows.append(row(_PERIODS, (), Transform(_checked_periods)))
        rows.append(row([bias + x for x in parts], [bias + x for x in ours_of], unmasked))
    return Table((*token_rows(spec, tokens, "pos_embed"), *rows), _IGNORED, same_names=True)


def _checked_periods(parts: Parts, spec: ViTSpec) -> Parts:
    """Compare stored periods, in bfloat16 at worst, with those that the model computes."""
    # h/4 periods temperature^(i / (h/4)), one for every four numbers of a head.
    stored = parts[0].double()
    exponents = torch.arange(len(stored), dtype=torch.float64) / len(stored)
    if not torch.allclose(stored, spec.rope_temperature**exponents, rtol=1e-2, atol=0):
        raise CheckpointError(f"{_PERIODS} do not match rope_temperature {spec.rope_temperature:g}")
    return ()


def _without_key_bias(parts: Parts, spec: ViTSpec) -> Parts:
    bias, mask = parts
    # The bias may hold NaN where the mask is 0, so it is not multiplied there.
    query, key, value = torch.where(mask == 0, torch.zeros_like(bias), bias * mask).chunk(3)
    if key.any():
        raise CheckpointError("bias_mask keeps a bias of the keys; expected zeros")
    return query, value


def _write(bundle: Bundle) -> dict[str, FileWriter]:
    """Return one file with the names of the hub's backbone or one-layer classifier."""
    if bundle.spec.pooling == "cls_mean" and not bundle.spec.num_classes:
        raise CheckpointError("its models without a head return the class token (pooling 'cls')")
    # Their strict loading needs the token, which only masked training uses.
    tensors = {**bundle.tensors, "mask_token": torch.zeros(1, bundle.spec.width)}
    if bundle.spec.num_classes:
        tensors = shared.with_prefix(tensors, "backbone.", but="linear_head")
    return {shared.WEIGHTS_FILE: shared.bundle_writer(replace(bundle, tensors=tensors))}


_SHARED: dict[str, Any] = {
    **COMMON,
    "distillation_token": False,
    "norm_eps": 1e-6,
    "qkv_bias": (True, False),
    "representation_width": None,
}
_PLAIN = {"activation": "gelu", "mlp": "plain"}
_PACKED = {"activation": "silu", "mlp": "swiglu_packed"}
DINOV2 = Format(
    name="dinov2",
    detect=_detect,
    infer=_infer,
    prepare=_prepare,
    table=_table,
    # Backbones, and classifiers.
    capabilities=(
        {**_SHARED, **_PLAIN, "num_classes": 0, "pooling": "cls"},
        {**_SHARED, **_PLAIN, "pooling": "cls_mean"},
        {**_SHARED, **_PACKED, "num_classes": 0, "pooling": "cls"},
        {**_SHARED, **_PACKED, "pooling": "cls_mean"},
    ),
    write=_write,
    fixed=shared.FIXED_BY_CODE,
    settle=shared.fold_register_positions,
)
