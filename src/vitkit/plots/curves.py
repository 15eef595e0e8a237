"""Curves as figures: of a run, of the search for a learning rate, and of calibration."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Bool, Float64
from matplotlib.axes import Axes
from matplotlib.ticker import FuncFormatter, MaxNLocator

from vitkit.plots.figure import (
    BLUE,
    ORANGE,
    RED,
    NotebookFigure,
    decorate,
    new_figure,
)

PANEL = (1.85, 1.6)
"""Width and height of a panel, in inches; three of them are as wide as a page."""
GAP, LEFT, BOTTOM = 0.66, 0.5, 0.5
"""Inches between two panels, and around them."""
COLOURS = (BLUE, ORANGE, "#009e73", "#cc79a7", RED, "#56b4e9", "#555555")
"""One for each run (Okabe and Ito, 2008)."""
MARKERS = ("o", "s", "^", "D", "v", "P", "X")
"""One for each run, so that lines differ without colours, too."""
BINS = 15
"""Bins of confidence, as many as the calibration error has."""
MOST_MARKED = 30
"""Epochs of a run whose single epochs have a mark each."""


def draw_curves(
    epochs: Float64[np.ndarray, " E"],
    *,
    train_loss: Float64[np.ndarray, " E"],
    learning_rate: Float64[np.ndarray, " E"],
    val_loss: Float64[np.ndarray, " E"] | None = None,
    val_top1: Float64[np.ndarray, " E"] | None = None,
    best_epoch: int | None = None,
) -> NotebookFigure:
    """Draw losses, validation accuracy and learning rate over the epochs, side by side.

    Values that are not finite are gaps. Without validation there is no panel of the accuracy.

    Args:
        epochs: numbers of the epochs (E,), counted from 1.
        train_loss: mean of each epoch's steps (E,), in nats.
        learning_rate: learning rate of the last step of each epoch (E,).
        val_loss: validation loss (E,), in nats.
        val_top1: share of the validation images that are right (E,), in [0, 1].
        best_epoch: the epoch to mark, one of `epochs`.
    """
    panels = 2 if val_top1 is None else 3
    width = LEFT + panels * (PANEL[0] + GAP)
    height = BOTTOM + PANEL[1] + 0.5
    with new_figure(width, height) as figure:
        places = iter(_places(panels, width, height))
        axes = figure.add_axes(next(places))
        _line(axes, epochs, train_loss, "training", BLUE, "o")
        if val_loss is not None:
            _line(axes, epochs, val_loss, "validation", ORANGE, "s")
        _finish(axes, epochs, "loss (nats)")
        if val_top1 is not None:
            axes = figure.add_axes(next(places))
            _draw_accuracy(axes, epochs, 100 * val_top1, best_epoch)
        axes = figure.add_axes(next(places))
        _line(axes, epochs, learning_rate, "", BLUE, "o")
        axes.set_ylim(bottom=0)
        # matplotlib would write a common factor above the panel
        axes.yaxis.set_major_formatter(FuncFormatter(_short_number))
        _finish(axes, epochs, "learning rate")
    return figure


class RunCurves(NamedTuple):
    """The curves of one of several runs.

    Attributes:
        name: short, for the legend.
        epochs: numbers of the epochs (E,), counted from 1.
        train_loss: mean of each epoch's steps (E,), in nats.
        val_loss: validation loss (E,), in nats; None without validation.
        val_top1: share of the validation images that are right (E,), in [0, 1]; None likewise.
    """

    name: str
    epochs: Float64[np.ndarray, " E"]
    train_loss: Float64[np.ndarray, " E"]
    val_loss: Float64[np.ndarray, " E"] | None
    val_top1: Float64[np.ndarray, " E"] | None


def draw_compared_curves(runs: Sequence[RunCurves]) -> NotebookFigure:
    """Draw training loss, validation loss and accuracy of several runs, a line for each run.

    Without validation in any of them there is one panel.

    Args:
        runs: from 1 to 7, one for each colour; people with any colour vision see them differ.
    """
    columns: dict[str, list[Float64[np.ndarray, " E"] | None]] = {
        "training loss (nats)": [run.train_loss for run in runs],
        "validation loss (nats)": [run.val_loss for run in runs],
        "validation top-1 (%)": [
            None if run.val_top1 is None else 100 * run.val_top1 for run in runs
        ],
    }
    panels = [
        (title, values)
        for title, values in columns.items()
        if any(one is not None for one in values)
    ]
    longest = max((run.epochs for run in runs), key=len)
    width, height = LEFT + len(panels) * (PANEL[0] + GAP), BOTTOM + PANEL[1] + 0.5
    with new_figure(width, height) as figure:
        places = _places(len(panels), width, height)
        for place, (title, values) in zip(places, panels, strict=True):
            axes = figure.add_axes(place)
            for run, one, colour, marker in zip(runs, values, COLOURS, MARKERS, strict=False):
                if one is not None:
                    _line(axes, run.epochs, one, run.name, colour, marker)
            _finish(axes, longest, title)
    return figure


def draw_rate_search(
    rates: Sequence[float], losses: Sequence[float], lowest: float, chosen: float
) -> NotebookFigure:
    """Draw the loss of a range test over the learning rate, and mark the rate that was chosen.

    Args:
        rates: learning rates that were tried (M,), increasing.
        losses: the smoothed training loss of each (M,), in nats.
        lowest: the rate at which the loss was lowest.
        chosen: the rate that the run uses.
    """
    width, height = 4.0, 2.7
    with new_figure(width, height) as figure:
        axes = figure.add_axes((0.15, 0.2, 0.8, 0.6))
        axes.plot(rates, losses, color=BLUE, label="smoothed training loss")
        # no rate was tried to its end where the first loss was not finite
        low = [loss for rate, loss in zip(rates, losses, strict=True) if rate == lowest]
        if low:
            marker: dict[str, Any] = {"marker": "v", "color": "black", "linestyle": "none"}
            axes.plot([lowest], low[:1], label=f"lowest loss: {_short_number(lowest)}", **marker)
        axes.axvline(chosen, color=RED, linestyle="--", label=f"chosen: {_short_number(chosen)}")
        axes.set_xscale("log")
        axes.set_xlabel("learning rate (logarithmic)")
        axes.set_ylabel("loss (nats)")
        decorate(axes)
    return figure


def _places(panels: int, width: float, height: float) -> list[tuple[float, float, float, float]]:
    """Return the place of each panel: left, bottom, width and height as parts of the figure."""
    places = []
    for number in range(panels):
        left = LEFT + number * (PANEL[0] + GAP)
        places.append((left / width, BOTTOM / height, PANEL[0] / width, PANEL[1] / height))
    return places


def _draw_accuracy(
    axes: Axes,
    epochs: Float64[np.ndarray, " E"],
    per_cent: Float64[np.ndarray, " E"],
    best_epoch: int | None,
) -> None:
    """Draw the accuracy of each epoch, and mark the best one."""
    _line(axes, epochs, per_cent, "validation", ORANGE, "s")
    if best_epoch is not None:
        (best,) = per_cent[epochs == best_epoch]
        axes.plot(
            [best_epoch],
            [best],
            marker="*",
            markersize=8,
            color="black",
            linestyle="none",
            clip_on=False,
            zorder=3,
            label=f"best: epoch {best_epoch}, {best:.1f} %",
        )
    # the margin must not reach beyond 0 and 100 %
    bottom, top = axes.get_ylim()
    axes.set_ylim(max(0, bottom), min(100, top))
    _finish(axes, epochs, "top-1 accuracy (%)")


def _line(
    axes: Axes,
    epochs: Float64[np.ndarray, " E"],
    values: Float64[np.ndarray, " E"],
    label: str,
    colour: str,
    marker: str,
) -> None:
    """Draw one value of every epoch; points are not clipped where they lie on the axis."""
    finite = np.isfinite(values)
    # a point between two gaps would not show without a mark
    marked = len(epochs) <= MOST_MARKED or not finite.all()
    axes.plot(
        epochs,
        np.where(finite, values, np.nan),
        color=colour,
        marker=marker if marked else "",
        markersize=2.5,
        clip_on=False,
        label=label,
    )


def _finish(axes: Axes, epochs: Float64[np.ndarray, " E"], title: str) -> None:
    """Give a panel its axes and legend."""
    axes.set_xlabel("epoch")
    axes.set_ylabel(title)
    axes.xaxis.set_major_locator(MaxNLocator(5, integer=True, steps=[1, 2, 5, 10]))
    # a single epoch would have ticks at parts of epochs
    if len(epochs) == 1:
        axes.set_xlim(epochs[0] - 1, epochs[0] + 1)
        axes.set_xticks(epochs)
    decorate(axes)


def _short_number(value: float, position: int | None = None) -> str:
    """Write a learning rate briefly: 0.001, 5e-5."""
    return f"{value:.3g}".replace("e-0", "e-").replace("e+0", "e")


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
    return figure
