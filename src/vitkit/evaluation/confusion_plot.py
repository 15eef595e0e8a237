"""The confusion matrix as an image: rows are the true classes, columns the predicted ones."""

from __future__ import annotations

from collections.abc import Sequence
from io import BytesIO
from typing import TypeAlias

import numpy as np
from jaxtyping import Int64, UInt8
from PIL import Image, ImageDraw, ImageFont

LARGEST = 2000
"""Classes of the largest image."""
SIDE, CELL = 1000, 40
"""Pixels: a matrix is no wider than this with its cells as large as fit, up to CELL."""
NAMED = 9
"""From this cell size on, rows and columns bear their classes' names."""
LETTERS, MARGIN, HEADING = 24, 8, 18
RIGHT, WRONG = np.array([12, 74, 140]), np.array([178, 24, 32])
LIGHT, DARK = "white", "black"
Font: TypeAlias = ImageFont.ImageFont | ImageFont.FreeTypeFont


def confusion_matrix(
    counts: Int64[np.ndarray, "K K"], classes: Sequence[str], title: str
) -> UInt8[np.ndarray, "H W 3"]:
    """Draw a confusion matrix.

    A cell is the darker, the larger its part of the row: blue where that is right, red where it is
    wrong; by the square root, so that few mistakes show too. With at most 25 classes the number of
    images stands in it.

    Args:
        counts: (K, K), images of class i taken for class j at [i, j]; K at most `LARGEST`.
        classes: the K names.
        title: whose images they are.
    """
    cell = max(1, min(CELL, SIDE // len(counts)))
    font = ImageFont.load_default(min(13, max(cell, NAMED)))
    names = [_short(name) for name in classes] if cell >= NAMED else []
    room = MARGIN + max([int(font.getlength(name)) for name in names], default=0)
    left, top = HEADING + room + MARGIN, 2 * HEADING + MARGIN
    side = cell * len(counts)
    size = (max(left + side + MARGIN, 420), top + side + MARGIN + room + HEADING)
    sheet = Image.new("RGB", size, "white")
    colours = np.repeat(np.repeat(_colours(counts), cell, 0), cell, 1)
    sheet.paste(Image.fromarray(colours), (left, top))
    pen, plain = ImageDraw.Draw(sheet), ImageFont.load_default(13)
    pen.rectangle((left - 1, top - 1, left + side, top + side), outline="#888888")
    right = int(np.trace(counts))
    said = f"{title}: {right:,} of {counts.sum():,} images right"
    pen.text((MARGIN, MARGIN), said, fill=DARK, font=plain)
    pen.text((MARGIN, HEADING + MARGIN), "rows: true class, columns: predicted", fill="#666666",
             font=plain)  # fmt: skip
    for number, name in enumerate(names):
        middle = number * cell + cell // 2
        pen.text((left - MARGIN // 2, top + middle), name, fill=DARK, font=font, anchor="rm")
        below = left + number * cell, top + side + MARGIN // 2
        sheet.paste(_upwards(name, cell, font), below)
    if cell == CELL:
        _numbers(pen, counts, (left, top))
    return np.asarray(sheet)


def png(pixels: UInt8[np.ndarray, "H W 3"]) -> bytes:
    """An image as a PNG file."""
    content = BytesIO()
    Image.fromarray(pixels).save(content, "PNG")
    return content.getvalue()


def _parts(counts: Int64[np.ndarray, "K K"]) -> np.ndarray:
    """Each cell's part of its row; 0 in a row without images."""
    return counts / np.maximum(counts.sum(1, keepdims=True), 1)


def _colours(counts: Int64[np.ndarray, "K K"]) -> UInt8[np.ndarray, "K K 3"]:
    strength = np.sqrt(_parts(counts))[..., None]
    inks = np.where(np.eye(len(counts), dtype=bool)[..., None], RIGHT, WRONG)
    return np.round(255 + strength * (inks - 255)).astype(np.uint8)


def _numbers(
    pen: ImageDraw.ImageDraw, counts: Int64[np.ndarray, "K K"], corner: tuple[int, int]
) -> None:
    font, parts = ImageFont.load_default(11), _parts(counts)
    for i, j in np.argwhere(counts).tolist():
        place = corner[0] + j * CELL + CELL // 2, corner[1] + i * CELL + CELL // 2
        colour = LIGHT if parts[i, j] > 0.25 else DARK
        pen.text(place, str(counts[i, j]), fill=colour, font=font, anchor="mm")


def _upwards(text: str, height: int, font: Font) -> Image.Image:
    """A line of text that is read from below upwards, `height` pixels from side to side."""
    line = Image.new("RGB", (int(font.getlength(text)) + 1, height), "white")
    ImageDraw.Draw(line).text((line.width, height // 2), text, fill=DARK, font=font, anchor="rm")
    return line.rotate(90, expand=True)


def _short(name: str) -> str:
    return name if len(name) <= LETTERS else f"{name[: LETTERS - 1]}…"
