"""The confusion matrix as an image: rows are the true classes, columns the predicted ones."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from io import BytesIO
from typing import TYPE_CHECKING, Any

import numpy as np
from jaxtyping import Float64, Int64, UInt8
from PIL import Image
from PIL.PngImagePlugin import PngInfo

from vitkit.io.results import PNG_KEY

if TYPE_CHECKING:
    from matplotlib.axes import Axes

MAX_CLASSES = 2000
"""Classes of the largest image."""
MATRIX_SIDE = 1000
LARGEST_CELL = 40
"""Pixels: cells are as large as fit into a matrix of MATRIX_SIDE, up to LARGEST_CELL."""
SMALLEST_NAMED_CELL = 9
"""Pixels of the smallest cell whose row and column are labelled."""
NAME_LETTERS = 24
"""Letters of a class name; the rest is cut off."""
DPI = 72
"""Pixels an inch, so that a font's size is in pixels too."""
RIGHT_COLOUR = np.array([12, 74, 140])
WRONG_COLOUR = np.array([178, 24, 32])


def confusion_matrix(
    counts: Int64[np.ndarray, "K K"], classes: Sequence[str], title: str
) -> UInt8[np.ndarray, "H W 3"]:
    """Draw a confusion matrix.

    A cell is the darker, the larger its part of the row: blue on the diagonal, red elsewhere; by
    the square root, so that few mistakes show too. With at most 25 classes each cell shows its
    number of images.

    Args:
        counts: (K, K), images of class i predicted as class j at [i, j]; K at most `MAX_CLASSES`.
        classes: the K names.
        title: the name of the data.
    """
    from matplotlib.figure import Figure

    cell = max(1, min(LARGEST_CELL, MATRIX_SIDE // len(counts)))
    side = cell * len(counts) / DPI
    figure = Figure(figsize=(side, side), dpi=DPI)
    axes = figure.add_axes((0, 0, 1, 1))  # the matrix alone; the texts lie outside
    axes.imshow(_colours(counts), interpolation="nearest")
    right = int(np.trace(counts))
    # a dollar in a name is no formula
    plain: dict[str, Any] = {"parse_math": False, "fontsize": 13}
    axes.set_title(f"{title}: {right:,} of {counts.sum():,} images right", **plain)
    axes.set_ylabel("true class", **plain)
    axes.set_xlabel("predicted class", **plain)
    names = []
    if cell >= SMALLEST_NAMED_CELL:
        names = [_shorten(name) for name in classes]
    plain["fontsize"] = min(13, cell)
    axes.set_xticks(range(len(names)), names, rotation=90, **plain)
    axes.set_yticks(range(len(names)), names, **plain)
    axes.tick_params(length=0)
    if cell == LARGEST_CELL:
        _draw_numbers(axes, counts)
    content = BytesIO()
    with warnings.catch_warnings():
        # letters that the font lacks are drawn as boxes
        warnings.filterwarnings("ignore", "Glyph .* missing from font", UserWarning)
        figure.savefig(content, bbox_inches="tight")
    return np.asarray(Image.open(content).convert("RGB"))


def png(pixels: UInt8[np.ndarray, "H W 3"], software: str = "") -> bytes:
    """Encode an image as a PNG file.

    Args:
        pixels: (H, W, 3) uint8 RGB.
        software: its text `Software`; none if empty.
    """
    content = BytesIO()
    mark = PngInfo()
    if software:
        mark.add_text(PNG_KEY, software)
    Image.fromarray(pixels).save(content, "PNG", pnginfo=mark)
    return content.getvalue()


def _row_shares(counts: Int64[np.ndarray, "K K"]) -> Float64[np.ndarray, "K K"]:
    """Return each cell's share of its row; 0 in a row without images."""
    return counts / np.maximum(counts.sum(1, keepdims=True), 1)


def _colours(counts: Int64[np.ndarray, "K K"]) -> UInt8[np.ndarray, "K K 3"]:
    # sqrt: a class confused in 1 % of the images still shows at 10 % strength
    strength = np.sqrt(_row_shares(counts))[..., None]
    diagonal = np.eye(len(counts), dtype=bool)[..., None]
    full_colours = np.where(diagonal, RIGHT_COLOUR, WRONG_COLOUR)
    return np.round(255 + strength * (full_colours - 255)).astype(np.uint8)


def _draw_numbers(axes: Axes, counts: Int64[np.ndarray, "K K"]) -> None:
    shares = _row_shares(counts)
    for row, column in np.argwhere(counts).tolist():
        # readable on the cell's own colour
        colour = "white" if shares[row, column] > 0.25 else "black"
        number = str(counts[row, column])
        axes.text(column, row, number, color=colour, ha="center", va="center", fontsize=11)


def _shorten(name: str) -> str:
    if len(name) <= NAME_LETTERS:
        return name
    return f"{name[: NAME_LETTERS - 1]}…"
