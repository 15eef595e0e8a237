"""What shapes say of an architecture, for every format alike."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from typing import Any

from vitkit.errors import CheckpointError
from vitkit.spec import Preprocess, ViTSpec
from vitkit.weights.formats.format import Inferred, Sure

HALF = Preprocess(mean=(0.5, 0.5, 0.5), std=(0.5, 0.5, 0.5))
IMAGENET = Preprocess(mean=(0.485, 0.456, 0.406), std=(0.229, 0.224, 0.225))
HEADS = {1152: 16, 1280: 16, 1408: 16, 1664: 16, 1792: 16}
"""Widths whose published models have heads that are not 64 wide; 1536 has 24 in DINOv2."""


def usual_heads(width: int) -> int:
    """The number of heads that published models of this width have."""
    return HEADS.get(width, max(1, width // 64))


def depth_of(names: Iterable[str], pattern: str) -> int:
    """How many blocks the names count: `pattern` is a regular expression with one group, i.

    Raises:
        CheckpointError: none, or a number that is left out.
    """
    found = {int(match[1]) for name in names if (match := re.match(pattern, name))}
    if not found:
        raise CheckpointError("it has no blocks")
    count = len(found)
    if gaps := [number for number in range(min(max(found), count) + 1) if number not in found]:
        which = f"block {gaps[0]} is" if len(gaps) == 1 else f"blocks {gaps[0]}, {gaps[1]}, ... are"
        raise CheckpointError(f"{which} missing; the file has {count} others")
    return count


def square_grid(rows: int, prefix: int) -> int:
    """The side of a square grid whose position table has so many rows.

    Raises:
        CheckpointError: no square; the image's size must then be given (`image_size=`).
    """
    side = math.isqrt(max(rows - prefix, 0))
    if side * side != rows - prefix or side == 0:
        raise CheckpointError(
            f"{rows} rows of positions less {prefix} for prefix tokens are no square grid; "
            f"give image_size"
        )
    return side


def image_size(rows: int, prefix: int, patch: tuple[int, int], asked: object) -> tuple[int, int]:
    """The image (H, W) that a position table is for: as asked, or a square of the grid it has."""
    if asked is None:
        side = square_grid(rows, prefix)
        return side * patch[0], side * patch[1]
    height, width = (asked, asked) if isinstance(asked, int) else tuple(asked)  # type: ignore[arg-type]
    if (height // patch[0]) * (width // patch[1]) != rows - prefix:
        raise CheckpointError(
            f"image_size {height} x {width} makes {height // patch[0]} x {width // patch[1]} "
            f"patches; the file has positions for {rows - prefix}"
        )
    if height % patch[0] or width % patch[1]:
        whole = (height // patch[0] * patch[0], width // patch[1] * patch[1])
        one = whole[0] == whole[1]
        raise CheckpointError(
            f"image_size {height} x {width} is not divisible by its patches, {patch[0]} x "
            f"{patch[1]}; they cover {whole[0]} x {whole[1]} pixels: give "
            f"image_size={whole[0] if one else whole} "
            f"(--spec.image-size {whole[0] if one else list(whole)})"
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
    """Put an `Inferred` together: fields from shapes, those stored in the file, those only usual.

    Args:
        fields: of `ViTSpec`.
        overrides: what the user says; it counts as stored.
        preprocess: its `image_size` becomes the spec's; for another number of channels, mean and
            std become the means of theirs, as many formats state three for grey images too.
        stored: fields (or `preprocess`) that the file itself states.
        usual: fields (or `preprocess`) that are only what files of this format usually have.
        classes: class names, if the file has them.
        warnings: one line each.
    """
    spec = ViTSpec(**{**fields, **overrides})
    sure: dict[str, Sure] = dict.fromkeys(fields, "shapes")
    sure |= dict.fromkeys(usual, "usual")
    sure |= dict.fromkeys((*stored, *overrides), "stored")
    if (count := spec.in_channels) != preprocess.channels:
        mean, std = (sum(values) / len(values) for values in (preprocess.mean, preprocess.std))
        preprocess = preprocess.replace(mean=(mean,) * count, std=(std,) * count)
    return Inferred(spec, preprocess.replace(image_size=spec.image_size), classes, sure, warnings)
