"""facebookresearch's DINOv2 files, and DINOv3's for reading.

`teacher_checkpoint.pth` of a training run, the hub's backbones with and without registers, and its
linear classifiers (`backbone.*`, `linear_head`) over class token and mean of the patches.

Their position table has one row for the class token and none for registers. With registers, ours
gets rows of zeros there: the file comes back with the same bits. `positions_cover_prefix=False`
adds the class row to the token instead, as timm does: the same sum, made once.
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
from vitkit.weights.converting.fold import Capabilities, registers_take_their_rows
from vitkit.weights.files.open import Header, Source
from vitkit.weights.formats.format import CODE, Bundle, Format, Inferred, safetensors_file
from vitkit.weights.formats.infer_spec import IMAGENET, depth_of, finish, image_size
from vitkit.weights.formats.key_table import Parts, Row, Table, Transform, row

BLOCK = "blocks.{i}."
PERIODS = "rope_embed.periods"
V2 = IMAGENET.replace(interpolation="bicubic", crop_ratio=0.875)
V3 = IMAGENET.replace(interpolation="bilinear", fit="squash", crop_ratio=1.0)
SATELLITE = (
    "weights trained on satellite images (SAT-493M) look like these and want mean "
    "(0.430, 0.411, 0.296) and std (0.213, 0.156, 0.143)"
)
ROUNDED = (
    "rope_embed.periods are rounded to bfloat16, as DINOv3 trains by default; vitkit computes them "
    "exactly, which changes tokens by about 2e-3 of their scale"
)
ASIDE = (
    ("mask_token", "only masked training uses it"),
    ("dino_head.*", "the head of self-supervised training"),
    ("ibot_head.*", "the head of self-supervised training"),
    ("local_cls_norm.*", "only training on small crops uses it"),
)


def _plain(name: str) -> str:
    """A name without `backbone.`, and without the chunk that FSDP puts before a block's number."""
    return re.sub(r"^blocks\.\d+\.(\d+)\.", r"blocks.\1.", name.removeprefix("backbone."))


def detect(header: Header) -> bool:
    """timm's names, with the (1, D) mask token or what only these files have."""
    shapes = {_plain(name): shape for name, shape in header.shapes.items()}
    if not {"cls_token", "patch_embed.proj.weight", "blocks.0.norm1.weight"} <= shapes.keys():
        return False
    own = ("register_tokens", "storage_tokens", PERIODS, "blocks.0.mlp.w12.weight")
    return len(shapes.get("mask_token", ())) == 2 or any(name in shapes for name in own)


def prepare(source: Source) -> Source:
    """Training runs and classifiers say `backbone.`, sharded runs the chunk of each block.

    Raises:
        CheckpointError: two tensors that come to bear one name.
    """
    names = {name: _plain(name) for name in source}
    if len(set(names.values())) < len(names):
        raise CheckpointError("a block is there twice, with and without the number of a chunk")
    notes = [ROUNDED] if _rounded_periods(source, names) else []
    changed = notes or any(old != new for old, new in names.items())
    return source.renamed(names, *notes) if changed else source


def _rounded_periods(source: Source, names: Mapping[str, str]) -> bool:
    """Whether the periods of DINOv3 are the usual ones, rounded to bfloat16."""
    found = next((old for old, new in names.items() if new == PERIODS), None)
    if found is None or len(source.header.shapes[found]) != 1:
        return False
    periods = source[found].double()
    usual = 100.0 ** (torch.arange(len(periods), dtype=torch.float64) / len(periods))
    near = torch.allclose(periods, usual, rtol=1e-5, atol=0)
    return not near and torch.equal(periods, periods.bfloat16().double())


def infer(header: Header, overrides: Mapping[str, Any]) -> Inferred:
    """Everything but heads (v2), epsilon and activation follows from shapes."""
    shapes = header.shapes
    third = PERIODS in shapes
    width, channels, *patch = shapes["patch_embed.proj.weight"]
    registers = shapes.get("storage_tokens" if third else "register_tokens", (1, 0, width))[1]
    head = shapes.get("linear_head.weight", (0, 2 * width))
    if head[1] != 2 * width:
        raise CheckpointError(
            f"linear_head reads {head[1]} numbers, of more than the last layer; take the one-layer "
            f"classifier, which reads {2 * width}"
        )
    fields = {
        "patch_size": tuple(patch), "in_channels": channels, "width": width,
        "depth": depth_of(shapes, r"blocks\.(\d+)\."), **_mlp(shapes), "num_registers": registers,
        "num_classes": head[0], "pooling": "cls_mean" if head[0] else "cls",
        "layer_scale": 1e-5 if "blocks.0.ls1.gamma" in shapes else None,
        **(_third(shapes, width) if third else _second(shapes, width, registers, overrides)),
    }  # fmt: skip
    satellite = (SATELLITE,) if third and width in (1024, 4096) else ()
    usual = {"layer_scale", "norm_eps", "activation", "preprocess", "position_resampling"}
    usual |= {"image_size"} | (set() if third else {"num_heads"})
    return finish(fields, overrides, V3 if third else V2, usual=usual, warnings=satellite)


def _mlp(shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Any]:
    for name, kind, parts in (("w12", "swiglu_packed", 2), ("w1", "swiglu_split", 1)):
        if hidden := shapes.get(f"blocks.0.mlp.{name}.weight"):
            return {"mlp": kind, "activation": "silu", "mlp_width": hidden[0] // parts}
    return {"mlp_width": shapes["blocks.0.mlp.fc1.weight"][0]}


def _second(
    shapes: Mapping[str, tuple[int, ...]], width: int, registers: int, overrides: Mapping[str, Any]
) -> dict[str, Any]:
    """DINOv2: a learned table; all published heads are 64 wide."""
    patch = shapes["patch_embed.proj.weight"][2:]
    size = image_size(shapes["pos_embed"][1], 1, (patch[0], patch[1]), overrides.get("image_size"))
    return {
        "image_size": size, "num_heads": max(1, width // 64),
        "qkv_bias": "blocks.0.attn.qkv.bias" in shapes,
        "position_resampling": "bicubic_antialias" if registers else "bicubic_offset",
    }  # fmt: skip


def _third(shapes: Mapping[str, tuple[int, ...]], width: int) -> dict[str, Any]:
    """DINOv3: one period for every four numbers of a head."""
    patch = shapes["patch_embed.proj.weight"][2:]
    masked = "blocks.0.attn.qkv.bias_mask" in shapes
    return {
        "image_size": tuple(224 // side * side for side in patch),
        "num_heads": width // (4 * shapes[PERIODS][0]), "positions": "rope", "norm_eps": 1e-5,
        "qkv_bias": "no_key" if masked else "blocks.0.attn.qkv.bias" in shapes,
    }  # fmt: skip


def _same(names: Iterable[str]) -> list[Row]:
    return [row(name, name) for name in names]


def table(spec: ViTSpec) -> Table:
    """A rename, but for positions; of DINOv3, also for masked biases and for stored periods."""
    gated = {"plain": ("fc1", "fc2"), "swiglu_packed": ("w12", "w3"), "swiglu_split": ("w1", "w3")}
    first, last = gated[spec.mlp]
    split = spec.mlp == "swiglu_split"
    ours_first, middle = ("fc1_g", [("w2", "fc1_x")]) if split else ("fc1", [])
    layers = [(first, ours_first), *middle, (last, "fc2")]
    rows = _rotary_rows() if spec.positions == "rope" else _position_rows(spec)
    return Table(
        (
            *rows,
            *_same(["cls_token", "patch_embed.proj.{p}", "norm.{p}"]),
            *_same(f"{BLOCK}{name}.{{p}}" for name in ("norm1", "attn.qkv", "attn.proj", "norm2")),
            *_same(f"{BLOCK}{name}.gamma" for name in ("ls1", "ls2")),
            *(row(f"{BLOCK}mlp.{t}.{{p}}", f"{BLOCK}mlp.{o}.{{p}}") for t, o in layers),
            row("linear_head.{p}", "head.{p}"),
        ),
        ASIDE,
    )


def _position_rows(spec: ViTSpec) -> list[Row]:
    """Their table of 1 + N rows, for each way in which ours may cover the prefix."""
    registers = row("register_tokens", "reg_token")
    if not spec.positions_cover_prefix:
        names = ["cls_token", "pos_embed"]
        return [row(names, names, Transform(_class_row_added, _class_row_zero)), registers]
    if spec.num_registers:
        spread = Transform(_register_rows_zero, _register_rows_added)
        return [row(["pos_embed", "register_tokens"], ["pos_embed", "reg_token"], spread)]
    return _same(["pos_embed"])


def _class_row_added(parts: Parts, spec: ViTSpec) -> Parts:
    token, positions = parts
    return token + positions[:, :1], positions[:, 1:]


def _class_row_zero(parts: Parts, spec: ViTSpec) -> Parts:
    token, positions = parts
    return token, torch.cat([torch.zeros_like(token), positions], dim=1)


def _register_rows_zero(parts: Parts, spec: ViTSpec) -> Parts:
    positions, registers = parts
    rows = [positions[:, :1], torch.zeros_like(registers), positions[:, 1:]]
    return torch.cat(rows, dim=1), registers


def _register_rows_added(parts: Parts, spec: ViTSpec) -> Parts:
    positions, registers = parts
    first, rows, patches = positions.tensor_split([1, 1 + spec.num_registers], dim=1)
    return torch.cat([first, patches], dim=1), registers + rows


def _rotary_rows() -> list[Row]:
    """What DINOv3 has of its own; these rows lead to us only."""
    bias = f"{BLOCK}attn.qkv."
    return [
        row(PERIODS, (), Transform(_usual_periods, _read_only)),
        row("storage_tokens", "reg_token", Transform(lambda parts, spec: parts, _read_only)),
        row(
            [f"{bias}bias", f"{bias}bias_mask"],
            [f"{bias}q_bias", f"{bias}v_bias"],
            Transform(_without_key, _read_only),
        ),
    ]


def _usual_periods(parts: Parts, spec: ViTSpec) -> Parts:
    """Stored periods, in bfloat16 at worst, against those that the model computes."""
    stored = parts[0].double()
    exponents = torch.arange(len(stored), dtype=torch.float64) / len(stored)
    if not torch.allclose(stored, spec.rope_temperature**exponents, rtol=1e-2, atol=0):
        raise CheckpointError(
            f"{PERIODS} are not those of rope_temperature {spec.rope_temperature:g}"
        )
    return ()


def _without_key(parts: Parts, spec: ViTSpec) -> Parts:
    bias, mask = parts
    query, key, value = torch.where(mask == 0, torch.zeros_like(bias), bias * mask).chunk(3)
    if key.any():
        raise CheckpointError("bias_mask leaves a bias to the keys; expected zeros")
    return query, value


def _read_only(parts: Parts, spec: ViTSpec) -> Parts:
    raise CheckpointError(
        "DINOv3's own layout is read, not written; convert to another format or keep ours"
    )


FIXED: dict[str, Any] = {
    "stem": ("convolution", "linear"), "patch_bias": (True,), "class_token": (True,),
    "distillation_token": (False,), "positions": ("learned",), "positions_cover_prefix": (True,),
    "embedding_norm": (False,), "block": ("pre_norm",), "norm": ("layer",), "norm_eps": (1e-6,),
    "activation": ("gelu", "silu"), "mlp": ("plain", "swiglu_packed"), "qkv_bias": (True, False),
    "qk_norm": (False,), "final_norm": (True,), "norm_before_pool": (True,),
    "representation_width": (None,), "head_width": (None,),
}  # fmt: skip
"""What DINOv2's class computes; any value of the other fields fits."""
HOLDS: tuple[Capabilities, ...] = (
    {**FIXED, "num_classes": (0,), "pooling": ("cls",)},
    {**FIXED, "pooling": ("cls_mean",)},
)
"""Backbones, and classifiers."""


def write(bundle: Bundle) -> dict[str, FileWriter]:
    """`model.safetensors` with the names of the hub's backbone or one-layer classifier."""
    spec = bundle.spec
    if spec.positions == "rope":
        _read_only((), spec)
    if spec.mlp == "plain" and spec.activation != "gelu":
        raise CheckpointError(f"activation {spec.activation!r} has no place beside a plain MLP")
    if spec.pooling != ("cls_mean" if spec.num_classes else "cls"):
        raise CheckpointError(
            "its classifiers read class token and mean side by side (pooling 'cls_mean'), and "
            "models without a head give the class token (num_classes=0)"
        )
    tensors = {**bundle.tensors, "mask_token": torch.zeros(1, spec.width)}
    if spec.num_classes:
        tensors = {n if "linear_head" in n else f"backbone.{n}": t for n, t in tensors.items()}
    return {"model.safetensors": safetensors_file(replace(bundle, tensors=tensors))}


def resampling(spec: ViTSpec) -> str:
    """As its backbones do when they run: those with registers in another way."""
    return "bicubic_antialias" if spec.num_registers else "bicubic_offset"


FORMAT = Format(
    "dinov2", detect, prepare, infer, table, HOLDS, write, CODE,
    settle=registers_take_their_rows, resampling=resampling,
)  # fmt: skip
