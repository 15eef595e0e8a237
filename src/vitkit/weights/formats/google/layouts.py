"""The layouts of Google's `.npz` files: names brought to those of 2021, arrays as Flax has them.

Flax numbered the parts of a block by one counter at first (`LayerNorm_2`, `MlpBlock_3`), and each
class by its own since Linen (`LayerNorm_1`, `MlpBlock_0`). big_vision puts trees around the model
and may stack its blocks along a first axis. What was what: big_vision, models/vit.py
(`fix_old_checkpoints`), and vit_jax, checkpoint.py.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from dataclasses import replace
from functools import lru_cache, partial
from typing import Any, TypeVar

import torch
from torch import Tensor

from vitkit.errors import CheckpointError
from vitkit.spec import MOST_BLOCKS, ViTSpec
from vitkit.weights.files.open import Header, Source
from vitkit.weights.files.zip_checks import MOST
from vitkit.weights.formats.key_table import Parts, Transform

PREFIXES = ("", "opt/target/", "params/", "params/img/", "img/", "opt/target/img/")
"""Before every name: nothing; an optimiser's state; a training state; the image's tower."""
ANCHORS = ("embedding/kernel", "Transformer/encoder_norm/scale")
POSITIONS = "Transformer/posembed_input/pos_embedding"
"""A table of the encoder, which is given the class token too and so has a row for it."""
PATCH_POSITIONS = "pos_embedding"
"""A table of the patches alone, added before the class token joins; so wherever there is none."""
LINEN = {
    "MultiHeadDotProductAttention_0/": "MultiHeadDotProductAttention_1/",
    "LayerNorm_1/": "LayerNorm_2/",
    "MlpBlock_0/": "MlpBlock_3/",
}
"""Parts of a block by Linen's numbers -> by one counter."""
STACK, BLOCK = "Transformer/encoderblock/", "Transformer/encoderblock_{i}/"
ROOT_MAP = re.compile(r"probe$|(MultiHeadDotProductAttention_0|LayerNorm_0|MlpBlock_0)/")
"""The attention pool of the first ViT-G files, which has no module of its own."""

T = TypeVar("T")


def prefix_of(names: Iterable[str]) -> str | None:
    """What stands before the names of a ViT, or `None` where there is none."""
    there = set(names)
    return next((p for p in PREFIXES if all(p + name in there for name in ANCHORS)), None)


def one_layout(source: Source) -> Source:
    """The file's tensors by the names of 2021, one for each block, without a prefix."""
    prefix = prefix_of(source) or ""
    inside = [name for name in source if name.startswith(prefix)]
    notes = [f"prefix {prefix!r} taken off"] if prefix else []
    if outside := len(source) - len(inside):
        notes.append(f"{outside} tensors outside of {prefix!r} left out")
    source = source.renamed({name: name.removeprefix(prefix) for name in inside}, *notes)
    if any(name.startswith(STACK) for name in source):
        source = unstacked(source)
    names = {name: classic_name(name, "cls" in source) for name in source}
    if len(set(names.values())) < len(names):
        raise CheckpointError("two tensors have the place of one; two layouts are mixed")
    return source.renamed(names)


def classic_name(name: str, token: bool) -> str:
    """The name of 2021 of any layout's, prefix and stack aside; `token`: of a model with one."""
    if name in (POSITIONS, "Transformer/pos_embedding"):
        return POSITIONS if token else PATCH_POSITIONS
    if ROOT_MAP.match(name):
        return f"MAPHead_0/{name}"
    return in_blocks(name, LINEN)


def big_vision_name(name: str) -> str:
    """The name that big_vision gives to what has this one in 2021's files."""
    return "params/" + in_blocks(name, {new: old for old, new in LINEN.items()})


def in_blocks(name: str, parts: Mapping[str, str]) -> str:
    """Rename the part of a block that a name leads into; other names stay."""
    match = re.match(r"(Transformer/encoderblock_\d+/)([^/]+/)(.*)", name)
    return f"{match[1]}{parts.get(match[2], match[2])}{match[3]}" if match else name


def unstacked(source: Source) -> Source:
    """Blocks that are stacked along a first axis, one by one.

    Raises:
        CheckpointError: the stacks are not of one height, or higher than any model.
    """
    old = source.header
    stacks = {name: name.removeprefix(STACK) for name in source if name.startswith(STACK)}
    depths = {old.shapes[name][:1] for name in stacks}
    if len(depths) > 1 or () in depths:
        raise CheckpointError(f"{STACK}: stacks of {sorted(depths)} blocks; expected one number")
    ((depth,),) = depths
    if depth > MOST_BLOCKS:
        raise CheckpointError(f"{STACK}: stacks of {depth} blocks; {MOST_BLOCKS} are the most")
    if depth * len(stacks) > MOST:
        raise CheckpointError(
            f"{STACK}: {len(stacks):,} stacks of {depth} blocks; {MOST:,} tensors are the most"
        )

    @lru_cache(maxsize=3)  # query, key and value of a block are asked for together
    def whole(name: str) -> Tensor:
        return source[name]

    def level(name: str, i: int) -> Tensor:
        return whole(name)[i]

    def spread(of: Callable[[str], T], of_block: Callable[[str, int], T]) -> dict[str, T]:
        made = {name: of(name) for name in source if name not in stacks}
        for name, leaf in stacks.items():
            made |= {BLOCK.format(i=i) + leaf: of_block(name, i) for i in range(depth)}
        return made

    header: Header = replace(
        old,
        shapes=spread(old.shapes.__getitem__, lambda name, i: old.shapes[name][1:]),
        dtypes=spread(old.dtypes.__getitem__, lambda name, i: old.dtypes[name]),
        notes=(*old.notes, f"{depth} blocks taken from one stack"),
    )
    files = ExitStack()
    files.push(source)  # closes with it
    readers: dict[str, Callable[[], Tensor]] = spread(
        lambda name: partial(source.__getitem__, name), lambda name, i: partial(level, name, i)
    )
    return Source(header, readers, files)


def _heads_to_ours(parts: Parts, spec: ViTSpec) -> Parts:
    """Kernels [D, H, h] or biases [H, h], one under the other, head by head."""
    return (
        torch.cat([part.flatten(-2).mT if part.ndim > 2 else part.flatten() for part in parts]),
    )


def _heads_to_theirs(count: int) -> Any:
    def split(parts: Parts, spec: ViTSpec) -> Parts:
        return tuple(part.mT.unflatten(-1, (spec.num_heads, -1)) if part.ndim > 1
                     else part.unflatten(0, (spec.num_heads, -1))
                     for part in parts[0].chunk(count))  # fmt: skip

    return split


def heads(count: int) -> Transform:
    """`count` projections into heads in one matrix of ours: query, key, value."""
    return Transform(_heads_to_ours, _heads_to_theirs(count))


OUT = Transform(
    lambda parts, spec: (parts[0].flatten(0, 1).mT,),  # [H, h, D] -> (D, H h)
    lambda parts, spec: (parts[0].T.unflatten(0, (spec.num_heads, -1)),),
)
CONVOLUTION = Transform(
    lambda parts, spec: (parts[0].permute(3, 2, 0, 1),),  # HWIO -> OIHW
    lambda parts, spec: (parts[0].permute(2, 3, 1, 0),),
)
PATCHES = Transform(  # NaFlex has a matrix [P P C, D], channel fastest
    lambda parts, spec: CONVOLUTION.to_ours((_as_kernel(parts[0], spec),), spec),
    CONVOLUTION.to_theirs,
)
TABLE = Transform(  # NaFlex has [gh, gw, D]
    lambda parts, spec: (parts[0].reshape(1, -1, parts[0].shape[-1]),),
    lambda parts, spec: parts,
)
GROUPS = Transform(  # [1, 1, 1, c]; Linen since 2021: [c]
    lambda parts, spec: (parts[0].flatten(),),
    lambda parts, spec: (parts[0].reshape(1, 1, 1, -1),),
)


def _as_kernel(part: Tensor, spec: ViTSpec) -> Tensor:
    return part.unflatten(0, (*spec.patch_size, spec.in_channels)) if part.ndim == 2 else part
