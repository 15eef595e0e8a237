"""Inference of a spec from shapes: the parts that formats share; each reads its own shapes."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from vitkit.errors import CheckpointError
from vitkit.spec import Preprocess, ViTSpec

Sure = Literal["stored", "shapes", "usual"]
"""How a value is known: the file says it; shapes force it; files of this format usually have it."""


@dataclass(frozen=True)
class Inferred:
    """A model's description, inferred from a file of some format.

    Attributes:
        spec: the architecture.
        preprocess: how images are resized and normalised.
        classes: the K class names in the order of the logits; empty where the file has none.
        sure: spec field, or `preprocess`, -> how it is known.
        warnings: one line each.
        left_out: names of tensors of the file that are not of this model.
    """

    spec: ViTSpec
    preprocess: Preprocess
    classes: tuple[str, ...] = ()
    sure: Mapping[str, Sure] = field(default_factory=dict)
    warnings: tuple[str, ...] = ()
    left_out: tuple[str, ...] = ()


HALF_MEAN = Preprocess(mean=(0.5, 0.5, 0.5), std=(0.5, 0.5, 0.5))
IMAGENET_MEAN = Preprocess(mean=(0.485, 0.456, 0.406), std=(0.229, 0.224, 0.225))
OPEN_FIELDS = (
    "num_heads",
    "norm_eps",
    "activation",
    "image_size",
    "position_resampling",
    "preprocess",
)
"""Spec fields, and the preprocessing, that the tensors of a ViT's first paper leave open."""
HEADS_BY_WIDTH = {1152: 16, 1280: 16, 1408: 16, 1664: 16, 1792: 16}
"""Widths whose published models have heads that are not 64 wide; 1536 has 24 in DINOv2."""


def how_to_state(field: str, value: int | tuple[int, int] | str = "N") -> str:
    """Return the end of a message: how to state a field of the spec that a file leaves open."""
    words = str(list(value)).replace(" ", "") if isinstance(value, tuple) else value
    flag = f"--spec.{field.replace('_', '-')} {words}"
    return (
        f"pass {field}={value} ({flag}); for a command without that flag, convert it first: "
        f"vitkit convert FILE OUT --to vitkit {flag}"
    )


def usual_heads(width: int) -> int:
    """Return the number of heads that published models of this width have."""
    return HEADS_BY_WIDTH.get(width, max(1, width // 64))


def as_pair(size: Any) -> tuple[int, int]:
    """Return (height, width) of a size that may be one number."""
    if isinstance(size, int):
        return size, size
    height, width = size
    return height, width


def depth_of(names: Iterable[str], pattern: str) -> int:
    """Return the number of blocks that the names count.

    Args:
        names: names of tensors.
        pattern: a regular expression with one group, the number of the block.

    Raises:
        CheckpointError: no block, or a number that is left out.
    """
    matches = (re.match(pattern, name) for name in names)
    # A set, as each block has several tensors.
    numbers = {int(match[1]) for match in matches if match}
    if not numbers:
        raise CheckpointError("it has no blocks")
    count = len(numbers)
    # The largest number may be absurd; gaps are only looked for as far as there are blocks.
    gaps = [n for n in range(min(max(numbers), count) + 1) if n not in numbers]
    if gaps:
        subject = f"block {gaps[0]} is"
        if len(gaps) > 1:
            subject = f"blocks {gaps[0]}, {gaps[1]}, ... are"
        raise CheckpointError(f"{subject} missing; the file has {count} others")
    return count


def _square_grid(rows: int, prefix: int) -> int:
    """Return the side of a square grid whose position table has this number of rows."""
    side = math.isqrt(max(rows - prefix, 0))
    if side * side != rows - prefix or side == 0:
        raise CheckpointError(
            f"{rows} rows of positions minus {prefix} for prefix tokens are not a square grid; "
            f"{how_to_state('image_size', '[H,W]')}"
        )
    return side


def image_size(rows: int, prefix: int, patch: tuple[int, int], requested: Any) -> tuple[int, int]:
    """Return the image size (H, W) in pixels that a position table is for.

    Args:
        rows: rows of the table.
        prefix: those of them that belong to prefix tokens.
        patch: (height, width) in pixels.
        requested: one number, (H, W), or None for a square of the grid in the table.

    Raises:
        CheckpointError: a requested size with another number of patches, or that patches do not
            divide.
    """
    if requested is None:
        side = _square_grid(rows, prefix)
        return side * patch[0], side * patch[1]
    height, width = as_pair(requested)
    # The number of patches is checked first: it tells more about the mistake than a remainder.
    grid = (height // patch[0], width // patch[1])
    if grid[0] * grid[1] != rows - prefix:
        raise CheckpointError(
            f"image_size {height} x {width} gives {grid[0]} x {grid[1]} patches; the file has "
            f"positions for {rows - prefix}"
        )
    if height % patch[0] or width % patch[1]:
        covered = (grid[0] * patch[0], grid[1] * patch[1])
        size = covered[0] if covered[0] == covered[1] else covered
        raise CheckpointError(
            f"image_size {height} x {width} is not divisible by its patches, {patch[0]} x "
            f"{patch[1]}; they cover {covered[0]} x {covered[1]} pixels: "
            f"{how_to_state('image_size', size)}"
        )
    return height, width


def finish(
    fields: Mapping[str, Any],
    overrides: Mapping[str, Any],
    preprocess: Preprocess,
    *,
    stored: Iterable[str] = (),
    usual: Iterable[str] = (),
    classes: tuple[str, ...] = (),
    warnings: tuple[str, ...] = (),
) -> Inferred:
    """Return an `Inferred` of fields that are known in different ways.

    Args:
        fields: fields of `ViTSpec`; those that are neither `stored` nor `usual` follow from shapes.
        overrides: fields that the user gives; they count as stored.
        preprocess: its `image_size` becomes the spec's; for another number of channels, mean and
            std become the means of theirs, as many formats state three for grey images too.
        stored: fields (or `preprocess`) that the file itself states.
        usual: fields (or `preprocess`) that are only usual for files of this format.
        classes: class names, if the file has them.
        warnings: one line each.
    """
    spec = ViTSpec(**{**fields, **overrides})
    # In this order: a value that is stated is no longer only usual.
    sure: dict[str, Sure] = dict.fromkeys(fields, "shapes")
    sure |= dict.fromkeys(usual, "usual")
    sure |= dict.fromkeys((*stored, *overrides), "stored")
    # A grey model whose file states three means, or the reverse: all channels get their average.
    count = spec.in_channels
    if count != preprocess.channels:
        mean = sum(preprocess.mean) / len(preprocess.mean)
        std = sum(preprocess.std) / len(preprocess.std)
        preprocess = preprocess.replace(mean=(mean,) * count, std=(std,) * count)
    return Inferred(spec, preprocess.replace(image_size=spec.image_size), classes, sure, warnings)
