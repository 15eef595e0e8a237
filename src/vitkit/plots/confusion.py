"""Matrices as figures: confusions of classes, and attention between tokens."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from typing import Any

import numpy as np
from jaxtyping import Float, Float64, Int64
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.colors import ListedColormap, PowerNorm
from matplotlib.ticker import MaxNLocator

from vitkit.errors import SettingError, ShapeError
from vitkit.messages import escape, percent
from vitkit.plots import MAX_CLASSES
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
    assert len(classes) <= MAX_CLASSES, "checked before the counts are gathered"
    names = [escape(name) for name in classes]
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
        line += f" ({percent(right / images)})" if images else ""
        # a name may have a dollar sign, which would begin a formula
        axes.set_title(f"{escape(title)}: {line}" if title else line, parse_math=False)
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
    images = counts.sum(1)
    lines = ["most frequent confusions"]
    for place in np.argsort(-wrong, axis=None, kind="stable")[:CONFUSIONS_LISTED]:
        row, column = divmod(int(place), len(counts))
        if wrong[row, column]:
            line = (
                f"{row} {names[row]} as {column} {names[column]}: {wrong[row, column]:,} of "
                f"{images[row]:,} images"
            )
            lines.append(textwrap.fill(line, 130, subsequent_indent="   "))
    if len(lines) > 1:
        axes.annotate("\n".join(lines), (0, 0), (0, -34), **BELOW)


# Attention between tokens as a heat map: a row for each query, a column for each key.

CELL = 0.19
"""Inches of a cell; smaller if the tokens do not fit on a page."""
LARGEST, SMALLEST = 5.0, 1.2
"""Inches of the longer side of a map, at most, and of its sides, at least."""
GAP, ACROSS = 0.35, 4
"""Inches between two maps, and maps in a row."""
MOST_TOKENS = 60
"""Tokens of the longest side whose tokens are all named."""


def plot_attention(
    weights: Any,
    queries: Sequence[str] = (),
    keys: Sequence[str] | None = None,
    *,
    title: str = "",
    query_name: str = "query",
    key_name: str = "key",
) -> NotebookFigure:
    """Draw the attention between tokens: self-attention, or cross-attention of a decoder.

    The maps are those of a `Record`, such as `record.cross_attention[0][0]`. All have one scale,
    from 0 to the largest weight.

    >>> figure = plot_attention([[0.9, 0.1], [0.4, 0.6]], ["the", "cat"], ["le", "chat"])
    >>> [label.get_text() for label in figure.axes[0].get_xticklabels()]
    ['le', 'chat']

    Args:
        weights: (Q, K), or (k, Q, K) for several heads; a tensor or an array, in [0, 1].
        queries: the Q tokens; default none are named.
        keys: the K tokens; default `queries` where there are as many, as in self-attention.
        title: title of the figure.
        query_name: what a row is.
        key_name: what a column is.

    Returns:
        A matplotlib figure; `.savefig("attention.pdf")` writes it.

    Raises:
        ShapeError: weights of another shape.
        SettingError: another number of tokens than rows or columns, or weights that are not in
            [0, 1].
    """
    maps = _as_maps(weights)
    heads, rows, columns = maps.shape
    if keys is None:
        keys = queries if rows == columns else ()
    for name, tokens, count in (("queries", queries, rows), ("keys", keys, columns)):
        if tokens and len(tokens) != count:
            raise SettingError(f"{name} has {len(tokens)} tokens; the weights have {count}")
    cell = min(CELL, LARGEST / max(rows, columns))
    width, height = max(SMALLEST, columns * cell), max(SMALLEST, rows * cell)
    across = min(ACROSS, heads)
    wide, high = width + GAP, height + GAP + 0.15
    top = -(-heads // across) * high  # rounded up
    with new_figure(across * wide + 0.6, top) as figure:
        for head in range(heads):
            row, column = divmod(head, across)
            axes = figure.place(column * wide, top - row * high - height, width, height)
            most = float(maps.max()) or 1.0
            drawn = axes.imshow(maps[head], cmap="viridis", vmin=0, vmax=most, aspect="auto")
            heading = f"head {head}" if heads > 1 else ""
            if title and head == 0:
                heading = f"{escape(title)}\n{heading}".rstrip()
            axes.set_title(heading, loc="left", parse_math=False)
            _name_tokens(axes.yaxis, queries, query_name, is_named=column == 0)
            _name_tokens(axes.xaxis, keys, key_name, is_named=head + across >= heads)
        place = figure.place(across * wide - GAP + 0.1, top - height, 0.1, height)
        bar = figure.colorbar(drawn, cax=place)
        bar.set_label("attention weight")
        bar.outline.set_linewidth(0.6)
    return figure


def _as_maps(weights: Any) -> Float[np.ndarray, "k Q K"]:
    """Return weights (Q, K) or (k, Q, K), of a tensor or an array, as an array (k, Q, K)."""
    if hasattr(weights, "detach"):  # a tensor, of any device and in a graph or not
        weights = weights.detach().float().cpu()
    maps = np.asarray(weights, dtype=np.float64)
    if maps.ndim not in (2, 3) or 0 in maps.shape:
        raise ShapeError(
            f"expected weights (Q, K) or (heads, Q, K), got {maps.shape}; of a batch pass one "
            "image or sentence, such as maps[0]"
        )
    if not (maps.min() >= 0 and maps.max() <= 1 + 1e-4):  # NaN is neither
        raise SettingError("weights must be from 0 to 1, as a softmax gives them")
    return maps.reshape(-1, *maps.shape[-2:])


def _name_tokens(axis: Any, tokens: Sequence[str], name: str, *, is_named: bool) -> None:
    """Write the tokens at rows or columns, or nothing inside a figure of several maps."""
    axis.set_tick_params(length=0)
    axis.set_label_text(escape(name) if is_named else "")
    every = -(-len(tokens) // MOST_TOKENS) or 1
    places = range(0, len(tokens) if is_named else 0, every)
    shown = [escape(tokens[place]) for place in places]
    turned = axis.axis_name == "x" and max(map(len, shown), default=0) > 2
    look = {"fontsize": min(7.0, POINTS * CELL * every * 0.8), "rotation": 90 if turned else 0}
    axis.set_ticks(places, shown, parse_math=False, **look)
