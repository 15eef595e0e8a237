"""The confusion matrix as an image: rows are the true classes, columns the predicted ones."""

from __future__ import annotations

from collections.abc import Sequence
from io import BytesIO
from typing import TypeAlias

import numpy as np
from jaxtyping import Float64, Int64, UInt8
from PIL import Image, ImageDraw, ImageFont

MAX_CLASSES = 2000
"""Classes of the largest image."""
MATRIX_SIDE = 1000
LARGEST_CELL = 40
"""Pixels: cells are as large as fit into a matrix of MATRIX_SIDE, up to LARGEST_CELL."""
SMALLEST_NAMED_CELL = 9
"""Pixels of the smallest cell whose row and column are labelled."""
NAME_LETTERS = 24
"""Letters of a class name; the rest is cut off."""
SMALLEST_WIDTH = 420
"""Pixels, so that the heading fits over a small matrix."""
PLOT_MARGIN = 8
HEADING_HEIGHT = 18
"""Pixels around the image, and height of a line of the heading."""
RIGHT_COLOUR = np.array([12, 74, 140])
WRONG_COLOUR = np.array([178, 24, 32])
LIGHT_TEXT = "white"
DARK_TEXT = "black"
GREY_TEXT = "#666666"
Font: TypeAlias = ImageFont.ImageFont | ImageFont.FreeTypeFont


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
    cell = max(1, min(LARGEST_CELL, MATRIX_SIDE // len(counts)))
    font = ImageFont.load_default(min(13, max(cell, SMALLEST_NAMED_CELL)))
    names = []
    if cell >= SMALLEST_NAMED_CELL:
        names = [_shorten(name) for name in classes]
    name_width = PLOT_MARGIN + max([int(font.getlength(name)) for name in names], default=0)
    left = HEADING_HEIGHT + name_width + PLOT_MARGIN
    top = 2 * HEADING_HEIGHT + PLOT_MARGIN
    side = cell * len(counts)
    width = max(left + side + PLOT_MARGIN, SMALLEST_WIDTH)
    height = top + side + PLOT_MARGIN + name_width + HEADING_HEIGHT
    sheet = Image.new("RGB", (width, height), "white")
    colours = np.repeat(np.repeat(_colours(counts), cell, 0), cell, 1)
    sheet.paste(Image.fromarray(colours), (left, top))
    pen = ImageDraw.Draw(sheet)
    pen.rectangle((left - 1, top - 1, left + side, top + side), outline="#888888")
    _draw_heading(pen, counts, title)
    for number, name in enumerate(names):
        start = number * cell
        middle = top + start + cell // 2
        pen.text((left - PLOT_MARGIN // 2, middle), name, fill=DARK_TEXT, font=font, anchor="rm")
        below = (left + start, top + side + PLOT_MARGIN // 2)
        sheet.paste(_vertical_text(name, cell, font), below)
    if cell == LARGEST_CELL:
        _draw_numbers(pen, counts, (left, top))
    return np.asarray(sheet)


def png(pixels: UInt8[np.ndarray, "H W 3"]) -> bytes:
    """Encode an image as a PNG file."""
    content = BytesIO()
    Image.fromarray(pixels).save(content, "PNG")
    return content.getvalue()


def _row_shares(counts: Int64[np.ndarray, "K K"]) -> Float64[np.ndarray, "K K"]:
    """Return each cell's share of its row; 0 in a row without images."""
    return counts / np.maximum(counts.sum(1, keepdims=True), 1)


def _colours(counts: Int64[np.ndarray, "K K"]) -> UInt8[np.ndarray, "K K 3"]:
    strength = np.sqrt(_row_shares(counts))[..., None]
    diagonal = np.eye(len(counts), dtype=bool)[..., None]
    full_colours = np.where(diagonal, RIGHT_COLOUR, WRONG_COLOUR)
    return np.round(255 + strength * (full_colours - 255)).astype(np.uint8)


def _draw_heading(pen: ImageDraw.ImageDraw, counts: Int64[np.ndarray, "K K"], title: str) -> None:
    font = ImageFont.load_default(13)
    right = int(np.trace(counts))
    heading = f"{title}: {right:,} of {counts.sum():,} images right"
    pen.text((PLOT_MARGIN, PLOT_MARGIN), heading, fill=DARK_TEXT, font=font)
    axes = "rows: true class, columns: predicted"
    pen.text((PLOT_MARGIN, HEADING_HEIGHT + PLOT_MARGIN), axes, fill=GREY_TEXT, font=font)


def _draw_numbers(
    pen: ImageDraw.ImageDraw, counts: Int64[np.ndarray, "K K"], corner: tuple[int, int]
) -> None:
    font = ImageFont.load_default(11)
    shares = _row_shares(counts)
    left, top = corner
    half = LARGEST_CELL // 2
    for row, column in np.argwhere(counts).tolist():
        centre = (left + column * LARGEST_CELL + half, top + row * LARGEST_CELL + half)
        # readable on the cell's own colour
        colour = LIGHT_TEXT if shares[row, column] > 0.25 else DARK_TEXT
        pen.text(centre, str(counts[row, column]), fill=colour, font=font, anchor="mm")


def _vertical_text(text: str, width: int, font: Font) -> Image.Image:
    """Draw a line of text that is read from bottom to top, `width` pixels wide."""
    line = Image.new("RGB", (int(font.getlength(text)) + 1, width), "white")
    pen = ImageDraw.Draw(line)
    pen.text((line.width, width // 2), text, fill=DARK_TEXT, font=font, anchor="rm")
    return line.rotate(90, expand=True)


def _shorten(name: str) -> str:
    if len(name) <= NAME_LETTERS:
        return name
    return f"{name[: NAME_LETTERS - 1]}…"
