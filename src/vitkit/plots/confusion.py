"""The confusion matrix as a figure: rows are the true classes, columns the predicted ones."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from jaxtyping import Float64, Int64
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.colors import ListedColormap, PowerNorm
from matplotlib.image import AxesImage
from matplotlib.ticker import MaxNLocator

from vitkit.messages import escape, percent
from vitkit.plots import MAX_CLASSES
from vitkit.plots.figure import NotebookFigure, new_figure, text_width, wrap_name

MOST_NAMED = 100
"""Classes of the largest matrix whose rows and columns have names; others have numbers."""
CONFUSIONS_LISTED = 10
"""Pairs of classes listed below a matrix without names."""
SMALLEST_ENLARGED = 300
"""Classes of the smallest matrix whose cells are drawn three cells wide."""
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


def draw_confusion(
    counts: Int64[np.ndarray, "K K"], classes: Sequence[str], title: str
) -> NotebookFigure:
    """Draw a confusion matrix.

    A cell is the darker, the larger its share of the row, by the square root, so that few mistakes
    show too. With few classes each cell has its number of images and its share of the row in per
    cent; with more the number alone, then neither. More than `MOST_NAMED` classes have numbers
    instead of names, and the most frequent confusions are listed below; from `SMALLEST_ENLARGED`
    classes on, a cell is drawn three cells wide, as one would be too small to see.

    Args:
        counts: (K, K), images of class i predicted as class j at [i, j]; K at most `MAX_CLASSES`.
        classes: the K names.
        title: the name of the data; none if empty.
    """
    assert len(classes) <= MAX_CLASSES, "checked before the counts are gathered"
    names = [escape(name) for name in classes]
    side = _side(len(counts))
    with new_figure(side + 1, side, "".join((title, *names))) as figure:
        axes = figure.place(0.0, 0.0, side, side)
        # cells without images are white, and a single image is darker than that
        shares = np.ma.masked_equal(_enlarged(100 * row_shares(counts)), 0)
        shown = axes.imshow(
            shares, cmap=_colours(), norm=PowerNorm(0.5, 0, 100), interpolation="none"
        )
        line = _right_in_words(counts)
        if title:
            line = f"{escape(title)}: {line}"
        # a name may have a dollar sign, which would begin a formula
        axes.set_title(line, parse_math=False)
        axes.set_ylabel("true class")
        axes.set_xlabel("predicted class")
        if len(names) <= MOST_NAMED:
            _draw_names(axes, names, side)
            _draw_numbers(axes, counts, side)
        else:
            _draw_class_numbers(axes, counts, names)
        _draw_colour_bar(figure, shown, side)
    return figure


def row_shares(counts: Int64[np.ndarray, "K K"]) -> Float64[np.ndarray, "K K"]:
    """Return each cell's share of its row, in [0, 1]; 0 in a row without images.

    Args:
        counts: (K, K), images of class i predicted as class j at [i, j].
    """
    return counts / np.maximum(counts.sum(1, keepdims=True), 1)


def _colours() -> ListedColormap:
    """Return a scale of blues without its lightest ones, which look like paper."""
    return ListedColormap(colormaps["Blues"](np.linspace(0.12, 1, 256)))


def _enlarged(shares: Float64[np.ndarray, "K K"]) -> Float64[np.ndarray, "K K"]:
    """Enlarge the cells of a matrix of very many classes, so that single ones can be seen.

    Each cell gets the largest share of the 3 x 3 cells around it.
    """
    if len(shares) < SMALLEST_ENLARGED:
        return shares
    windows = np.lib.stride_tricks.sliding_window_view(np.pad(shares, 1), (3, 3))
    return windows.max((2, 3))


def _side(num_classes: int) -> float:
    """Return the side of the matrix in inches: a column of a paper, up to a whole page."""
    return max(2.4, min(0.85 * num_classes, 4 + 0.06 * num_classes, 8.0))


def _right_in_words(counts: Int64[np.ndarray, "K K"]) -> str:
    right, images = int(np.trace(counts)), int(counts.sum())
    words = f"{right:,} of {images:,} images right"
    if images:
        words += f" ({percent(right / images)})"
    return words


def _draw_names(axes: Axes, names: list[str], side: float) -> None:
    """Write the class names at rows and columns, in as many lines as a cell is high."""
    cell = side * POINTS / len(names)
    font = min(8.0, 0.8 * cell)
    most_lines = max(1, int(cell / (1.15 * font)))
    rows = _wrap_names(names, most_lines, least_width=18)
    # level below its column where a name fits there, else upwards
    letters = int(cell / (LETTER * font))
    level = [wrap_name(name, letters) for name in names]
    fits = all(_fits(name, lines) for name, lines in zip(names, level, strict=True))
    columns = ["\n".join(lines) for lines in level] if fits else rows
    numbers = range(len(names))
    axes.set_yticks(numbers, rows, fontsize=font, parse_math=False)
    axes.set_xticks(numbers, columns, fontsize=font, rotation=0 if fits else 90, parse_math=False)
    axes.tick_params(length=0)


def _wrap_names(names: list[str], most_lines: int, least_width: int) -> list[str]:
    """Break names into at most `most_lines` lines, of at least `least_width` letters a line."""
    if most_lines == 1:
        return names
    # all names get the width of the longest, so that their lines look alike
    width = least_width
    while any(len(wrap_name(name, width)) > most_lines for name in names):
        width += 1
    return ["\n".join(wrap_name(name, width)) for name in names]


def _fits(name: str, lines: list[str]) -> bool:
    """Return whether a name is in at most 3 lines, of whole words."""
    words = [word for line in lines for word in line.split()]
    return len(lines) <= 3 and words == name.split()


def _draw_numbers(axes: Axes, counts: Int64[np.ndarray, "K K"], side: float) -> None:
    """Write the number of images into each cell that has any, and its per cent where it fits."""
    cell = side * POINTS / len(counts)
    # all cells have one font size, that of the longest number
    longest = max(4, text_width(f"{counts.max():,}"))
    font = min(8.0, 0.85 * cell / (LETTER * longest))
    if font < SMALLEST_FONT:
        return
    # the second line is as long as "100.0 %"
    with_share = cell > 7 * LETTER * 6 and cell > 2.6 * font
    shares = row_shares(counts)
    for row, column in np.argwhere(counts).tolist():
        share = shares[row, column]
        # readable on the cell's own colour
        colour = "white" if share > DARK else "black"
        text = f"{counts[row, column]:,}"
        if with_share:
            text += f"\n{100 * share:.1f} %"
        size = min(font, 7.0) if with_share else font
        axes.text(column, row, text, color=colour, ha="center", va="center", fontsize=size)


def _draw_class_numbers(axes: Axes, counts: Int64[np.ndarray, "K K"], names: Sequence[str]) -> None:
    """Number rows and columns, and list the most frequent confusions by name."""
    axes.set_ylabel("true class (number)")
    axes.set_xlabel("predicted class (number)")
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_locator(MaxNLocator(integer=True))
    # only the diagonal is right
    wrong = counts * ~np.eye(len(counts), dtype=bool)
    images = counts.sum(1)
    lines = []
    for place in np.argsort(-wrong, axis=None, kind="stable")[:CONFUSIONS_LISTED]:
        row, column = divmod(int(place), len(counts))
        if wrong[row, column]:
            lines.append(
                f"{row} {names[row]} as {column} {names[column]}: {wrong[row, column]:,} of "
                f"{images[row]:,} images"
            )
    if lines:
        text = "\n".join(["most frequent confusions", *lines])
        wrapped = "\n".join("\n   ".join(wrap_name(line, 130)) for line in text.splitlines())
        below: dict[str, Any] = {"xy": (0, 0), "xycoords": "axes fraction", "xytext": (0, -34)}
        axes.annotate(
            wrapped, **below, textcoords="offset points", va="top", fontsize=7, parse_math=False
        )


def _draw_colour_bar(figure: NotebookFigure, shown: AxesImage, side: float) -> None:
    """Draw the scale of the shares beside the matrix."""
    bar = figure.colorbar(shown, cax=figure.place(side + 0.12, 0.0, 0.14, side), ticks=PER_CENT)
    bar.set_label("share of the true class's images (%)")
    bar.outline.set_linewidth(0.6)
