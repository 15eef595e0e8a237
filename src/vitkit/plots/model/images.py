"""Filters and position similarities of a model as images: one panel each."""

from __future__ import annotations

import math

import numpy as np
from jaxtyping import Float64, Int64
from matplotlib.axes import Axes
from matplotlib.cm import ScalarMappable
from matplotlib.colors import Normalize
from matplotlib.ticker import MaxNLocator

TILE = 16
"""Cells of the longer side of a filter or a map, at least: smaller ones are enlarged."""
LOWEST_BAR = 0.7
"""Height of a colour bar at least, as a part of the panel's width: its label needs the room."""
MOST_POSITIONS = 14
"""Positions of a side that have a map; of larger grids they are evenly spaced."""


def draw_filters(axes: Axes, components: Float64[np.ndarray, "n P Q C"]) -> None:
    """Draw filters in rows, each scaled by its largest weight; mid-grey is a weight of 0.

    Args:
        axes: the panel.
        components: (n, P, Q, C) with C of 1 (grey) or 3 (RGB), n of 1 or more.
    """
    axes.imshow(_filter_sheet(components), cmap="gray", vmin=0, vmax=1, interpolation="none")
    _hide_frame(axes)
    axes.set_title("First-layer filters")
    height, width = components.shape[1:3]
    axes.set_xlabel(
        f"{len(components)} principal components\nof {height} x {width} pixels", labelpad=3
    )
    scale = ScalarMappable(Normalize(-1, 1), cmap="gray")
    each = " of each colour" if components.shape[3] == 3 else ""
    _add_colour_bar(axes, scale, f"relative weight{each}", (-1.0, 0.0, 1.0))


def _filter_sheet(components: Float64[np.ndarray, "n P Q C"]) -> Float64[np.ndarray, "h w C"]:
    """Put filters side by side, scaled to [0, 1], in about as many rows as columns."""
    largest = np.abs(components).max(axis=(1, 2, 3), keepdims=True)
    shown = 0.5 + 0.5 * components / np.where(largest > 0, largest, 1)
    return _tiled(shown, across=math.ceil(math.sqrt(len(shown))), background=1.0)


def _tiled(
    tiles: Float64[np.ndarray, "n P Q C"], across: int, background: float
) -> Float64[np.ndarray, "h w C"]:
    """Put tiles into rows of `across`, with a gap between them of a tenth of a tile."""
    longer = max(tiles.shape[1:3])
    factor = -(-TILE // longer)  # rounded up: a gap of a whole cell is wide beside small tiles
    tiles = tiles.repeat(factor, axis=1).repeat(factor, axis=2)
    count, height, width, channels = tiles.shape
    gap = max(1, factor * longer // 10)
    rows = -(-count // across)
    high, wide = height + gap, width + gap
    sheet = np.full((rows * high - gap, across * wide - gap, channels), background)
    for number, tile in enumerate(tiles):
        top, left = number // across * high, number % across * wide
        sheet[top : top + height, left : left + width] = tile
    return sheet


def draw_positions(axes: Axes, cosine: Float64[np.ndarray, "gh gw gh gw"]) -> None:
    """Draw for each position the map of its similarity with all positions.

    Args:
        axes: the panel.
        cosine: (gh, gw, gh, gw) in [-1, 1]; N of 1 or more.
    """
    rows, columns = cosine.shape[:2]
    shown_rows, shown_columns = _spaced(rows), _spaced(columns)
    maps = cosine[np.ix_(shown_rows, shown_columns)].reshape(-1, rows, columns, 1)
    sheet = _tiled(maps, across=len(shown_columns), background=np.nan)[..., 0]
    lowest = float(cosine.min())
    image = axes.imshow(
        np.ma.masked_invalid(sheet), cmap="viridis", vmin=lowest, vmax=1, interpolation="none"
    )
    _hide_frame(axes)
    axes.set_title("Position similarity")
    for axis, shown, cells in (
        (axes.yaxis, shown_rows, sheet.shape[0]),
        (axes.xaxis, shown_columns, sheet.shape[1]),
    ):
        centres = (np.arange(len(shown)) + 0.5) * cells / len(shown) - 0.5
        # many numbers would touch each other
        step = -(-len(shown) // 7)
        axis.set_ticks(centres[::step], [str(number) for number in shown[::step]])
    axes.tick_params(length=0)
    axes.set_xlabel("patch column")
    axes.set_ylabel("patch row")
    _add_colour_bar(axes, image, "cosine similarity", MaxNLocator(4))


def shown_positions(grid: tuple[int, int]) -> int:
    """Return how many positions of a grid (gh, gw) have a map of their own."""
    return len(_spaced(grid[0])) * len(_spaced(grid[1]))


def _spaced(count: int) -> Int64[np.ndarray, " m"]:
    """Return at most `MOST_POSITIONS` numbers from 0 to count - 1, evenly spaced."""
    return np.linspace(0, count - 1, min(count, MOST_POSITIONS)).round().astype(np.int64)


def _hide_frame(axes: Axes) -> None:
    axes.set_xticks([])
    axes.set_yticks([])
    axes.spines[:].set_visible(False)
    axes.set_anchor("N")  # titles of a row are level, also above wide images


def _add_colour_bar(
    axes: Axes, shown: ScalarMappable, label: str, ticks: tuple[float, ...] | MaxNLocator
) -> None:
    """Put a colour bar on the right of a panel, as high as the panel or, of a wide one, higher."""
    height, width = axes.get_images()[0].get_size()
    share = max(1.0, LOWEST_BAR * width / height)
    place = axes.inset_axes((1.03, 1 - share, 0.045, share))
    bar = axes.figure.colorbar(shown, cax=place, ticks=ticks)
    bar.outline.set_linewidth(0.4)
    bar.set_label(label)
