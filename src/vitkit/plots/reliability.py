"""The reliability diagram: how often predictions of each confidence are right."""

from __future__ import annotations

import numpy as np
from jaxtyping import Bool, Float64

from vitkit.plots.figure import (
    BLUE,
    ORANGE,
    SCREEN_DPI,
    NotebookFigure,
    drawing_style,
    fit_to_contents,
)

BINS = 15
"""Bins of confidence, as many as the calibration error has."""


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
    with drawing_style():
        figure = NotebookFigure(figsize=(2.8, 3.2), dpi=SCREEN_DPI)
        axes = figure.add_axes((0.18, 0.36, 0.78, 0.55))
        axes.bar(centres, 100 * accuracy, 1 / BINS, color=BLUE, edgecolor="white", linewidth=0.5)
        axes.plot([0, 1], [0, 100], color="black", linestyle="--", linewidth=0.8)
        axes.plot(mean, 100 * accuracy, "o", color=ORANGE, markersize=3, clip_on=False)
        axes.set_xlim(0, 1)
        axes.set_ylim(0, 100)
        axes.set_xticklabels([])
        axes.set_ylabel("right predictions (%)")
        axes.set_title(title, parse_math=False)
        below = figure.add_axes((0.18, 0.12, 0.78, 0.19))
        below.bar(centres, 100 * images[present] / len(confidence), 1 / BINS, color="#767676")
        below.set_xlim(0, 1)
        below.set_ylabel("images (%)")
        below.set_xlabel("confidence")
        for part in (axes, below):
            part.spines[["top", "right"]].set_visible(False)
        fit_to_contents(figure)
    return figure
