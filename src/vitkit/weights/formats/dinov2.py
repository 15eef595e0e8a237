"""facebookresearch's DINOv2 files, and DINOv3's for reading.

`teacher_checkpoint.pth` of a training run, the hub's backbones with and without registers, and its
linear classifiers (`backbone.*`, `linear_head`) over class token and mean of the patches.

Their position table has one row for the class token and none for registers. With registers, ours
gets rows of zeros for them: the file can be written again with the same bits.
`positions_cover_prefix=False` adds the class row to the token instead, as timm does.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

import torch

from vitkit.errors import CheckpointError
from vitkit.io.atomic import FileWriter
from vitkit.spec import ViTSpec
from vitkit.weights.formats.format import (
    FIXED_BY_CODE,
    WEIGHTS_FILE,
    Bundle,
    Capabilities,
    Format,
    bundle_writer,
    with_prefix,
)
from vitkit.weights.formats.infer_spec import IMAGENET_MEAN, Inferred, depth_of, finish, image_size
from vitkit.weights.formats.key_table import KeyTransform, Row, Table, TensorParts, row
from vitkit.weights.formats.unwrapping import fold_register_positions
from vitkit.weights.tensor_file import Header, Shapes, Source

_BLOCK = "blocks.{i}."
_PERIODS = "rope_embed.periods"
_DINOV2_PREPROCESS = IMAGENET_MEAN.replace(interpolation="bicubic", crop_ratio=0.875)
_DINOV3_PREPROCESS = IMAGENET_MEAN.replace(interpolation="bilinear", fit="squash", crop_ratio=1.0)
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
    return source.with_note(_ROUNDED) if _has_rounded_periods(source) else source


def _has_rounded_periods(source: Source) -> bool:
    """Return True if the periods of DINOv3 are the usual ones, rounded to bfloat16."""
    if len(source.header.shapes.get(_PERIODS, ())) != 1:
        return False
    periods = source[_PERIODS].double()
    # DINOv3's angles: 100^(i / n) for the n periods of a head.
    usual = 100.0 ** (torch.arange(len(periods), dtype=torch.float64) / len(periods))
    near = torch.allclose(periods, usual, rtol=1e-5, atol=0)
    return not near and torch.equal(periods, periods.bfloat16().double())


def _infer(header: Header, overrides: Mapping[str, Any]) -> Inferred:
    """Infer everything from shapes, except epsilon, activation and (DINOv2) number of heads."""
    shapes = header.shapes
    is_dinov3 = _PERIODS in shapes
    width, channels, *patch = shapes["patch_embed.proj.weight"]  # (D, C, P, P)
    registers_name = "storage_tokens" if is_dinov3 else "register_tokens"
    registers = shapes.get(registers_name, (1, 0, width))[1]  # (1, R, D)
    # A classifier reads the class token beside the mean of the patches: (K, 2 D).
    num_classes, head_inputs = shapes.get("linear_head.weight", (0, 2 * width))
    if head_inputs != 2 * width:
        raise CheckpointError(
            f"linear_head reads {head_inputs} features, from several layers; use the one-layer "
            f"classifier, which reads {2 * width}"
        )
    fields = {
        "patch_size": tuple(patch),
        "in_channels": channels,
        "width": width,
        "depth": depth_of(shapes, r"blocks\.(\d+)\."),
        **_mlp_fields(shapes),
        "num_registers": registers,
        "num_classes": num_classes,
        "pooling": _pooling(reads_mean=num_classes > 0),
        "layer_scale": 1e-5 if "blocks.0.ls1.gamma" in shapes else None,
    }
    usual = [
        "layer_scale",
        "norm_eps",
        "activation",
        "preprocess",
        "position_resampling",
        "image_size",
    ]
    if is_dinov3:
        fields |= _dinov3_fields(shapes, width)
        warnings = (_SATELLITE,) if width in (1024, 4096) else ()
        return finish(fields, overrides, _DINOV3_PREPROCESS, usual=usual, warnings=warnings)
    fields |= _dinov2_fields(shapes, width, registers, overrides)
    return finish(fields, overrides, _DINOV2_PREPROCESS, usual=[*usual, "num_heads"])


def _pooling(reads_mean: bool) -> str:
    """Return the pooling of a classifier, which reads the mean besides, or of a backbone."""
    return "cls_mean" if reads_mean else "cls"


def _mlp_fields(shapes: Shapes) -> dict[str, Any]:
    """Return kind and width of the MLP; a packed SwiGLU has gate and value in one matrix."""
    packed = shapes.get("blocks.0.mlp.w12.weight")
    if packed:
        return {"mlp": "swiglu_packed", "activation": "silu", "mlp_width": packed[0] // 2}
    split = shapes.get("blocks.0.mlp.w1.weight")
    if split:
        return {"mlp": "swiglu_split", "activation": "silu", "mlp_width": split[0]}
    return {"mlp_width": shapes["blocks.0.mlp.fc1.weight"][0]}


def _dinov2_fields(
    shapes: Shapes, width: int, registers: int, overrides: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the fields of DINOv2: a learned table; all published heads are 64 wide."""
    patch = shapes["patch_embed.proj.weight"][2:]
    rows = shapes["pos_embed"][1]  # (1, 1 + N, D)
    return {
        "image_size": image_size(rows, 1, (patch[0], patch[1]), overrides.get("image_size")),
        "num_heads": max(1, width // 64),
        "qkv_bias": "blocks.0.attn.qkv.bias" in shapes,
        "position_resampling": _resampling_with(registers),
    }


def _dinov3_fields(shapes: Shapes, width: int) -> dict[str, Any]:
    """Return the fields of DINOv3: one period for every four numbers of a head."""
    patch = shapes["patch_embed.proj.weight"][2:]
    qkv_bias: bool | str = "blocks.0.attn.qkv.bias" in shapes
    if "blocks.0.attn.qkv.bias_mask" in shapes:
        qkv_bias = "no_key"
    return {
        # Without a table nothing shows the size: the one of most published models.
        "image_size": tuple(224 // side * side for side in patch),
        "num_heads": width // (4 * shapes[_PERIODS][0]),
        "positions": "rope",
        "norm_eps": 1e-5,
        "qkv_bias": qkv_bias,
    }


def _same(names: Iterable[str]) -> list[Row]:
    """Return rows of names that are the same on both sides."""
    return [row(name, name) for name in names]


_MLP_LAYERS = {
    "plain": (("fc1", "fc1"), ("fc2", "fc2")),
    "swiglu_packed": (("w12", "fc1"), ("w3", "fc2")),
    "swiglu_split": (("w1", "fc1_g"), ("w2", "fc1_x"), ("w3", "fc2")),
}
"""Kind of MLP -> (their name, ours) of each layer."""


def _table(spec: ViTSpec) -> Table:
    """Return a renaming, with transforms for positions and for DINOv3's masked biases."""
    rows = _rotary_rows() if spec.positions == "rope" else _position_rows(spec)
    rows += _same(["cls_token", "patch_embed.proj.{p}", "norm.{p}"])
    rows += _same(f"{_BLOCK}{name}.{{p}}" for name in ("norm1", "attn.qkv", "attn.proj", "norm2"))
    rows += _same(f"{_BLOCK}{name}.gamma" for name in ("ls1", "ls2"))
    for theirs, ours in _MLP_LAYERS[spec.mlp]:
        rows.append(row(f"{_BLOCK}mlp.{theirs}.{{p}}", f"{_BLOCK}mlp.{ours}.{{p}}"))
    rows.append(row("linear_head.{p}", "head.{p}"))
    return Table(tuple(rows), _IGNORED)


def _position_rows(spec: ViTSpec) -> list[Row]:
    """Map DINOv2's (1, 1 + N, D) position rows to vitkit's, with and without prefix rows.

    DINOv2 has a row for the class token; vitkit may have none, or rows for registers as well.
    """
    registers = row("register_tokens", "reg_token")
    if not spec.positions_cover_prefix:
        # Ours has no class row: theirs is added to the token, and written as zeros.
        names = ["cls_token", "pos_embed"]
        return [row(names, names, KeyTransform(_class_row_added, _class_row_zero)), registers]
    if spec.num_registers:
        # Ours has R rows more: zeros when read, added to the registers when written.
        rows = KeyTransform(_register_rows_zero, _register_rows_added)
        return [row(["pos_embed", "register_tokens"], ["pos_embed", "reg_token"], rows)]
    return _same(["pos_embed"])


def _class_row_added(parts: TensorParts, spec: ViTSpec) -> TensorParts:
    token, positions = parts
    return token + positions[:, :1], positions[:, 1:]


def _class_row_zero(parts: TensorParts, spec: ViTSpec) -> TensorParts:
    token, positions = parts
    return token, torch.cat([torch.zeros_like(token), positions], dim=1)


def _register_rows_zero(parts: TensorParts, spec: ViTSpec) -> TensorParts:
    positions, registers = parts
    rows = [positions[:, :1], torch.zeros_like(registers), positions[:, 1:]]
    return torch.cat(rows, dim=1), registers


def _register_rows_added(parts: TensorParts, spec: ViTSpec) -> TensorParts:
    positions, registers = parts
    first, rows, patches = positions.tensor_split([1, 1 + spec.num_registers], dim=1)  # 1, R, N
    return torch.cat([first, patches], dim=1), registers + rows


def _rotary_rows() -> list[Row]:
    """Return the rows of DINOv3 alone, which can be read and not written."""
    bias = f"{_BLOCK}attn.qkv."
    return [
        row(_PERIODS, (), KeyTransform(_checked_periods, _read_only)),
        row("storage_tokens", "reg_token", KeyTransform(lambda parts, spec: parts, _read_only)),
        row(
            [f"{bias}bias", f"{bias}bias_mask"],
            [f"{bias}q_bias", f"{bias}v_bias"],
            KeyTransform(_without_key_bias, _read_only),
        ),
    ]


def _checked_periods(parts: TensorParts, spec: ViTSpec) -> TensorParts:
    """Compare stored periods, in bfloat16 at worst, with those that the model computes."""
    # h/4 periods temperature^(i / (h/4)), one for every four numbers of a head.
    stored = parts[0].double()
    exponents = torch.arange(len(stored), dtype=torch.float64) / len(stored)
    if not torch.allclose(stored, spec.rope_temperature**exponents, rtol=1e-2, atol=0):
        raise CheckpointError(f"{_PERIODS} do not match rope_temperature {spec.rope_temperature:g}")
    return ()


def _without_key_bias(parts: TensorParts, spec: ViTSpec) -> TensorParts:
    bias, mask = parts
    # The bias may hold NaN where the mask is 0, so it is not multiplied there.
    query, key, value = torch.where(mask == 0, torch.zeros_like(bias), bias * mask).chunk(3)
    if key.any():
        raise CheckpointError("bias_mask keeps a bias of the keys; expected zeros")
    return query, value


def _read_only(parts: TensorParts, spec: ViTSpec) -> TensorParts:
    raise CheckpointError(
        "DINOv3's own layout can be read but not written; convert to another format"
    )


def _write(bundle: Bundle) -> dict[str, FileWriter]:
    """Return one file with the names of the hub's backbone or one-layer classifier."""
    spec = bundle.spec
    if spec.positions == "rope":  # DINOv3
        _read_only((), spec)
    if spec.mlp == "plain" and spec.activation != "gelu":
        raise CheckpointError(f"activation {spec.activation!r} cannot be stored with a plain MLP")
    reads_mean = spec.num_classes > 0
    if spec.pooling != _pooling(reads_mean):
        raise CheckpointError(
            "its classifiers read class token and mean side by side (pooling 'cls_mean'), and "
            "models without a head return the class token (num_classes=0)"
        )
    # Their strict loading needs the token, which only masked training uses.
    tensors = {**bundle.tensors, "mask_token": torch.zeros(1, spec.width)}
    if spec.num_classes:
        tensors = with_prefix(tensors, "backbone.", but="linear_head")
    return {WEIGHTS_FILE: bundle_writer(replace(bundle, tensors=tensors))}


def _resampling(spec: ViTSpec) -> str:
    """Return the resampling that its backbones do when they run."""
    return _resampling_with(spec.num_registers)


def _resampling_with(registers: int) -> str:
    return "bicubic_antialias" if registers else "bicubic_offset"


_SHARED: dict[str, Any] = {
    "stem": ("convolution", "linear"),
    "patch_bias": (True,),
    "class_token": (True,),
    "distillation_token": (False,),
    "positions": ("learned",),
    "positions_cover_prefix": (True,),
    "embedding_norm": (False,),
    "block": ("pre_norm",),
    "norm": ("layer",),
    "norm_eps": (1e-6,),
    "activation": ("gelu", "silu"),
    "mlp": ("plain", "swiglu_packed"),
    "qkv_bias": (True, False),
    "qk_norm": (False,),
    "final_norm": (True,),
    "norm_before_pool": (True,),
    "representation_width": (None,),
    "head_width": (None,),
}
_CAPABILITIES: tuple[Capabilities, ...] = (
    {**_SHARED, "num_classes": (0,), "pooling": ("cls",)},
    {**_SHARED, "pooling": ("cls_mean",)},
)
"""Backbones, and classifiers."""
DINOV2 = Format(
    name="dinov2",
    detect=_detect,
    prepare=_prepare,
    infer=_infer,
    table=_table,
    capabilities=_CAPABILITIES,
    write=_write,
    fixed=FIXED_BY_CODE,
    settle=fold_register_positions,
    resampling=_resampling,
)
