"""Curves as figures: of a run, the search for a learning rate, calibration, and a model's depth."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, TypeAlias

import numpy as np
from jaxtyping import Bool, Float64, Int64
from matplotlib.axes import Axes
from matplotlib.cm import ScalarMappable
from matplotlib.colors import Normalize
from matplotlib.ticker import MaxNLocator, StrMethodFormatter

from vitkit.messages import escape
from vitkit.plots.figure import (
    BLUE,
    BRIEF,
    ORANGE,
    RED,
    TEXT,
    NotebookFigure,
    decorate,
    new_figure,
    wrap,
)

Epochs: TypeAlias = Float64[np.ndarray, " E"]
"""A value for each epoch."""
Columns: TypeAlias = Mapping[str, Epochs]
"""The columns of the metrics.csv of a run by name."""
PANEL = (1.85, 1.6)
"""Width and height of a panel, in inches; three of them are as wide as a page."""
GAP, LEFT, BOTTOM = 0.66, 0.5, 0.5
"""Inches between two panels, and around them."""
COLOURS = (BLUE, ORANGE, "#009e73", "#cc79a7", RED, "#56b4e9", "#555555")
"""One for each run (Okabe and Ito, 2008)."""
MARKERS = ("o", "s", "^", "D", "v", "P", "X")
"""One for each run, so that lines differ without colours, too."""
COMPARED = {
    "train_loss": "training loss (nats)",
    "val_loss": "validation loss (nats)",
    "val_top1": "validation top-1 (%)",
}
"""Columns that are compared between runs, and titles of their panels."""
BINS = 15
"""Bins of confidence, as many as the calibration error has."""
MOST_MARKED = 30
"""Epochs of a run whose single epochs have a mark each."""


def draw_curves(columns: Columns, best_epoch: int | None = None) -> NotebookFigure:
    """Draw losses, validation accuracy and learning rate over the epochs, side by side.

    Values that are not finite are gaps. Without validation there is no panel of the accuracy.

    Args:
        columns: `epoch` (counted from 1), `train_loss` and `lr`, with validation also `val_loss` in
            nats and `val_top1` in [0, 1]; a value for each of E epochs.
        best_epoch: the epoch to mark.
    """
    epochs, accuracy = columns["epoch"], columns.get("val_top1")
    with _panels(2 if accuracy is None else 3) as (figure, (losses, *others)):
        _line(losses, epochs, columns["train_loss"], "training", BLUE, "o")
        if "val_loss" in columns:
            _line(losses, epochs, columns["val_loss"], "validation", ORANGE, "s")
        _finish(losses, epochs, "loss (nats)")
        if accuracy is not None:
            axes = others[0]
            _line(axes, epochs, 100 * accuracy, "validation", ORANGE, "s")
            if best_epoch is not None:
                (best,) = 100 * accuracy[epochs == best_epoch]
                words = f"best: epoch {best_epoch}, {best:.1f} %"
                star: dict[str, Any] = {
                    "markersize": 8,
                    "clip_on": False,
                    "zorder": 3,
                    "label": words,
                }
                axes.plot([best_epoch], [best], "k*", **star)
            # the margin must not reach beyond 0 and 100 %
            bottom, top = axes.get_ylim()
            axes.set_ylim(max(0, bottom), min(100, top))
            _finish(axes, epochs, "top-1 accuracy (%)")
        rates = others[-1]
        _line(rates, epochs, columns["lr"], "", BLUE, "o")
        rates.set_ylim(bottom=0)
        rates.yaxis.set_major_formatter(StrMethodFormatter(BRIEF))
        _finish(rates, epochs, "learning rate")
    return figure


def draw_compared_curves(runs: Mapping[str, Columns]) -> NotebookFigure:
    """Draw training loss, validation loss and accuracy of several runs, a line for each run.

    Without validation in any of them there is one panel.

    Args:
        runs: a short name for the legend -> the columns of the run, as for `draw_curves`; from 1 to
            7, one for each colour: people with any colour vision see them differ.
    """
    shown = [name for name in COMPARED if any(name in columns for columns in runs.values())]
    longest = max((columns["epoch"] for columns in runs.values()), key=len)
    with _panels(len(shown)) as (figure, places):
        for axes, name in zip(places, shown, strict=True):
            factor = 100 if name == "val_top1" else 1
            looks = zip(runs.items(), COLOURS, MARKERS, strict=False)
            for (run, columns), colour, marker in looks:
                if name in columns:
                    _line(axes, columns["epoch"], factor * columns[name], run, colour, marker)
            _finish(axes, longest, COMPARED[name])
    return figure


def draw_reliability(
    confidence: Float64[np.ndarray, " N"], right: Bool[np.ndarray, " N"], title: str
) -> NotebookFigure:
    """Draw the share of right predictions over their confidence, above the number of images.

    Calibrated probabilities lie on the diagonal; bars below it are too confident. Guo et al.,
    "On Calibration of Modern Neural Networks" (arXiv 1706.04599), Fig. 1.

    Args:
        confidence: probability of the predicted class of each image (N,), in [0, 1].
        right: whether it is the true class (N,).
        title: title of the panel, ASCII.
    """
    # bin m of M holds the confidences in ((m - 1) / M, m / M]
    bins = np.clip(np.ceil(np.nan_to_num(confidence) * BINS).astype(np.int64) - 1, 0, BINS - 1)
    images = np.bincount(bins, minlength=BINS)
    present = images > 0
    accuracy = np.bincount(bins, right, BINS)[present] / images[present]
    mean = np.bincount(bins, np.nan_to_num(confidence), BINS)[present] / images[present]
    centres = (np.arange(BINS)[present] + 0.5) / BINS
    with new_figure(2.8, 3.2) as figure:
        axes = figure.add_axes((0.18, 0.36, 0.78, 0.55))
        axes.bar(centres, 100 * accuracy, 1 / BINS, color=BLUE, edgecolor="white", linewidth=0.5)
        axes.plot([0, 1], [0, 100], color="black", linestyle="--", linewidth=0.8)
        axes.plot(mean, 100 * accuracy, "o", color=ORANGE, markersize=3, clip_on=False)
        axes.set(ylim=(0, 100), ylabel="right predictions (%)")
        axes.set_title(title, parse_math=False)
        below = figure.add_axes((0.18, 0.12, 0.78, 0.19))
        below.bar(centres, 100 * images[present] / len(confidence), 1 / BINS, color="#767676")
        below.set(ylabel="images (%)", xlabel="confidence")
        for part in (axes, below):
            part.set_xlim(0, 1)
            part.spines[["top", "right"]].set_visible(False)
        axes.set_xticklabels([])
    return figure


@contextmanager
def _panels(count: int) -> Iterator[tuple[NotebookFigure, list[Axes]]]:
    """Draw a figure of some panels side by side."""
    step = PANEL[0] + GAP
    with new_figure(LEFT + count * step, BOTTOM + PANEL[1] + 0.5) as figure:
        yield figure, [figure.place(LEFT + n * step, BOTTOM, *PANEL) for n in range(count)]


def _line(
    axes: Axes,
    epochs: Epochs,
    values: Epochs,
    label: str,
    colour: str,
    marker: str,
) -> None:
    """Draw one value of every epoch; points are not clipped where they lie on the axis."""
    finite = np.isfinite(values)
    # a point between two gaps would not show without a mark
    marked = len(epochs) <= MOST_MARKED or not finite.all()
    (line,) = axes.plot(epochs, np.where(finite, values, np.nan), clip_on=False, label=label)
    line.set(color=colour, marker=marker if marked else "", markersize=2.5)


def _finish(axes: Axes, epochs: Epochs, title: str) -> None:
    """Give a panel its axes and legend."""
    axes.set(xlabel="epoch", ylabel=title)
    axes.xaxis.set_major_locator(MaxNLocator(5, integer=True, steps=[1, 2, 5, 10]))
    # a single epoch would have ticks at parts of epochs
    if len(epochs) == 1:
        axes.set_xlim(epochs[0] - 1, epochs[0] + 1)
        axes.set_xticks(epochs)
    decorate(axes)


# What a model has learned: panels, one figure each or all on a sheet.

SHEET_PANEL, LARGE_PANEL = (1.6, 1.5), (3.0, 2.7)
"""Width and height of a panel on the sheet, and of one alone, as wide as a column; in inches."""
SHEET_GAP = 1.08
"""Inches between panels."""
LETTER_WIDTH = 0.062
"""Inches of a letter of the caption, on average."""
GREY = "#707070"
"""Colour of lines to compare with."""
LEGEND_ROW, TITLE_GAP = 9.0, 8.0
"""Points of a row of a legend, and between legend and title."""
TILE = 16
"""Cells of the longer side of a filter or a map, at least: smaller ones are enlarged."""
LOWEST_BAR = 0.7
"""Height of a colour bar at least, as a part of the panel's width: its label needs the room."""
MOST_POSITIONS = 14
"""Positions of a side that have a map; of larger grids they are evenly spaced."""


def draw_sheet(panels: Sequence[Callable[[Axes], None]], caption: str) -> NotebookFigure:
    """Draw panels on one sheet, side by side, or a single one as a figure of its own.

    Args:
        panels: functions that draw one panel each into axes.
        caption: a line below all of them; broken where it is longer than the figure.
    """
    alone = len(panels) == 1
    side = LARGE_PANEL if alone else SHEET_PANEL
    wide = side[0] + SHEET_GAP
    with new_figure(len(panels) * wide, side[1] + SHEET_GAP) as figure:
        for number, draw in enumerate(panels):
            axes = figure.place(number * wide, SHEET_GAP, *side)
            draw(axes)
            if not alone:
                # papers refer to the panels by letters
                axes.title.set_text(f"({'abc'[number]}) {axes.get_title()}")
        lines = "\n".join(wrap(escape(caption), len(panels) * wide / LETTER_WIDTH))
        lowest = min(axes.get_position().y0 for axes in figure.axes)
        across, up = figure.get_size_inches()
        figure.text(-0.39 / across, lowest - 0.53 / up, lines, **TEXT)
    return figure


def draw_distance(axes: Axes, distance: Float64[np.ndarray, "L k"], uniform: float) -> None:
    """Draw the mean attention distance of every head, and the means over the heads of a block.

    Args:
        axes: the panel.
        distance: (L, k), in pixels.
        uniform: the distance of attention to all patches equally, in pixels.
    """
    depth, heads = distance.shape
    blocks, values = np.arange(depth), distance.ravel()
    points = axes.scatter(np.repeat(blocks, heads), values, s=9, label="head", zorder=2)
    points.set(color=BLUE, alpha=0.6, linewidths=0, clip_on=False)
    # a line of one point would not show
    mark = "D" if depth == 1 else ""
    axes.plot(blocks, distance.mean(axis=1), ORANGE, marker=mark, ms=3, label="mean over heads")
    axes.axhline(uniform, color=GREY, linestyle="--", label="equal to all patches")
    margin = 0.03 * depth + 0.1
    top = 1.05 * max(uniform, float(values.max())) or 1
    axes.set(xlabel="encoder block", xlim=(-margin, depth - 1 + margin), ylim=(0, top))
    axes.xaxis.set_major_locator(MaxNLocator(6, integer=True, steps=[1, 2, 3, 5, 10]))
    if depth == 1:
        axes.set_xticks([0.0])  # the locator would add fractions
    axes.set(title="Mean attention distance", ylabel="distance (pixels)")
    axes.set_title(axes.get_title(), pad=LEGEND_ROW * decorate(axes) + TITLE_GAP)


def draw_filters(axes: Axes, components: Float64[np.ndarray, "n P Q C"]) -> None:
    """Draw filters in rows, each scaled by its largest weight; mid-grey is a weight of 0.

    Args:
        axes: the panel.
        components: (n, P, Q, C) with C of 1 (grey) or 3 (RGB), n of 1 or more.
    """
    largest = np.abs(components).max(axis=(1, 2, 3), keepdims=True)
    shown = 0.5 + 0.5 * components / np.where(largest > 0, largest, 1)
    # in about as many rows as columns
    sheet = _tiled(shown, math.ceil(math.sqrt(len(shown))), background=1.0)
    axes.imshow(sheet, cmap="gray", vmin=0, vmax=1, interpolation="none")
    height, width = components.shape[1:3]
    words = f"{len(components)} principal components\nof {height} x {width} pixels"
    axes.set(title="First-layer filters", xlabel=words, xticks=[], yticks=[])
    each = " of each colour" if components.shape[3] == 3 else ""
    scale = ScalarMappable(Normalize(-1, 1), cmap="gray")
    _add_colour_bar(axes, scale, f"relative weight{each}", (-1.0, 0.0, 1.0))


def _tiled(
    tiles: Float64[np.ndarray, "n P Q C"], across: int, background: float
) -> Float64[np.ndarray, "h w C"]:
    """Put tiles into rows of `across`, with a gap between them of a tenth of a tile."""
    longer = max(tiles.shape[1:3])
    factor = -(-TILE // longer)  # rounded up: a gap of a whole cell is wide beside small tiles
    tiles = tiles.repeat(factor, axis=1).repeat(factor, axis=2)
    count, height, width, channels = tiles.shape
    gap = max(1, factor * longer // 10)
    high, wide, down = height + gap, width + gap, -(-count // across)
    sheet = np.full((down * across, high, wide, channels), background)
    sheet[:count, :height, :width] = tiles
    sheet = sheet.reshape(down, across, high, wide, channels).swapaxes(1, 2)
    return sheet.reshape(down * high, across * wide, channels)[:-gap, :-gap]


def draw_positions(axes: Axes, cosine: Float64[np.ndarray, "gh gw gh gw"]) -> None:
    """Draw for each position the map of its similarity with all positions.

    Args:
        axes: the panel.
        cosine: (gh, gw, gh, gw) in [-1, 1]; N of 1 or more.
    """
    rows, columns = cosine.shape[:2]
    shown = [shown_positions(count) for count in (rows, columns)]
    maps = cosine[np.ix_(*shown)].reshape(-1, rows, columns, 1)
    sheet = np.ma.masked_invalid(_tiled(maps, len(shown[1]), background=np.nan)[..., 0])
    image = axes.imshow(sheet, vmin=float(cosine.min()), vmax=1, interpolation="none")
    axes.set(title="Position similarity", xlabel="patch column", ylabel="patch row")
    for axis, numbers, cells in zip((axes.yaxis, axes.xaxis), shown, sheet.shape, strict=True):
        centres = (np.arange(len(numbers)) + 0.5) * cells / len(numbers) - 0.5
        # many numbers would touch each other
        step = -(-len(numbers) // 7)
        axis.set_ticks(centres[::step], [str(number) for number in numbers[::step]])
    axes.tick_params(length=0)
    _add_colour_bar(axes, image, "cosine similarity", MaxNLocator(4))


def shown_positions(count: int) -> Int64[np.ndarray, " m"]:
    """Return which of `count` rows or columns of positions have a map: 14 at most, evenly spaced.

    Args:
        count: rows, or columns, of a grid of patches.
    """
    return np.linspace(0, count - 1, min(count, MOST_POSITIONS)).round().astype(np.int64)


def _add_colour_bar(
    axes: Axes, shown: ScalarMappable, label: str, ticks: tuple[float, ...] | MaxNLocator
) -> None:
    """Put a colour bar on the right of an image, as high as it or, of a wide one, higher."""
    axes.spines[:].set_visible(False)
    axes.set_anchor("N")  # titles of a row are level, also above wide images
    height, width = axes.get_images()[0].get_size()
    share = max(1.0, LOWEST_BAR * width / height)
    place = axes.inset_axes((1.03, 1 - share, 0.045, share))
    bar = axes.figure.colorbar(shown, cax=place, ticks=ticks)
    bar.outline.set_linewidth(0.4)
    bar.set_label(label)
