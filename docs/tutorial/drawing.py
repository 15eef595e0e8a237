"""Figures, tables and counts of the chapters."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from IPython.display import display
from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from numpy.typing import ArrayLike
from rich.console import Console
from torch import Tensor, nn

from vitkit.layer_table import LayerTable


def grid_of(
    images: Sequence[ArrayLike],
    titles: Sequence[str] = (),
    *,
    across: int,
    size: float = 1.0,
    colours: str | None = None,
    vmax: float | None = None,
) -> Figure:
    """Draw images in a grid.

    Args:
        images: values in 0..1, or uint8.
        titles: one for each image.
        across: images per row.
        size: height and width of an image in inches.
        colours: colour map of images with one channel; by default grey, viridis with titles.
        vmax: colours run from 0 to this value; by default over the values of each image.
    """
    down = -(-len(images) // across)  # rows, rounded up
    figure, axes = plt.subplots(
        down,
        across,
        figsize=(across * size, down * (size + 0.25 * bool(titles))),
        squeeze=False,
    )
    colour_map = colours or ("viridis" if titles else "gray")
    for number, ax in enumerate(axes.flat):
        ax.axis("off")
        if number < len(images):
            lowest = None if vmax is None else 0.0
            ax.imshow(
                np.asarray(images[number]), cmap=colour_map, vmin=lowest, vmax=vmax
            )
            if titles:
                ax.set_title(titles[number], fontsize=8)
    figure.subplots_adjust(wspace=0.06, hspace=0.06 if not titles else 0.3)
    return figure


def mosaic(pieces: ArrayLike, *, across: int, gap: int = 2) -> np.ndarray:
    """Join equal pieces (N, H, W) or (N, H, W, C) to one image, row by row, with white gaps.

    >>> mosaic(np.zeros((6, 4, 4)), across=3).shape
    (10, 16)
    """
    values = np.asarray(pieces)
    margin = [(0, 0), (0, gap), (0, gap)] + [(0, 0)] * (values.ndim - 3)
    framed = np.pad(values, margin, constant_values=1)
    rows = [
        np.concatenate(list(framed[n : n + across]), 1)
        for n in range(0, len(framed), across)
    ]
    return np.concatenate(rows)[:-gap, :-gap]  # no gap at the right and at the bottom


def band(
    ax: Axes,
    x: Sequence[float],
    scores: Sequence[Sequence[float]],
    label: str,
    colour: str,
) -> None:
    """Draw the mean of the scores at each x as a line, and their range as a band."""
    means = [sum(values) / len(values) for values in scores]
    ax.plot(x, means, "o-", color=colour, label=label)
    lowest, highest = (
        [min(values) for values in scores],
        [max(values) for values in scores],
    )
    ax.fill_between(x, lowest, highest, color=colour, alpha=0.25)


def heat(
    values: ArrayLike, *, size: tuple[float, float], xlabel: str, ylabel: str
) -> Axes:
    """Draw a table of numbers as colours, with its colour scale."""
    figure, ax = plt.subplots(figsize=size)
    drawn = ax.imshow(
        np.asarray(values), aspect="auto", cmap="RdBu", interpolation="nearest"
    )
    ax.set(xlabel=xlabel, ylabel=ylabel)
    figure.colorbar(drawn, ax=ax)
    return ax


def similarity_grid(ax: Axes, similarity: Tensor, side: int, title: str) -> None:
    """Draw the similarities (N, N) of the N = side * side positions of a grid: one small grid for
    each position, with its similarity to all others."""
    squares = (
        similarity.view(side, side, side, side)
        .transpose(1, 2)
        .reshape(side**2, side**2)
    )
    ax.imshow(squares, vmin=-1, vmax=1)
    for line in range(side, side**2, side):
        ax.axhline(line - 0.5, color="white")
        ax.axvline(line - 0.5, color="white")
    ax.set_title(title, fontsize=9)
    ax.axis("off")


def count(model: nn.Module) -> int:
    """Count the parameters of a model."""
    return sum(p.numel() for p in model.parameters())


def print_wrapped(text: str) -> None:
    """Print a long line within the width of a page."""
    print(textwrap.fill(text, width=88, subsequent_indent="    "))


@dataclass(frozen=True)
class Shown:
    """A layer table: HTML on a page and in Jupyter, narrow text in a terminal."""

    table: LayerTable
    depth: int

    def __repr__(self) -> str:
        console = Console(
            width=88, color_system=None, force_jupyter=False, highlight=False
        )
        with console.capture() as captured:
            console.print(self.table.render(depth=self.depth, narrow=True))
        return captured.get()

    def _repr_html_(self) -> str:
        return self.table.to_html(self.depth)


def print_table(table: LayerTable, depth: int = 3) -> None:
    """Show a layer table, at most `depth` levels deep."""
    display(Shown(table, depth))
