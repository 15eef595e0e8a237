"""A sheet of small images in rows and columns, with a name for each row and each column."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from jaxtyping import UInt8
from matplotlib.axes import Axes

from vitkit.messages import escape
from vitkit.plots.figure import SCREEN_DPI, NotebookFigure, drawing_style, fit_to_contents

WIDTH = 7.0
"""Inches of the widest sheet, as a page."""
LARGEST_TILE, NOTE, GAP = 0.9, 0.12, 0.04
"""Inches: the longer side of an image at most, the line below it, and the space beside it."""


def draw_tiles(
    tiles: UInt8[np.ndarray, "R C h w 3"],
    *,
    rows: Sequence[str],
    columns: Sequence[str],
    notes: Sequence[str],
    caption: str = "",
) -> NotebookFigure:
    """Draw images of one size in rows and columns.

    Args:
        tiles: (R, C, h, w, 3) uint8 RGB.
        rows: a name for each row.
        columns: a name for each column.
        notes: a short text below each image, row by row.
        caption: below the sheet.
    """
    down, across, height, width = tiles.shape[:4]
    tile = min(LARGEST_TILE, WIDTH / across - GAP) / max(height, width)  # inches of a pixel
    step = width * tile + GAP, height * tile + NOTE + GAP
    size = across * step[0], down * step[1]
    with drawing_style("".join([*rows, *columns, *notes, caption])) as missing:
        figure = NotebookFigure(figsize=size, dpi=SCREEN_DPI)
        figure.missing = missing
        for number, note in enumerate(notes):
            row, column = divmod(number, across)
            left, top = column * step[0], size[1] - row * step[1]
            place = (left, top - height * tile, width * tile, height * tile)
            axes = figure.add_axes(
                (place[0] / size[0], place[1] / size[1], place[2] / size[0], place[3] / size[1]),
                label="image",
            )
            axes.imshow(tiles[row, column], interpolation="none", aspect="auto")
            axes.set_axis_off()
            # Seven points per inch of a tile: a note such as "0.123 %" is no wider than its image.
            small = min(5.5, 7 * step[0])
            _write(axes, (0.5, -0.02), note, ha="center", va="top", fontsize=small)
            if row == 0:
                axes.set_title(escape(columns[column]), fontsize=6.5, pad=2, parse_math=False)
            if column == 0:
                _write(axes, (-0.06, 0.5), rows[row], ha="right", va="center", fontsize=6.5)
            if row == down - 1 and column == 0 and caption:
                axes.annotate(
                    escape(caption),
                    (0, 0),
                    xytext=(0, -10),
                    xycoords="axes fraction",
                    textcoords="offset points",
                    va="top",
                    fontsize=6.5,
                    parse_math=False,
                )
        fit_to_contents(figure)
    return figure


def _write(axes: Axes, place: tuple[float, float], text: str, **style: Any) -> None:
    """Write a text at a place of the axes, from (0, 0) lower left to (1, 1) upper right."""
    axes.text(*place, escape(text), transform=axes.transAxes, parse_math=False, **style)
