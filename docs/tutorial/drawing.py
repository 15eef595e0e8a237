"""The few ways in which the chapters draw."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from numpy.typing import ArrayLike


def grid_of(
    images: Sequence[ArrayLike],
    titles: Sequence[str] = (),
    *,
    across: int,
    size: float = 1.0,
    colours: str | None = None,
) -> Figure:
    """Images side by side, `across` of them in a row, each `size` inches; values 0..1 or uint8.

    Tables of numbers are drawn in `colours`: grey without titles, else viridis.
    """
    down = -(-len(images) // across)
    figure, places = plt.subplots(
        down, across, figsize=(across * size, down * (size + 0.25 * bool(titles))), squeeze=False
    )
    chosen = colours or ("viridis" if titles else "gray")
    for number, place in enumerate(places.flat):
        place.axis("off")
        if number < len(images):
            place.imshow(np.asarray(images[number]), cmap=chosen)
            if titles:
                place.set_title(titles[number], fontsize=8)
    figure.subplots_adjust(wspace=0.06, hspace=0.06 if not titles else 0.3)
    return figure


def mosaic(pieces: ArrayLike, *, across: int, gap: int = 2) -> np.ndarray:
    """Equal pieces (N, H, W) or (N, H, W, C) as one image, row by row, with white gaps.

    >>> mosaic(np.zeros((6, 4, 4)), across=3).shape
    (10, 16)
    """
    values = np.asarray(pieces)
    rim = [(0, 0), (0, gap), (0, gap)] + [(0, 0)] * (values.ndim - 3)
    framed = np.pad(values, rim, constant_values=1)
    rows = [np.concatenate(list(framed[n : n + across]), 1) for n in range(0, len(framed), across)]
    return np.concatenate(rows)[:-gap, :-gap]


def band(
    place: Axes,
    numbers: Sequence[float],
    scores: Sequence[Sequence[float]],
    label: str,
    colour: str,
) -> None:
    """The mean of the scores at each number as a line, from the lowest to the highest as a band."""
    means = [sum(some) / len(some) for some in scores]
    place.plot(numbers, means, "o-", color=colour, label=label)
    lowest, highest = [min(some) for some in scores], [max(some) for some in scores]
    place.fill_between(numbers, lowest, highest, color=colour, alpha=0.25)


def heat(
    values: ArrayLike, *, size: tuple[float, float], across: str, down: str, colours: str = "RdBu"
) -> Axes:
    """A table of numbers as colours, with its scale."""
    figure, place = plt.subplots(figsize=size)
    shown = place.imshow(np.asarray(values), aspect="auto", cmap=colours, interpolation="nearest")
    place.set(xlabel=across, ylabel=down)
    figure.colorbar(shown, ax=place)
    return place
