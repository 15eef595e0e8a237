"""lucidrains' `vit-pytorch`: `state_dict()` files of `ViT` and `SimpleViT`, of every era.

The eras of `ViT`, by release: up to 0.40.2 a patch goes through one matrix, blocks are wrapped
(`fn`), and the last norm stands in `mlp_head`; 1.0.0 puts a LayerNorm on each side of that matrix;
1.4.0 drops the wrapper and moves the last norm into the transformer; 1.16.0 takes the batch axis
off tokens and positions, and the class token out of models that pool by the mean. Ours are written
in the last one. Files say nothing of head width, of pooling before 1.16, or of pixels; ours keep
the constructor's arguments as JSON in the safetensors header, entry `vit_pytorch`.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from typing import Any

import torch
from einops import rearrange

from vitkit.errors import CheckpointError
from vitkit.spec import ViTSpec, resolve_head_width
from vitkit.weights.format import Bundle, Format, Inferred, safetensors_file
from vitkit.weights.inference import HALF, depth_of, finish, picture_size
from vitkit.weights.rules import Parts, Row, Table, Transform, row
from vitkit.weights.sources import Header, Source

PATCHES, LAYER, OURS = "to_patch_embedding.", "transformer.layers.{i}.", "blocks.{i}."
HEAD_WIDTH = 64
"""The constructor's default of `dim_head`."""
POOLED_FIRST = "last norm after pooling, as in vit-pytorch before 1.4"
OLD_NAMES = (
    (r"^(transformer\.layers\.\d+\.0)\.fn\.", r"\1."),
    (r"^(transformer\.layers\.\d+\.1)\.norm\.", r"\1.net.0."),
    (r"^(transformer\.layers\.\d+\.1)\.fn\.net\.0\.", r"\1.net.1."),
    (r"^(transformer\.layers\.\d+\.1)\.fn\.net\.3\.", r"\1.net.4."),
    (r"^(?:mlp|linear)_head\.0\.", "transformer.norm."),
    (r"^(mlp|linear)_head\.1\.", r"\1_head."),
)
"""Names before 1.4.0 and what has become of them."""


def detect(header: Header) -> bool:
    """Patches go through `to_patch_embedding`, blocks are pairs in `transformer.layers`."""
    names = header.shapes
    return f"{PATCHES}1.weight" in names and any(
        name.startswith("transformer.layers.0.0.") for name in names
    )


def prepare(source: Source) -> Source:
    """The names before 1.4.0 become those since."""
    names = {name: name for name in source}
    for pattern, new in OLD_NAMES:
        names = {old: re.sub(pattern, new, name) for old, name in names.items()}
    notes = [POOLED_FIRST] if {"mlp_head.0.weight", "linear_head.0.weight"} & names.keys() else []
    return source.renamed(names, *notes)


def infer(header: Header, overrides: Mapping[str, Any]) -> Inferred:
    """Sizes follow from shapes; the width of a head, pooling and pixels are as usual or told."""
    shapes, told = header.shapes, {**_told(header), **overrides}
    simple, normed = "pos_embedding" not in shapes, f"{PATCHES}3.weight" in shapes
    width, values = shapes[f"{PATCHES}{2 if normed else 1}.weight"]
    channels, patch = _patch(values, told)
    class_token = not simple and shapes["cls_token"][-2] > 0
    names = LAYER.format(i=0)
    if not simple and f"{names}0.to_out.0.weight" not in shapes:
        raise CheckpointError(
            "its one head is as wide as the tokens and has no output projection (to_out), which "
            "every model here has"
        )
    warnings = ["mean and std 0.5 are a guess: such files say nothing of how pictures are scaled"]
    if simple:
        size = told.get("image_size", tuple(256 // side * side for side in patch))
        if "image_size" not in told:
            warnings.append(f"image_size {size} is a guess; say image_size= if it is another")
    else:
        rows = shapes["pos_embedding"][-2]
        size = picture_size(rows, int(class_token), patch, told.get("image_size"))
    pooling = told.get("pooling", "cls" if class_token else "mean")
    fields = {
        "image_size": size, "patch_size": patch, "in_channels": channels,
        "num_classes": shapes.get("linear_head.weight" if simple else "mlp_head.weight", (0,))[0],
        "width": width, "depth": depth_of(shapes, r"transformer\.layers\.(\d+)\."),
        **_heads(shapes[f"{names}0.to_qkv.weight"][0] // 3, width, told),
        "mlp_width": shapes[f"{names}1.net.1.weight"][0],
        "stem": "normed_linear" if normed else "convolution",
        "class_token": class_token, "positions": "sincos_2d" if simple else "learned",
        "norm_eps": 1e-5, "qkv_bias": False, "pooling": pooling,
        "norm_before_pool": pooling == "cls" or POOLED_FIRST not in header.notes,
    }  # fmt: skip
    usual = ["num_heads", "head_width", "norm_eps", "activation", "position_resampling",
             "patch_size", "in_channels", "preprocess"]  # fmt: skip
    usual += ["image_size"] if simple else ["pooling"] if class_token else []
    stored = told | {name: fields[name] for name in ("num_heads", "head_width") if name in told}
    return finish(fields, stored, HALF, usual=usual, warnings=tuple(warnings))


def _told(header: Header) -> dict[str, Any]:
    """What our own files say beyond shapes, by our names."""
    arguments = json.loads(header.metadata.get("vit_pytorch", "{}"))
    if not isinstance(arguments, dict):
        raise CheckpointError("the header's vit_pytorch is no JSON object; expected arguments")
    ours = {"image_size": "image_size", "patch_size": "patch_size", "channels": "in_channels",
            "heads": "num_heads", "dim_head": "head_width"}  # fmt: skip
    found = {ours[name]: value for name, value in arguments.items() if name in ours}
    return {name: tuple(v) if isinstance(v, list) else v for name, v in found.items()}


def _patch(values: int, told: Mapping[str, Any]) -> tuple[int, tuple[int, int]]:
    """Channels and patch (P, P) of a patch of so many values; 3 P^2 is never a square itself."""
    asked = told.get("patch_size")
    for channels in (told["in_channels"],) if "in_channels" in told else (3, 1):
        side = math.isqrt(values // channels)
        patch = (side, side) if asked is None else asked
        height, width = (patch, patch) if isinstance(patch, int) else patch
        if channels * height * width == values:
            return channels, (height, width)
    raise CheckpointError(
        f"a patch of {values} values is not {asked or 'a square'} of 1 or 3 channels; say "
        f"patch_size"
    )


def _heads(inner: int, width: int, told: Mapping[str, Any]) -> dict[str, Any]:
    """num_heads and head_width for all heads side by side; the latter is None at the default."""
    heads, head_width = told.get("num_heads"), told.get("head_width")
    head_width = head_width or (inner // heads if heads else HEAD_WIDTH)
    heads = heads or inner // head_width
    if heads * head_width != inner or not inner:
        raise CheckpointError(
            f"the heads are {inner} wide together, which {head_width} a head does not divide into "
            f"{heads}; say num_heads"
        )
    return {"num_heads": heads, "head_width": None if inner == width else head_width}


def _swapped(pattern: str) -> Transform:
    """Their values of a patch, (row, column, channel), to and from another order."""
    theirs = "... (P Q C)"

    def there(parts: Parts, spec: ViTSpec) -> Parts:
        (rows, columns), sizes = spec.patch_size, {"C": spec.in_channels}
        made = rearrange(parts[0], f"{theirs} -> {pattern}", P=rows, Q=columns, **sizes)
        return (made,)

    def back(parts: Parts, spec: ViTSpec) -> Parts:
        (rows, columns), sizes = spec.patch_size, {"C": spec.in_channels}
        made = rearrange(parts[0], f"{pattern} -> {theirs}", P=rows, Q=columns, **sizes)
        return (made,)

    return Transform(there, back)


def _to_out_bias(parts: Parts, spec: ViTSpec) -> Parts:
    return parts[0], parts[0].new_zeros(spec.width)


def _no_bias(parts: Parts, spec: ViTSpec) -> Parts:
    if parts[1].any():
        raise CheckpointError("attn.proj.bias is not zero, and SimpleViT's to_out has no bias")
    return parts[:1]


def _unbatched(parts: Parts, spec: ViTSpec) -> Parts:
    return (parts[0][0],)


def _batched(parts: Parts, spec: ViTSpec) -> Parts:
    return (parts[0].reshape(1, -1, spec.width),)


NO_TOKENS = Transform(lambda parts, spec: (), lambda parts, spec: (torch.zeros(0, spec.width),))
"""The class token (0, D) of models that pool by the mean."""


def table(spec: ViTSpec) -> Table:
    """Theirs flatten a patch channel fastest; without positions in the file it is a `SimpleViT`.

    Raises:
        CheckpointError: what its classes never compute.
    """
    simple = spec.positions != "learned"
    if spec.class_token and spec.pooling == "mean":
        raise CheckpointError("with a class token its mean is of all tokens: pooling 'mean_all'")
    head_width = resolve_head_width(spec.width, spec.num_heads, spec.head_width)
    if not simple and (spec.num_heads, head_width) == (1, spec.width):
        raise CheckpointError(
            "one head as wide as the tokens has no output projection in ViT; num_heads must be "
            "more, or head_width another"
        )
    return Table((
        *(_simple_rows() if simple else _plain_rows(spec)),
        *_stem_rows(spec),
        row(LAYER + "0.norm.{p}", OURS + "norm1.{p}"),
        row(LAYER + "0.to_qkv.weight", OURS + "attn.qkv.weight"),
        row(LAYER + "1.net.0.{p}", OURS + "norm2.{p}"),
        row(LAYER + "1.net.1.{p}", OURS + "mlp.fc1.{p}"),
        row("transformer.norm.{p}", ("norm" if spec.norm_before_pool else "fc_norm") + ".{p}"),
    ))  # fmt: skip


def _stem_rows(spec: ViTSpec) -> list[Row]:
    """The patch embedding: matrix alone, or between two norms."""
    if spec.stem != "normed_linear":
        return [
            row(f"{PATCHES}1.weight", "patch_embed.proj.weight", _swapped("... C P Q")),
            row(f"{PATCHES}1.bias", "patch_embed.proj.bias"),
        ]
    flat = _swapped("... (C P Q)")
    return [
        row(f"{PATCHES}1.{{p}}", "patch_embed.norm_patches.{p}", flat),
        row(f"{PATCHES}2.weight", "patch_embed.proj.weight", flat),
        row(f"{PATCHES}2.bias", "patch_embed.proj.bias"),
        row(f"{PATCHES}3.{{p}}", "patch_embed.norm.{p}"),
    ]


def _plain_rows(spec: ViTSpec) -> list[Row]:
    """What `ViT` calls otherwise than `SimpleViT`."""
    unbatched = Transform(_batched, _unbatched)
    return [
        row("cls_token", "cls_token", unbatched) if spec.class_token
        else row("cls_token", (), NO_TOKENS),
        row("pos_embedding", "pos_embed", unbatched),
        row(LAYER + "0.to_out.0.{p}", OURS + "attn.proj.{p}"),
        row(LAYER + "1.net.4.{p}", OURS + "mlp.fc2.{p}"),
        row("mlp_head.{p}", "head.{p}"),
    ]  # fmt: skip


def _simple_rows() -> list[Row]:
    """What `SimpleViT` calls otherwise: it has no dropout, and no bias after attention."""
    ours = [OURS + "attn.proj.weight", OURS + "attn.proj.bias"]
    return [
        row(LAYER + "0.to_out.weight", ours, Transform(_to_out_bias, _no_bias)),
        row(LAYER + "1.net.3.{p}", OURS + "mlp.fc2.{p}"),
        row("linear_head.{p}", "head.{p}"),
    ]


FIXED: dict[str, Any] = {
    "stem": ("normed_linear",), "patch_bias": (True,), "distillation_token": (False,),
    "num_registers": (0,), "positions": ("learned", "sincos_2d"), "positions_cover_prefix": (True,),
    "embedding_norm": (False,), "block": ("pre_norm",), "norm": ("layer",), "norm_eps": (1e-5,),
    "activation": ("gelu",), "mlp": ("plain",), "qkv_bias": (False,), "qk_norm": (False,),
    "layer_scale": (None,), "pooling": ("cls", "mean"), "final_norm": (True,),
    "norm_before_pool": (True,), "representation_width": (None,),
}  # fmt: skip
"""What its newest classes compute; any value of the other fields fits."""


def write(bundle: Bundle) -> dict[str, bytes]:
    """`model.safetensors` for `ViT` or `SimpleViT` since 1.16, with the constructor's arguments."""
    spec = bundle.spec
    simple = spec.positions != "learned"
    if simple and (spec.pooling != "mean" or not spec.num_classes):
        raise CheckpointError("SimpleViT reads the mean of the patches and always has a head")
    arguments = {
        "class": "SimpleViT" if simple else "ViT", "image_size": _single(spec.image_size),
        "patch_size": _single(spec.patch_size), "channels": spec.in_channels, "dim": spec.width,
        "depth": spec.depth, "heads": spec.num_heads, "mlp_dim": spec.mlp_width,
        "dim_head": spec.attention_width // spec.num_heads, "num_classes": spec.num_classes,
        **({} if simple else {"pool": spec.pooling}),
    }  # fmt: skip
    metadata = {"vit_pytorch": json.dumps(arguments)}
    return {"model.safetensors": safetensors_file(bundle, metadata)}


def _single(size: tuple[int, int]) -> int | tuple[int, int]:
    """One number for a square: their constructors take no list, as which JSON gives a pair back."""
    return size[0] if size[0] == size[1] else size


FORMAT = Format("lucidrains", detect, prepare, infer, table, FIXED, write)
