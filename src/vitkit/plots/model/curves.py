"""Attention distance, entropy and token similarity over depth: one panel each."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from jaxtyping import Float64
from matplotlib.axes import Axes
from matplotlib.ticker import FuncFormatter, MaxNLocator

from vitkit.messages import percent
from vitkit.plots.figure import BLUE, ORANGE, RED

GREY = "#707070"
"""Colour of lines to compare with."""
BINS = 40
"""Bars of a histogram."""
LEGEND_ROW, TITLE_GAP = 9.0, 8.0
"""Points of a row of a legend, and between legend and title."""


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
    """Give a panel its grid and legend."""
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(visible=True, linewidth=0.4, color="#dddddd")
    axes.set_axisbelow(True)
    # Above the panel, where it hides nothing; the title makes room for it.
    rows = len(axes.get_legend_handles_labels()[1])
    above: dict[str, Any] = {"loc": "lower left", "bbox_to_anchor": (-0.02, 1.0)}
    axes.legend(frameon=False, handlelength=1.5, labelspacing=0.25, borderpad=0.2, **above)
    axes.set_title(axes.get_title(), pad=LEGEND_ROW * rows + TITLE_GAP)


def _block_name(number: float) -> str:
    """Write the number of a block; -1 stands for the embedding before the first."""
    return "emb." if number == -1 else f"{number:g}"
