"""The layouts of Google's `.npz` files: names changed to those of 2021, arrays from Flax's axes.

Flax numbered the parts of a block by one counter at first (`LayerNorm_2`, `MlpBlock_3`), and each
class by its own since Linen (`LayerNorm_1`, `MlpBlock_0`). big_vision puts trees around the model
and may stack its blocks along a first axis. The correspondences are in big_vision, models/vit.py
(`fix_old_checkpoints`), and vit_jax, checkpoint.py.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from functools import lru_cache, partial

import torch
from torch import Tensor

from vitkit.errors import CheckpointError
from vitkit.spec import MOST_BLOCKS, ViTSpec
from vitkit.weights.files.source import ComputedTensor, Source
from vitkit.weights.files.zip_checks import MAX_TENSORS
from vitkit.weights.formats.key_table import KeyTransform, TensorParts

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


def tree_prefix(names: Iterable[str]) -> str | None:
    """Return the prefix of a ViT's names, or `None` where there is no ViT."""
    present = set(names)
    for prefix in TREE_PREFIXES:
        if all(prefix + name in present for name in ANCHORS):
            return prefix
    return None


def with_names_of_2021(source: Source) -> Source:
    """Rename a file's tensors to the names of 2021, one for each block, without a prefix.

    Raises:
        CheckpointError: two tensors would get one name, or stacks that fit no model.
    """
    source = _without_prefix(source, tree_prefix(source) or "")
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
        return POSITIONS if has_class_token else PATCH_POSITIONS
    if ROOT_MAP.match(name):
        return f"MAPHead_0/{name}"
    return _rename_part(name, LINEN)


def big_vision_name(name: str) -> str:
    """Return big_vision's name for a name of 2021."""
    by_counter = {counter: linen for linen, counter in LINEN.items()}
    return "params/" + _rename_part(name, by_counter)


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
        CheckpointError: stacks of different heights, or higher than any model.
    """
    old = source.header
    leaves = {name: name.removeprefix(STACK_PREFIX) for name in source if _is_stack(name)}
    depth = _stack_height({old.shapes[name][:1] for name in leaves}, len(leaves))

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
    return source.with_computed(blocks, note, instead_of=leaves.keys())


def _is_stack(name: str) -> bool:
    return name.startswith(STACK_PREFIX)


def _stack_height(heights: set[tuple[int, ...]], stacks: int) -> int:
    """Return the common height of all stacks, the number of blocks.

    Args:
        heights: the first side of each stack, in a tuple; empty for a single number.
        stacks: how many there are.
    """
    if len(heights) > 1 or () in heights:
        raise CheckpointError(
            f"{STACK_PREFIX}: stacks of {sorted(heights)} blocks; expected one number"
        )
    ((depth,),) = heights
    if depth > MOST_BLOCKS:
        raise CheckpointError(
            f"{STACK_PREFIX}: stacks of {depth} blocks; at most {MOST_BLOCKS} are read"
        )
    if depth * stacks > MAX_TENSORS:
        raise CheckpointError(
            f"{STACK_PREFIX}: {stacks:,} stacks of {depth} blocks; at most {MAX_TENSORS:,} "
            "tensors are read"
        )
    return depth


def _heads_to_ours(parts: TensorParts, spec: ViTSpec) -> TensorParts:
    """Stack kernels [D, H, h] or biases [H, h] along rows, head by head."""
    rows: list[Tensor] = []
    for part in parts:
        rows.append(part.flatten(-2).mT if part.ndim > 2 else part.flatten())
    return (torch.cat(rows),)  # (3 H h, D) for query, key and value


def _heads_to_theirs(count: int) -> Callable[[TensorParts, ViTSpec], TensorParts]:
    def split(parts: TensorParts, spec: ViTSpec) -> TensorParts:
        kernels: list[Tensor] = []
        for part in parts[0].chunk(count):
            if part.ndim > 1:  # (H h, D) -> [D, H, h]
                kernels.append(part.mT.unflatten(-1, (spec.num_heads, -1)))
            else:  # (H h) -> [H, h]
                kernels.append(part.unflatten(0, (spec.num_heads, -1)))
        return tuple(kernels)

    return split


def heads(count: int) -> KeyTransform:
    """Return the transform of `count` projections into heads to one matrix: query, key, value."""
    return KeyTransform(_heads_to_ours, _heads_to_theirs(count))


def _as_kernel(part: Tensor, spec: ViTSpec) -> Tensor:
    """Return a kernel HWIO; NaFlex has a matrix [P P C, D], channel fastest."""
    return part.unflatten(0, (*spec.patch_size, spec.in_channels)) if part.ndim == 2 else part


OUTPUT_PROJECTION = KeyTransform(
    lambda parts, spec: (parts[0].flatten(0, 1).mT,),  # [H, h, D] -> (D, H h)
    lambda parts, spec: (parts[0].T.unflatten(0, (spec.num_heads, -1)),),
)
CONVOLUTION = KeyTransform(
    lambda parts, spec: (parts[0].permute(3, 2, 0, 1),),  # HWIO -> OIHW
    lambda parts, spec: (parts[0].permute(2, 3, 1, 0),),
)
PATCH_KERNEL = KeyTransform(
    lambda parts, spec: CONVOLUTION.to_ours((_as_kernel(parts[0], spec),), spec),
    CONVOLUTION.to_theirs,
)
POSITION_TABLE = KeyTransform(  # NaFlex has [gh, gw, D]
    lambda parts, spec: (parts[0].reshape(1, -1, parts[0].shape[-1]),),
    lambda parts, spec: parts,
)
GROUP_NORM = KeyTransform(  # [1, 1, 1, c]; Linen since 2021: [c]
    lambda parts, spec: (parts[0].flatten(),),
    lambda parts, spec: (parts[0].reshape(1, 1, 1, -1),),
)
