"""Images side by side, each with a title, a caption and a colour bar; no pixel is lost."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import UInt8
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator

from vitkit.io.atomic import replacing
from vitkit.messages import escape
from vitkit.plots.figure import (
    SCREEN_DPI,
    NotebookFigure,
    drawing_style,
    encode_png,
    encode_svg,
    fit_to_contents,
)
from vitkit.plots.overlay import ColourScale
from vitkit.plots.wrapping import wrap_name

SIDE = 3.0
"""Longer side of an image, in inches; two of them are as wide as a page."""
GAP, TITLE, LINE, BAR, BAR_ROOM = 0.14, 0.2, 0.14, 0.09, 0.62
"""Inches between images, of a title, of a line of a caption, of a colour bar and of it with its
numbers."""
LOWEST_BAR = 0.8
"""Inches of a colour bar, at least: that of a panorama is higher than the image."""
NARROWEST = 1.0
"""Inches of a column, at least: the caption of a narrow image needs some room."""
LETTERS_AN_INCH = 17
"""Letters of a caption in an inch."""


class Panel(NamedTuple):
    """One image of a figure.

    Attributes:
        pixels: (H, W, 3) uint8 RGB.
        title: above it.
        caption: lines below it; long ones are broken.
        scale: scale of the colour bar on its right; none if absent.
        unit: unit of the values of the scale.
    """

    pixels: UInt8[np.ndarray, "H W 3"]
    title: str = ""
    caption: Sequence[str] = ()
    scale: ColourScale | None = None
    unit: str = ""


def draw_panels(
    panels: Sequence[Panel],
    *,
    across: int,
    title: str = "",
    caption: Sequence[str] = (),
    side: float = SIDE,
) -> NotebookFigure:
    """Draw images in rows, each above its caption; nothing of a caption is cut.

    Args:
        panels: one image each, of any sizes.
        across: images in a row.
        title: title of the figure.
        caption: lines below the whole figure.
        side: longer side of an image, in inches.

    Returns:
        A figure; `pixel_dpi` of it gives the dots per inch of a file in which no pixel is lost.
    """
    across = min(across, len(panels))
    # All sizes in inches first: a figure is created with its own.
    lefts = _lefts(panels, across, side)
    width = lefts[-1]
    wrapped = []
    for number, panel in enumerate(panels):
        column = number % across
        wrapped.append(_wrap(panel.caption, lefts[column + 1] - lefts[column] - GAP))
    below = _wrap(caption, width)
    rows = []
    for start in range(0, len(panels), across):
        row = range(start, min(start + across, len(panels)))
        heights = [_size(panels[n], side)[1] for n in row]
        heights += [LOWEST_BAR for n in row if panels[n].scale]
        above = TITLE if any(panels[n].title for n in row) else 0.0
        lines = max(len(wrapped[n]) for n in row)
        rows.append((row, above, max(heights), lines * LINE + GAP))
    height = sum(above + image + text for _, above, image, text in rows)
    top = height = height + (TITLE if title else 0.0) + len(below) * LINE + GAP
    # The font is chosen by the characters in the text.
    names = "".join([title, *caption, *(panel.title + panel.unit for panel in panels)])
    with drawing_style(names + "".join(map("".join, wrapped))) as missing:
        figure = NotebookFigure(figsize=(width, height), dpi=SCREEN_DPI)
        figure.missing = missing
        if title:
            _write(figure, (0.0, top / height), [escape(title)], size=9.0)
            top -= TITLE
        for row, above, image, text in rows:
            top -= above + image
            for place, number in enumerate(row):
                _draw(figure, panels[number], wrapped[number], (lefts[place], top), side)
            top -= text
        if below:
            _write(figure, (0.0, (top + GAP / 2) / height), below)
        fit_to_contents(figure)
        _snap(figure, pixel_dpi(figure))
    return figure


def pixel_dpi(figure: Figure, least: int = SCREEN_DPI) -> float:
    """Return dots per inch at which the largest image of a figure keeps each of its pixels.

    Args:
        figure: as `draw_panels` returns it.
        least: pixels are drawn as squares of a whole number of dots until there are so many.
    """
    densest = 0.0
    for axes in figure.axes:
        for image in axes.get_images():
            if axes.get_label() == "image":
                width = axes.get_position().width * figure.get_figwidth()
                densest = max(densest, image.get_size()[1] / width)
    # A whole multiple: a pixel is never 1.5 dots wide.
    return densest * math.ceil(least / densest) if densest else float(least)


def save_panels(
    figure: NotebookFigure, path: Path, software: str, source: str | None = None
) -> None:
    """Write a figure as PNG, with all pixels of its images, or as SVG.

    Args:
        figure: as `draw_panels` returns it.
        path: ends in .png or .svg; a file that exists is replaced.
        software: named in the file's metadata.
        source: source of the figure, for the metadata; none if absent.

    Raises:
        OutputError: a path that cannot be written.
    """
    if path.suffix.lower() == ".svg":
        content = encode_svg(figure, software, source)
    else:
        content = encode_png(figure, software, pixel_dpi(figure), source)
    with replacing(path) as temporary:
        temporary.write_bytes(content)


def _size(panel: Panel, side: float) -> tuple[float, float]:
    """Return width and height of an image in inches."""
    height, width = panel.pixels.shape[:2]
    inch = side / max(height, width)
    return width * inch, height * inch


def _lefts(panels: Sequence[Panel], across: int, side: float) -> list[float]:
    """Return the left edge of each column in inches, and the right end."""
    lefts = [0.0]
    for column in range(across):
        widths = [NARROWEST]
        for panel in panels[column::across]:
            widths.append(_size(panel, side)[0] + (BAR_ROOM if panel.scale else 0.0))
        lefts.append(lefts[-1] + max(widths) + GAP)
    return lefts


def _wrap(lines: Sequence[str], width: float) -> list[str]:
    letters = int(width * LETTERS_AN_INCH)
    return [part for line in lines for part in wrap_name(escape(line), letters)]


def _draw(
    figure: Figure, panel: Panel, caption: Sequence[str], corner: tuple[float, float], side: float
) -> None:
    """Draw one image with its texts and its colour bar; `corner` is its lower left, in inches."""
    across, up = figure.get_size_inches()
    width, height = _size(panel, side)
    left, bottom = corner
    axes = figure.add_axes((left / across, bottom / up, width / across, height / up), label="image")
    axes.imshow(panel.pixels, interpolation="none", aspect="auto")
    axes.set_axis_off()
    if panel.title:
        # with a height: otherwise matplotlib measures all ticks, even invisible ones
        name = escape(panel.title)
        axes.set_title(name, loc="left", y=1.0, pad=3, fontsize=8.0, parse_math=False)
    if caption:
        below: dict[str, Any] = {"xycoords": "axes fraction", "textcoords": "offset points"}
        axes.annotate(
            "\n".join(caption), (0, 0), xytext=(0, -4), ha="left", va="top", fontsize=7,
            linespacing=1.25, parse_math=False, **below,
        )  # fmt: skip
    if panel.scale is not None:
        high = max(height, LOWEST_BAR)
        place = ((left + width + 0.06) / across, bottom / up, BAR / across, high / up)
        _draw_bar(figure.add_axes(place, label="bar"), panel.scale, panel.unit)


def _draw_bar(axes: Axes, scale: ColourScale, unit: str) -> None:
    """Draw the colours as they look in the overlay, with the values that they stand for."""
    # a single value has a bar without height
    room = 0.0 if scale.high > scale.low else max(abs(scale.high), 1.0) / 2
    extent = (0.0, 1.0, scale.low - room, scale.high + room)
    axes.imshow(scale.bar(), interpolation="none", aspect="auto", extent=extent)
    axes.set_xticks([])
    axes.yaxis.tick_right()
    axes.yaxis.set_label_position("right")
    axes.yaxis.set_major_locator(MaxNLocator(5))
    if room:
        axes.set_yticks([scale.low])
    # matplotlib would write a common factor above the bar
    axes.yaxis.set_major_formatter(FuncFormatter(_short_number))
    axes.tick_params(labelsize=6, length=2, pad=1.5)
    axes.set_ylabel(escape(unit), fontsize=7, labelpad=3, parse_math=False)
    axes.spines[:].set_linewidth(0.4)


def _short_number(value: float, position: int | None = None) -> str:
    """Write a value briefly, as `0.0024` or `5e-5`."""
    return f"{value:.3g}".replace("e-0", "e-").replace("e+0", "e").replace("-", "\N{MINUS SIGN}")


def _write(
    figure: Figure, place: tuple[float, float], lines: Sequence[str], size: float = 7.0
) -> None:
    """Write lines of text whose upper left corner is at a place of the figure."""
    # in axes of their own, which are moved with the others when the figure is fitted
    axes = figure.add_axes((place[0], place[1], 1e-3, 1e-3), label="text")
    axes.set_axis_off()
    axes.text(0, 0, "\n".join(lines), va="top", fontsize=size, linespacing=1.25, parse_math=False)


def _snap(figure: Figure, dpi: float) -> None:
    """Align all axes to whole dots, so that all pixels of an image have the same width."""
    width, height = figure.get_size_inches()
    across, up = math.ceil(width * dpi - 1e-6), math.ceil(height * dpi - 1e-6)
    for axes in figure.axes:
        place = axes.get_position()
        left, bottom = round(place.x0 * width * dpi), round(place.y0 * height * dpi)
        size = place.width * width * dpi, place.height * height * dpi
        if axes.get_label() == "image":
            size = round(size[0]), round(size[1])
        axes.set_position((left / across, bottom / up, size[0] / across, size[1] / up))
    # half a dot more than needed, because the renderer rounds down
    figure.set_size_inches(across / dpi, up / dpi)
