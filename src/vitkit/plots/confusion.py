"""The confusion matrix of classes as a figure."""

import textwrap
from collections.abc import Sequence

import numpy as np
from jaxtyping import Float64, Int64
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.colors import ListedColormap, PowerNorm
from matplotlib.ticker import MaxNLocator

from vitkit import messages, plots
from vitkit.plots.figure import BELOW, NotebookFigure, new_figure, wrap

MOST_NAMED = 100
"""Classes of the largest matrix whose rows and columns have names; others have numbers."""
CONFUSIONS_LISTED = 10
"""Pairs of classes listed below a matrix without names."""
POINTS = 72
"""Points per inch."""
LETTER = 0.6
"""Width of a letter, as a part of the font's size."""
SMALLEST_FONT = 4.5
"""Points; smaller numbers are left out."""
DARK = 0.45
"""Share from which a cell is dark, so that its text is white."""
PER_CENT = (0, 1, 5, 20, 50, 100)
"""Ticks of the colour bar."""
LINE_OF_NAMES = 18
"""Letters of a line of a class name, at least."""


def draw_confusion(
    counts: Int64[np.ndarray, "K K"], classes: Sequence[str], title: str
) -> NotebookFigure:
    """Draw a confusion matrix: rows are the true classes, columns the predicted ones.

    A cell is the darker, the larger its share of the row, by the square root, so that few mistakes
    show too. With few classes each cell has its number of images and its share of the row in per
    cent; with more the number alone, then neither. More than `MOST_NAMED` classes have numbers
    instead of names, and the most frequent confusions are listed below.

    Args:
        counts: (K, K), images of class i predicted as class j at [i, j]; K at most `MAX_CLASSES`.
        classes: the K names.
        title: the name of the data; none if empty.
    """
    assert len(classes) <= plots.MAX_CLASSES, "checked before the counts are gathered"
    names = [messages.escape(name) for name in classes]
    # inches: a column of a paper, up to a whole page
    side = max(2.4, min(0.85 * len(names), 4 + 0.06 * len(names), 8.0))
    shares = row_shares(counts)
    with new_figure(side + 1, side) as figure:
        axes = figure.place(0.0, 0.0, side, side)
        # cells without images are white, a single image is darker than that
        drawn = np.ma.masked_equal(100 * shares, 0)
        blues = ListedColormap(colormaps["Blues"](np.linspace(0.12, 1, 256)))
        shown = axes.imshow(drawn, cmap=blues, norm=PowerNorm(0.5, 0, 100), interpolation="none")
        right, images = int(np.trace(counts)), int(counts.sum())
        line = f"{right:,} of {images:,} images right"
        line += f" ({messages.percent(right / images)})" if images else ""
        # a name may have a dollar sign, which would begin a formula
        axes.set_title(f"{messages.escape(title)}: {line}" if title else line, parse_math=False)
        axes.set(xlabel="predicted class", ylabel="true class")
        cell = side * POINTS / len(names)
        if len(names) <= MOST_NAMED:
            _draw_names(axes, names, cell)
            _draw_numbers(axes, counts, shares, cell)
        else:
            _draw_class_numbers(axes, counts, names)
        bar = figure.colorbar(shown, cax=figure.place(side + 0.12, 0.0, 0.14, side), ticks=PER_CENT)
        bar.set_label("share of the true class's images (%)")
        bar.outline.set_linewidth(0.6)
    return figure


def row_shares(counts: Int64[np.ndarray, "K K"]) -> Float64[np.ndarray, "K K"]:
    """Return each cell's share of its row, in [0, 1]; 0 in a row without images.

    Args:
        counts: (K, K), images of class i predicted as class j at [i, j].
    """
    return counts / np.maximum(counts.sum(1, keepdims=True), 1)


def _draw_names(axes: Axes, names: list[str], cell: float) -> None:
    """Write the class names at rows and columns, in as many lines as a cell is high."""
    font = min(8.0, 0.8 * cell)
    lines = int(cell / (1.15 * font))
    longest = max(map(len, names))
    # all names get the width of the longest, so that their lines look alike
    width = LINE_OF_NAMES if lines > 1 else longest
    while any(len(wrap(name, width)) > lines for name in names) and width < longest:
        width += 1
    rows = [textwrap.fill(name, max(1, width)) for name in names]
    # level below its column where a name fits there in whole words, else upwards
    letters = int(cell / (LETTER * font))
    words = [word for name in names for word in name.split()]
    level = max(map(len, words), default=0) <= letters
    level = level and all(len(wrap(name, letters)) <= 3 for name in names)
    columns = [textwrap.fill(name, letters) for name in names] if level else rows
    places = range(len(names))
    axes.set_yticks(places, rows, fontsize=font, parse_math=False)
    axes.set_xticks(places, columns, fontsize=font, rotation=0 if level else 90, parse_math=False)
    axes.tick_params(length=0)


def _draw_numbers(
    axes: Axes,
    counts: Int64[np.ndarray, "K K"],
    shares: Float64[np.ndarray, "K K"],
    cell: float,
) -> None:
    """Write the number of images into each cell that has any, and its per cent where it fits."""
    # all cells have one font size, that of the longest number
    longest = max(4, len(f"{counts.max():,}"))
    font = min(8.0, 0.85 * cell / (LETTER * longest))
    if font < SMALLEST_FONT:
        return
    # the second line is as long as "100.0 %"
    with_share = cell > 7 * LETTER * 6 and cell > 2.6 * font
    for row, column in np.argwhere(counts).tolist():
        share = shares[row, column]
        text = f"{counts[row, column]:,}"
        if with_share:
            text += f"\n{100 * share:.1f} %"
        # readable on the cell's own colour
        colour = "white" if share > DARK else "black"
        size = min(font, 7.0) if with_share else font
        axes.text(column, row, text, color=colour, ha="center", va="center", fontsize=size)


def _draw_class_numbers(axes: Axes, counts: Int64[np.ndarray, "K K"], names: Sequence[str]) -> None:
    """Number rows and columns, and list the most frequent confusions by name."""
    axes.set(xlabel="predicted class (number)", ylabel="true class (number)")
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_locator(MaxNLocator(integer=True))
    # only the diagonal is right
    wrong = counts * ~np.eye(len(counts), dtype=bool)
    lines = ["most frequent confusions"]
    for place in np.argsort(-wrong, axis=None, kind="stable")[:CONFUSIONS_LISTED]:
        row, column = divmod(int(place), len(counts))
        if wrong[row, column]:
            pair = f"{row} {names[row]} as {column} {names[column]}"
            line = f"{pair}: {wrong[row, column]:,} of {counts[row].sum():,} images"
            lines.append(textwrap.fill(line, 130, subsequent_indent="   "))
    if len(lines) > 1:
        axes.annotate("\n".join(lines), (0, 0), (0, -34), **BELOW)
