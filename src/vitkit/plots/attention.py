"""Attention between tokens as a heat map: a row for each query, a column for each key."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from jaxtyping import Float

from vitkit.errors import SettingError, ShapeError
from vitkit.messages import escape
from vitkit.plots.figure import NotebookFigure, new_figure

CELL = 0.19
"""Inches of a cell; smaller if the tokens do not fit on a page."""
LARGEST, SMALLEST = 5.0, 1.2
"""Inches of the longer side of a map, at most, and of its sides, at least."""
GAP, ACROSS = 0.35, 4
"""Inches between two maps, and maps in a row."""
MOST_NAMED = 60
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
    _heads, rows, columns = maps.shape
    if keys is None:
        keys = queries if rows == columns else ()
    for name, tokens, count in (("queries", queries, rows), ("keys", keys, columns)):
        if tokens and len(tokens) != count:
            raise SettingError(f"{name} has {len(tokens)} tokens; the weights have {count}")
    names = [escape(token) for token in (*queries, *keys)]
    text = "".join([title, query_name, key_name, *names])
    return _draw_maps(maps, queries, keys, (escape(title), query_name, key_name), text)


def _draw_maps(
    maps: Float[np.ndarray, "k Q K"],
    queries: Sequence[str],
    keys: Sequence[str],
    titles: tuple[str, str, str],
    text: str,
) -> NotebookFigure:
    """Draw the maps in rows, with tokens at the left and below, and one colour bar."""
    title, query_name, key_name = titles
    heads, rows, columns = maps.shape
    cell = min(CELL, LARGEST / max(rows, columns))
    width, height = max(SMALLEST, columns * cell), max(SMALLEST, rows * cell)
    across = min(ACROSS, heads)
    down = -(-heads // across)  # rounded up
    step = width + GAP, height + GAP + 0.15
    size = across * step[0] + 0.6, down * step[1]
    most = float(maps.max()) or 1.0
    with new_figure(*size, text) as figure:
        for head in range(heads):
            row, column = divmod(head, across)
            bottom = size[1] - row * step[1] - height
            axes = figure.place(column * step[0], bottom, width, height)
            drawn = axes.imshow(maps[head], cmap="viridis", vmin=0, vmax=most, aspect="auto")
            heading = f"head {head}" if heads > 1 else ""
            if title and head == 0:
                heading = f"{title}\n{heading}".rstrip()
            axes.set_title(heading, loc="left", parse_math=False)
            _name_tokens(axes.yaxis, queries, query_name, is_named=column == 0)
            _name_tokens(axes.xaxis, keys, key_name, is_named=head + across >= heads)
        place = figure.place(across * step[0] - GAP + 0.1, size[1] - height, 0.1, height)
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
    if not (np.isfinite(maps).all() and maps.min() >= 0 and maps.max() <= 1 + 1e-4):
        raise SettingError("weights must be from 0 to 1, as a softmax gives them")
    return maps.reshape(-1, *maps.shape[-2:])


def _name_tokens(axis: Any, tokens: Sequence[str], name: str, *, is_named: bool) -> None:
    """Write the tokens at rows or columns, or nothing inside a figure of several maps."""
    axis.set_tick_params(length=0)
    if is_named:
        axis.set_label_text(escape(name))
    if not is_named or not tokens:
        axis.set_ticks([])
        return
    every = -(-len(tokens) // MOST_NAMED)
    places = range(0, len(tokens), every)
    shown = [escape(tokens[place]) for place in places]
    font = min(7.0, 72 * CELL * every * 0.8)
    turned = axis.axis_name == "x" and max(map(len, shown)) > 2
    axis.set_ticks(places, shown, fontsize=font, rotation=90 if turned else 0, parse_math=False)
