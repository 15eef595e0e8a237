"""Google's `.npz` files: the paper's, AugReg's, SAM's and big_vision's, hybrids among them."""

import re
from collections.abc import Iterable, Mapping
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from vitkit.errors import CheckpointError
from vitkit.io import atomic, untrusted
from vitkit.spec import MOST_BLOCKS, STAGE_STRIDES, ViTSpec
from vitkit.weights.files import ComputedTensor, Header, Shapes, Source
from vitkit.weights.formats import format as shared
from vitkit.weights.formats.format import COMMON, Bundle, Format, Inferred
from vitkit.weights.formats.keys import BLOCK, RESNET_UNIT, Parts, Row, Table, Transform, each, row

# The layouts of Google's `.npz` files: names changed to those of 2021, arrays from Flax's axes.
#
# Flax numbered the parts of a block by one counter at first (`LayerNorm_2`, `MlpBlock_3`), and each
# class by its own since Linen (`LayerNorm_1`, `MlpBlock_0`). big_vision puts trees around the model
# and may stack its blocks along a first axis. The correspondences are in big_vision, models/vit.py
# (`fix_old_checkpoints`), and vit_jax, checkpoint.py.

TREE_PREFIXES = ("", "opt/target/", "params/", "params/img/", "img/", "opt/target/img/")
"""Prefixes of all names: none; an optimiser's state; a training state; the image tower."""
ANCHORS = ("embedding/kernel", "Transformer/encoder_norm/scale")
"""Names that every ViT of Google's has."""
POSITIONS = "Transformer/posembed_input/pos_embedding"
"""A table of the encoder, whose input includes the class token: it has a row for that token."""
PATCH_POSITIONS = "pos_embedding"
"""A table of the patches alone, added before the class token joins, or without class token."""
LINEN = {
    "MultiHeadDotProductAttention_0/": "MultiHeadDotProductAttention_1/",
    "LayerNorm_1/": "LayerNorm_2/",
    "MlpBlock_0/": "MlpBlock_3/",
}
"""Parts of a block by Linen's numbers -> by one counter."""
STACK_PREFIX = "Transformer/encoderblock/"
BLOCK_PREFIX = "Transformer/encoderblock_{i}/"
ROOT_MAP = re.compile(r"probe$|(MultiHeadDotProductAttention_0|LayerNorm_0|MlpBlock_0)/")
"""The attention pool of the first ViT-G files, which has no module of its own."""


def _tree_prefix(names: Iterable[str]) -> str | None:
    """Return the prefix of a ViT's names, or `None` where there is no ViT."""
    present = set(names)
    for prefix in TREE_PREFIXES:
        if all(prefix + name in present for name in ANCHORS):
            return prefix
    return None


def _with_names_of_2021(source: Source) -> Source:
    """Rename a file's tensors to the names of 2021, one for each block, without a prefix."""
    source = _without_prefix(source, _tree_prefix(source) or "")
    if any(name.startswith(STACK_PREFIX) for name in source):
        source = _unstacked(source)
    # Last: the class token decides the name of the table, and a prefix would hide it.
    classic_name = partial(_classic_name, has_class_token="cls" in source)
    clash = "two tensors would get the same name; the file mixes two layouts"
    return source.renamed_by(classic_name, clash=clash)


def _without_prefix(source: Source, prefix: str) -> Source:
    """Keep the tensors whose names have a prefix, without it."""
    if not prefix:
        return source
    names = {name: name.removeprefix(prefix) for name in source if name.startswith(prefix)}
    notes = [f"prefix {prefix!r} removed"]
    outside = len(source) - len(names)
    if outside:
        notes.append(f"{outside} tensors outside of {prefix!r} left out")
    return source.renamed(names, *notes)


def _classic_name(name: str, has_class_token: bool) -> str:
    """Return the name of 2021 of any layout's, without prefix and stack."""
    if name in (POSITIONS, "Transformer/pos_embedding"):
        if has_class_token:
            return POSITIONS
        return PATCH_POSITIONS
    if ROOT_MAP.match(name):
        return f"MAPHead_0/{name}"
    return _rename_part(name, LINEN)


def _rename_part(name: str, parts: Mapping[str, str]) -> str:
    """Rename the part of a block that a name belongs to; other names stay."""
    match = re.match(r"(Transformer/encoderblock_\d+/)([^/]+/)(.*)", name)
    if match is None:
        return name
    block, part, leaf = match.groups()
    return f"{block}{parts.get(part, part)}{leaf}"


def _unstacked(source: Source) -> Source:
    """Split blocks that are stacked along a first axis.

    Raises:
        CheckpointError: stacks of different heights, or of more blocks than are read.
    """
    old = source.header
    leaves = {name: name.removeprefix(STACK_PREFIX) for name in source if _is_stack(name)}
    heights = {old.shapes[name][:1] for name in leaves}  # empty for a single number
    # The heights are checked first: a forged header may state any.
    (depth,) = heights.pop() if len(heights) == 1 and () not in heights else (0,)
    if not 0 < depth <= min(MOST_BLOCKS, untrusted.MAX_TENSORS // len(leaves)):
        raise CheckpointError(
            f"{STACK_PREFIX}: {len(leaves):,} stacks of different heights, or of more blocks than "
            f"are read ({MOST_BLOCKS}, {untrusted.MAX_TENSORS:,} tensors)"
        )

    @lru_cache(maxsize=3)  # query, key and value of a block are read one after the other
    def stack(name: str) -> Tensor:
        return source[name]

    def level(name: str, i: int) -> Tensor:
        return stack(name)[i]

    blocks: dict[str, ComputedTensor] = {}
    for name, leaf in leaves.items():
        shape = old.shapes[name][1:]  # without the axis of blocks
        for i in range(depth):
            block_name = BLOCK_PREFIX.format(i=i) + leaf
            blocks[block_name] = ComputedTensor(shape, old.dtypes[name], partial(level, name, i))
    note = f"{depth} blocks taken from one stack"
    others = {name: tensor for name, tensor in source.tensors.items() if name not in leaves}
    return source.replaced({**others, **blocks}, note)


def _is_stack(name: str) -> bool:
    return name.startswith(STACK_PREFIX)


def _heads_to_ours(parts: Parts, spec: ViTSpec) -> Parts:
    """Stack kernels [D, H, h] or biases [H, h] along rows, head by head."""
    rows = [part.flatten(-2).mT if part.ndim > 2 else part.flatten() for part in parts]
    return (torch.cat(rows),)  # (3 H h, D) for query, key and value


def heads(count: int) -> Transform:
    """Return the transform of `count` projections into heads to one matrix: query, key, value."""

    def split(parts: Parts, spec: ViTSpec) -> Parts:
        # (H h, D) -> [D, H, h], and (H h) -> [H, h]
        rows = [part.mT if part.ndim > 1 else part for part in parts[0].chunk(count)]
        return tuple(part.unflatten(-1, (spec.num_heads, -1)) for part in rows)

    return Transform(_heads_to_ours, split)


def _patch_kernel(part: Tensor, spec: ViTSpec) -> Tensor:
    """Return OIHW of HWIO; NaFlex has a matrix [P P C, D], channel fastest."""
    if part.ndim == 2:
        part = part.unflatten(0, (*spec.patch_size, spec.in_channels))
    return part.permute(3, 2, 0, 1)


DENSE = each(lambda part, spec: part.mT, lambda part, spec: part.mT)
OUTPUT_PROJECTION = each(
    lambda part, spec: part.flatten(0, 1).mT,  # [H, h, D] -> (D, H h)
    lambda part, spec: part.T.unflatten(0, (spec.num_heads, -1)),
)
CONVOLUTION = each(_patch_kernel, lambda part, spec: part.permute(2, 3, 1, 0))  # HWIO <-> OIHW
POSITION_TABLE = each(  # NaFlex has [gh, gw, D]
    lambda part, spec: part.reshape(1, -1, part.shape[-1]), lambda part, spec: part
)
GROUP_NORM = each(  # [1, 1, 1, c]; Linen since 2021: [c]
    lambda part, spec: part.flatten(), lambda part, spec: part.reshape(1, 1, 1, -1)
)


# Google's `.npz` files: the paper's, AugReg's, SAM's and big_vision's, hybrids among them.
#
# Kernels have Flax's axes: a dense one (in, out), a head's [D, H, h], a convolution's HWIO. The
# table has the names of google-research/vision_transformer; `layouts` renames others to them.

_POOL = "MAPHead_0/"
_ATTENTION = "MultiHeadDotProductAttention_{n}/"
_MLP = "MlpBlock_{n}/Dense_{m}/"
# vit_jax and SigLIP squash images to a square; big_vision's classifiers cut 224 out of 256.
_SQUASHED = shared.HALF_MEAN.replace(interpolation="bilinear", fit="squash", crop_ratio=1.0)
_CROPPED = _SQUASHED.replace(fit="crop", crop_ratio=0.875)


def _detect(header: Header) -> bool:
    """Return True for `embedding/kernel` and `Transformer/encoder_norm` with a known prefix."""
    return _tree_prefix(header.shapes) is not None


def _infer(header: Header, overrides: Mapping[str, Any]) -> Inferred:
    """Infer the whole architecture from shapes, heads included: a query's kernel is [D, H, h].

    The name of the position table shows if it covers the class token; without a table, positions
    are big_vision's `sincos2d`. With neither class token nor attention pool, patches are averaged.
    """
    shapes = header.shapes
    block = BLOCK_PREFIX.format(i=0)
    # [D, H, h]: heads have an axis of their own.
    width, num_heads, head_width = shapes[f"{block}{_ATTENTION.format(n=1)}query/kernel"]
    if overrides.get("num_heads", num_heads) != num_heads:
        raise CheckpointError(
            f"num_heads {overrides['num_heads']} contradicts the kernels, which have "
            f"{num_heads} heads"
        )
    # (inputs, outputs); a layer that is not there has no outputs.
    representation_width = shapes.get("pre_logits/kernel", (0,))[-1]
    num_classes = shapes.get("head/kernel", (0,))[-1]
    has_pool = f"{_POOL}probe" in shapes
    has_token = "cls" in shapes
    fields = {
        **_stem_and_positions(shapes, overrides, has_token),
        "num_classes": num_classes,
        "width": width,
        "depth": shared.depth_of(shapes, BLOCK_PREFIX),
        "num_heads": num_heads,
        "head_width": None if num_heads * head_width == width else head_width,
        "mlp_width": shapes[f"{block}{_MLP.format(n=3, m=0)}kernel"][-1],
        "class_token": has_token,
        "pooling": _pooling(has_pool, has_token),
        "representation_width": representation_width or None,
        "norm_eps": 1e-6,
        "activation": "gelu_tanh",
        "resnet_variant": "published",
    }
    usual = {"norm_eps", "activation", "resnet_variant", "position_resampling", "preprocess"}
    if not has_pool and not has_token:
        usual.add("pooling")
    if fields["positions"] != "learned":
        usual.add("positions")
    if not _states_grid(shapes):
        usual.add("image_size")
    is_squashed = POSITIONS in shapes or has_pool or fields["stem"] == "resnet"
    return shared.finish(fields, overrides, _SQUASHED if is_squashed else _CROPPED, usual=usual)


def _pooling(has_pool: bool, has_token: bool) -> str:
    if has_pool:
        return "map"
    if has_token:
        return "cls"
    return "mean"


def _states_grid(shapes: Shapes) -> bool:
    """Return True if the position table has axes for rows and for columns, as FlexiViT's."""
    table = shapes.get(PATCH_POSITIONS, (1,))
    return len(shapes["embedding/kernel"]) == 2 and table[0] > 1


def _stem_and_positions(
    shapes: Shapes, overrides: Mapping[str, Any], has_token: bool
) -> dict[str, Any]:
    """Return the fields of stem and positions, the image's size among them."""
    kernel = shapes["embedding/kernel"]
    covers_token = POSITIONS in shapes
    table = shapes.get(POSITIONS if covers_token else PATCH_POSITIONS)
    root = shapes.get("conv_root/kernel")
    layers = shared.resnet_layers(shapes, "block{s1}/unit*/conv1/kernel")
    is_flexible = len(kernel) == 2
    # NaFlex stores the kernel as a matrix [P P C, D], others as [P, P, C, D].
    if is_flexible:
        channels = int(overrides.get("in_channels", 3))
        side = round((kernel[0] / channels) ** 0.5)
        patch = (side, side)
    else:
        channels = (root or kernel)[2]
        # The kernel of a hybrid covers cells of the ResNet's output, `stride` pixels each.
        stride = STAGE_STRIDES[len(layers)] if root else 1
        patch = (kernel[0] * stride, kernel[1] * stride)
    fields = {
        "patch_size": patch,
        "in_channels": channels,
        "stem": "resnet" if root else "convolution",
        "resnet_layers": layers,
        "positions": "learned",
        "position_resampling": "bilinear_antialias" if is_flexible else "bilinear_aligned",
    }
    requested = overrides.get("image_size")
    # big_vision computes sines for any size; 224 pixels are the usual one.
    if table is None:
        if requested is None:
            requested = tuple(max(224 // pixels, 1) * pixels for pixels in patch)
        return fields | {"image_size": requested, "positions": "sincos_2d"}
    if is_flexible and table[0] > 1 and requested is None:
        requested = (table[0] * patch[0], table[1] * patch[1])
    # The table is (1, N, D), or (gh, gw, D) where it is flexible.
    rows = table[0] * table[1]
    fields["image_size"] = shared.image_size(rows, int(covers_token), patch, requested)
    if has_token:
        fields["positions_cover_prefix"] = covers_token
    return fields


def _norm(theirs: str, ours: str, *transform: Transform) -> list[Row]:
    """Return the rows of a norm's `scale` and `bias`; a GroupNorm's have four axes."""
    return [
        row(f"{theirs}scale", f"{ours}.weight", *transform),
        row(f"{theirs}bias", f"{ours}.bias", *transform),
    ]


def _dense(theirs: str, ours: str, transform: Transform = DENSE) -> list[Row]:
    """Return the rows of a layer's `kernel` and `bias`."""
    return [
        row(f"{theirs}kernel", f"{ours}.weight", transform),
        row(f"{theirs}bias", f"{ours}.bias"),
    ]


def _attention(theirs: str, ours: str, fused: Mapping[str, tuple[str, ...]]) -> list[Row]:
    """Return the rows of the projections into heads, fused as ours, and of the one out of them."""
    rows: list[Row] = []
    for name, parts in fused.items():
        # A bias has the axes of its kernel but the first: [H, h].
        for their_kind, our_kind in (("kernel", "weight"), ("bias", "bias")):
            names = [f"{theirs}{part}/{their_kind}" for part in parts]
            rows.append(row(names, f"{ours}{name}.{our_kind}", heads(len(parts))))
    return [*rows, *_dense(f"{theirs}out/", f"{ours}proj", OUTPUT_PROJECTION)]


def _mlp(theirs: str, ours: str, number: int) -> list[Row]:
    """Return the rows of an MLP's two layers."""
    first = _dense(theirs + _MLP.format(n=number, m=0), f"{ours}mlp.fc1")
    return first + _dense(theirs + _MLP.format(n=number, m=1), f"{ours}mlp.fc2")


def _resnet(layers: tuple[int, ...]) -> list[Row]:
    """Return the rows of a hybrid's stem; without stages, its root is the whole of it."""
    ours = "patch_embed.backbone."
    root = f"{ours}stem." if layers else ours
    rows = [row("conv_root/kernel", f"{root}conv.weight", CONVOLUTION)]
    rows += _norm("gn_root/", f"{root}norm", GROUP_NORM)
    # Their conv1, gn1 ... in a unit; `_proj` is the convolution of its shortcut.
    parts = [(str(n), f"conv{n}", f"norm{n}") for n in (1, 2, 3)]
    parts.append(("_proj", "downsample.conv", "downsample.norm"))
    for part, conv, norm in parts:
        unit = "block{s1}/unit{u1}/"
        our_unit = ours + RESNET_UNIT
        rows.append(row(f"{unit}conv{part}/kernel", f"{our_unit}{conv}.weight", CONVOLUTION))
        rows += _norm(f"{unit}gn{part}/", our_unit + norm, GROUP_NORM)
    return rows


def _table(spec: ViTSpec) -> Table:
    """Return the table with the names of 2021, and big_vision's for the attention pool."""
    covers_token = spec.class_token and spec.positions_cover_prefix
    positions = POSITIONS if covers_token else PATCH_POSITIONS
    attention = BLOCK_PREFIX + _ATTENTION.format(n=1)
    pool_attention = _POOL + _ATTENTION.format(n=0)
    stem = []
    if spec.stem == "resnet":
        stem = _resnet(spec.resnet_layers)
    rows = (
        row("cls", "cls_token"),
        row(positions, "pos_embed", POSITION_TABLE),
        *stem,
        *_dense("embedding/", "patch_embed.proj", CONVOLUTION),
        *_norm(f"{BLOCK_PREFIX}LayerNorm_0/", f"{BLOCK}norm1"),
        *_attention(attention, f"{BLOCK}attn.", {"qkv": ("query", "key", "value")}),
        *_norm(f"{BLOCK_PREFIX}LayerNorm_2/", f"{BLOCK}norm2"),
        *_mlp(BLOCK_PREFIX, BLOCK, 3),
        *_norm("Transformer/encoder_norm/", "norm"),
        row(f"{_POOL}probe", "attn_pool.latent"),
        *_attention(pool_attention, "attn_pool.", {"q": ("query",), "kv": ("key", "value")}),
        *_norm(f"{_POOL}LayerNorm_0/", "attn_pool.norm"),
        *_mlp(_POOL, "attn_pool.", 0),
        *_dense("pre_logits/", "pre_logits.fc"),
        *_dense("head/", "head"),
    )
    return Table(rows)


def _write(bundle: Bundle) -> dict[str, atomic.FileWriter]:
    """Return `model.npz`, uncompressed: by vit_jax's names, or by big_vision's where it must be.

    big_vision alone has positions that do not cover the class token, sines, and attention pooling;
    vit_jax alone has hybrids.
    """
    spec = bundle.spec
    covers_token = spec.class_token and spec.positions_cover_prefix and spec.positions == "learned"
    is_vit_jax = covers_token or spec.stem == "resnet"
    by_counter = {counter: linen for linen, counter in LINEN.items()}

    def name_of(name: str) -> str:
        if not is_vit_jax:
            return "params/" + _rename_part(name, by_counter)
        return POSITIONS if name == PATCH_POSITIONS else name  # a hybrid without class token

    # Tensors are already in Flax's axes: the table has transposed them.
    arrays = {name_of(name): _array(tensor) for name, tensor in bundle.tensors.items()}

    def write_arrays(path: Path) -> None:
        # A file object, because np.savez adds ".npz" to a path.
        with path.open("wb") as file:
            np.savez(file, **arrays)

    return {
        "model.npz": atomic.FileWriter(sum(array.nbytes for array in arrays.values()), write_arrays)
    }


def _array(tensor: Tensor) -> Any:
    """Return a tensor as numpy's array; bfloat16, unknown to numpy, as two bytes each."""
    tensor = tensor.detach().cpu()
    if tensor.dtype == torch.bfloat16:
        return tensor.view(torch.int16).numpy().view("V2")
    return tensor.numpy()


_PLAIN: dict[str, Any] = {
    **COMMON,
    "positions": ("learned", "sincos_2d"),
    "positions_cover_prefix": (True, False),
    "distillation_token": False,
    "num_registers": 0,
    "norm_eps": 1e-6,
    "activation": "gelu_tanh",
    "mlp": "plain",
    "qkv_bias": True,
    "layer_scale": None,
}
_HYBRID: dict[str, Any] = {
    **_PLAIN,
    "stem": "resnet",
    "resnet_variant": "published",
    "positions": "learned",
    "positions_cover_prefix": True,
}
GOOGLE = Format(
    name="google",
    detect=_detect,
    prepare=_with_names_of_2021,
    infer=_infer,
    table=_table,
    # With a class token and without; hybrids, which vit_jax alone has, likewise.
    capabilities=(
        {**_PLAIN, "class_token": True, "pooling": "cls"},
        {**_PLAIN, "class_token": False, "pooling": ("mean", "map")},
        {**_HYBRID, "class_token": True, "pooling": "cls"},
        {**_HYBRID, "class_token": False, "pooling": "mean"},
    ),
    write=_write,
    fixed=shared.FIXED_BY_CODE | {"resnet_variant", "positions"},
)
