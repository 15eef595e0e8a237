"""Figures of what a model has learned: panels, one figure each or all on a sheet."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float64, Int64
from matplotlib.axes import Axes
from matplotlib.cm import ScalarMappable
from matplotlib.colors import Normalize
from matplotlib.ticker import FuncFormatter, MaxNLocator

from vitkit.messages import escape, percent
from vitkit.plots.figure import BLUE, ORANGE, RED, NotebookFigure, decorate, new_figure, wrap_name

PANEL = (1.6, 1.5)
"""Width and height of a panel on the sheet, in inches."""
LARGE_PANEL = (3.0, 2.7)
"""The same of a panel alone: with its axis titles as wide as a column of a paper."""
GAPS = (1.08, 1.12)
"""Inches between panels, across and down."""
ACROSS = 3
"""Panels in a row of the sheet."""
LETTER_WIDTH = 0.062
"""Inches of a letter of the caption, on average."""
GREY = "#707070"
"""Colour of lines to compare with."""
BINS = 40
"""Bars of a histogram."""
LEGEND_ROW, TITLE_GAP = 9.0, 8.0
"""Points of a row of a legend, and between legend and title."""
TILE = 16
"""Cells of the longer side of a filter or a map, at least: smaller ones are enlarged."""
LOWEST_BAR = 0.7
"""Height of a colour bar at least, as a part of the panel's width: its label needs the room."""
MOST_POSITIONS = 14
"""Positions of a side that have a map; of larger grids they are evenly spaced."""


class ModelPanel(NamedTuple):
    """One panel: its name in file names, and the function that draws it into axes."""

    name: str
    draw: Callable[[Axes], None]


def draw_model_panels(panels: Sequence[ModelPanel], caption: str) -> NotebookFigure:
    """Draw panels on one sheet, or a single one as a figure of its own.

    Args:
        panels: one or more, row by row.
        caption: a line below all of them; broken where it is longer than the figure.
    """
    alone = len(panels) == 1
    side = LARGE_PANEL if alone else PANEL
    across = min(ACROSS, len(panels))
    if len(panels) == 4:
        across = 2
    rows = -(-len(panels) // across)  # rounded up
    width = across * (side[0] + GAPS[0])
    height = rows * (side[1] + GAPS[1])
    text = escape(caption)
    with new_figure(width, height, text) as figure:
        for number, panel in enumerate(panels):
            left = number % across * (side[0] + GAPS[0])
            bottom = height - number // across * (side[1] + GAPS[1]) - side[1]
            axes = figure.place(left, bottom, *side)
            panel.draw(axes)
            if not alone:
                # papers refer to the panels by letters
                axes.title.set_text(f"({'abcdefghi'[number]}) {axes.get_title()}")
        _write_caption(figure, text, bottom=min(axes.get_position().y0 for axes in figure.axes))
    return figure


def _write_caption(figure: NotebookFigure, text: str, bottom: float) -> None:
    """Write the caption below the panels, as part of invisible axes in the lower left corner."""
    width = figure.get_size_inches()[0]
    lines = wrap_name(text, int(width / LETTER_WIDTH))
    axes = figure.add_axes((0, bottom, 0.01, 0.01))
    axes.set_axis_off()
    axes.annotate(
        "\n".join(lines),
        (0, 0),
        xycoords="axes fraction",
        xytext=(-28, -38),
        textcoords="offset points",
        ha="left",
        va="top",
        fontsize=7,
        parse_math=False,
    )


def draw_distance(axes: Axes, distance: Float64[np.ndarray, "L k"], uniform: float) -> None:
    """Draw the mean attention distance of every head.

    Args:
        axes: the panel.
        distance: (L, k), in pixels.
        uniform: the distance of attention to all patches equally, in pixels.
    """
    _draw_heads(axes, distance)
    axes.axhline(uniform, color=GREY, linestyle="--", label="equal to all patches")
    axes.set_ylim(0, 1.05 * max(uniform, float(distance.max())) or 1)
    axes.set_title("Mean attention distance")
    axes.set_ylabel("distance (pixels)")
    _finish(axes, len(distance))


def draw_entropy(axes: Axes, entropy: Float64[np.ndarray, "L k"], largest: float) -> None:
    """Draw the attention entropy of every head, in nats and as a share of its largest value.

    Args:
        axes: the panel.
        entropy: (L, k), in nats.
        largest: the entropy of attention to all T tokens equally, log T.
    """
    _draw_heads(axes, entropy)
    axes.axhline(largest, color=GREY, linestyle="--", label="equal to all tokens")
    axes.set_ylim(0, 1.05 * largest or 1)
    axes.set_title("Attention entropy")
    axes.set_ylabel("entropy (nats)")
    _finish(axes, len(entropy))
    if largest:
        share = axes.secondary_yaxis("right", _scales(largest))
        share.set_ylabel("share of log T")
        share.spines[:].set_visible(False)


def _scales(largest: float) -> tuple[Callable[[Any], Any], Callable[[Any], Any]]:
    """Return functions from nats to a share of the largest entropy, and back."""
    return lambda nats: nats / largest, lambda share: share * largest


def draw_similarity(
    axes: Axes,
    similarity: Float64[np.ndarray, " depths"],
    spread: Float64[np.ndarray, " depths"],
    token: str,
) -> None:
    """Draw the similarity of a token in each layer with that in the last layer.

    Args:
        axes: the panel.
        similarity: (L + 1,) cosine of the embedding, then after each block.
        spread: (L + 1,) standard deviation over the images.
        token: its name.
    """
    depth = np.arange(-1, len(similarity) - 1)
    low, high = similarity - spread, np.minimum(similarity + spread, 1)
    axes.fill_between(
        depth, low, high, color=BLUE, alpha=0.2, linewidth=0, label="standard deviation"
    )
    marks: dict[str, Any] = {"marker": "o", "markersize": 3, "color": BLUE, "clip_on": False}
    axes.plot(depth, similarity, label="mean over images", **marks)
    axes.axhline(0, color=GREY, linewidth=0.5)
    axes.set_ylim(min(0, float(low.min())) * 1.05, 1.02)
    axes.set_title(f"{token.capitalize()} over depth")
    axes.set_ylabel("cosine with the last layer")
    _finish(axes, len(similarity) - 1, first=-1)


def draw_norms(axes: Axes, norms: Float64[np.ndarray, " n"], threshold: float) -> None:
    """Draw how many patch tokens have which norm; those of high norm stand out.

    Args:
        axes: the panel.
        norms: norms of all patch tokens of all images after the last block.
        threshold: a norm above it is high.
    """
    edges = np.histogram_bin_edges(norms, bins=BINS).tolist()
    high = norms > threshold
    counts, _, _ = axes.hist(norms[~high], edges, color=BLUE, label="patch tokens")
    if high.any():
        share = percent(high.mean())
        axes.hist(norms[high], edges, color=RED, label=f"high norm: {high.sum():,} ({share})")
    axes.axvline(threshold, color=GREY, linestyle="--", label="median + 4 MAD")
    # a single token would not show beside thousands
    axes.set_yscale("log")
    axes.set_ylim(0.7, max(10.0, 2 * float(np.max(counts))))
    axes.set_title("Patch norms")
    axes.set_xlabel("norm after the last block")
    axes.set_ylabel("patch tokens (logarithmic)")
    _decorate(axes)


def _draw_heads(axes: Axes, values: Float64[np.ndarray, "L k"]) -> None:
    """Draw a point for every head of every block, and a line of the means over heads."""
    depth, heads = values.shape
    blocks = np.repeat(np.arange(depth), heads)
    points: dict[str, Any] = {"color": BLUE, "alpha": 0.6, "linewidths": 0, "clip_on": False}
    axes.scatter(blocks, values.ravel(), s=9, label="head", zorder=2, **points)
    # a line of one point would not show
    mark = "D" if depth == 1 else ""
    means: dict[str, Any] = {
        "color": ORANGE,
        "marker": mark,
        "markersize": 3,
        "label": "mean over heads",
    }
    axes.plot(np.arange(depth), values.mean(axis=1), **means)


def _finish(axes: Axes, depth: int, first: int = 0) -> None:
    """Give a panel its axis of blocks and its legend."""
    axes.set_xlabel("encoder block")
    margin = 0.03 * depth + 0.1
    axes.set_xlim(first - margin, depth - 1 + margin)
    axes.xaxis.set_major_locator(MaxNLocator(6, integer=True, steps=[1, 2, 3, 5, 10]))
    # matplotlib hands over floats, or whole numbers of NumPy
    axes.xaxis.set_major_formatter(FuncFormatter(lambda number, place: _block_name(float(number))))
    if depth == 1 and first == 0:
        axes.set_xticks([0.0])  # the locator would add fractions
    if first < 0:
        ticks = [number for number in axes.get_xticks() if 0 <= number < depth]
        axes.set_xticks([-1, *[number for number in ticks if number > 0 or depth <= 6]])
    _decorate(axes)


def _decorate(axes: Axes) -> None:
    """Give a panel its grid, its legend, and its title above that."""
    rows = decorate(axes)
    axes.set_title(axes.get_title(), pad=LEGEND_ROW * rows + TITLE_GAP)


def _block_name(number: float) -> str:
    """Write the number of a block; -1 stands for the embedding before the first."""
    return "emb." if number == -1 else f"{number:g}"


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
