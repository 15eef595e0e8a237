"""Images side by side, each with a title, a caption and a colour bar; no pixel is lost."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import UInt8
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator
from PIL import Image

from vitkit.io.atomic import write_bytes
from vitkit.messages import escape
from vitkit.plots.figure import (
    SCREEN_DPI,
    NotebookFigure,
    encode_png,
    encode_svg,
    new_figure,
    wrap_name,
)
from vitkit.plots.overlay import ColourScale

SIDE, SMALL_SIDE = 3.0, 1.15
"""Longer side of an image, in inches: two of them, or six small ones, are as wide as a page."""
GAP, TITLE, LINE, BAR, BAR_ROOM = 0.14, 0.2, 0.14, 0.09, 0.62
"""Inches between images, of a title, of a line of a caption, of a colour bar and of it with its
numbers; at most, as those of small images are smaller."""
LOWEST_BAR = 0.8
"""Inches of a colour bar, at least: that of a panorama is higher than the image."""
NARROWEST = 1.0
"""Inches of a column, at least: the caption of a narrow image needs some room."""
FONT, LETTERS_AN_INCH = 7.0, 17
"""Points of a caption, at most, and its letters in an inch."""
SHARP_SIDE = 700
"""Pixels of the longer side of a small image, twice those of a file; larger ones are reduced to
this at least."""


class Panel(NamedTuple):
    """One image of a figure.

    Attributes:
        pixels: (H, W, 3) uint8 RGB.
        title: above it.
        caption: lines below it; long ones are broken.
        scale: scale of the colour bar on its right; none if absent.
        unit: unit of the values of the scale.
        row: a name on its left.
    """

    pixels: UInt8[np.ndarray, "H W 3"]
    title: str = ""
    caption: Sequence[str] = ()
    scale: ColourScale | None = None
    unit: str = ""
    row: str = ""


def draw_panels(
    panels: Sequence[Panel],
    *,
    across: int,
    title: str = "",
    caption: Sequence[str] = (),
    side: float = SIDE,
    exact: bool = True,
) -> NotebookFigure:
    """Draw images in rows, each above its caption; nothing of a caption is cut.

    Args:
        panels: one image each, of any sizes.
        across: images in a row.
        title: title of the figure, one or more lines.
        caption: lines below the whole figure.
        side: longer side of an image, in inches.
        exact: draw pixels as squares; False smooths them where there are more than dots.

    Returns:
        A figure; `_pixel_dpi` of it gives the dots per inch of a file in which no pixel is lost.
    """
    across = max(1, min(across, len(panels)))
    # All sizes in inches first: a figure is created with its own.
    lefts = _lefts(panels, across, side)
    font, gap = _font(side), _gap(side)
    wrapped = []
    for number, panel in enumerate(panels):
        column = number % across
        wrapped.append(_wrap(panel.caption, lefts[column + 1] - lefts[column] - gap, font))
    below = _wrap(caption, lefts[-1], FONT)
    above = [escape(line) for line in title.split("\n") if title]
    rows = []
    for start in range(0, len(panels), across):
        row = range(start, min(start + across, len(panels)))
        heights = [_size(panels[n], side)[1] for n in row]
        heights += [LOWEST_BAR for n in row if panels[n].scale]
        space = TITLE if any(panels[n].title for n in row) else 0.0
        lines = max(len(wrapped[n]) for n in row)
        rows.append((row, space + max(heights), lines * LINE * font / FONT + gap))
    height = sum(image + text for _, image, text in rows)
    top = height = height + len(above) * TITLE + len(below) * LINE + GAP
    names = "".join(panel.title + panel.unit + panel.row for panel in panels)
    texts = "".join([title, *caption, names, *map("".join, wrapped)])
    with new_figure(lefts[-1], height, texts) as figure:
        _write(figure, top, above, size=9.0)
        top -= len(above) * TITLE
        for row, image, text in rows:
            top -= image
            for place, number in enumerate(row):
                axes = _draw(figure, panels[number], wrapped[number], (lefts[place], top), side)
                axes.get_images()[0].set_interpolation("none" if exact else "auto")
            top -= text
        _write(figure, top + gap / 2, below)
    _snap(figure, _pixel_dpi(figure))
    return figure


def draw_images(
    images: Iterable[UInt8[np.ndarray, "_ _ _"]],
    captions: Sequence[Sequence[str]],
    title: str,
    across: int = 6,
) -> NotebookFigure:
    """Draw small images in rows, each above its caption; nothing of a caption is cut.

    Args:
        images: (H, W, 3) RGB or (H, W, 1) grey, uint8; each of its own size. Of an iterator, one
            image after the other is read and reduced.
        captions: lines of text for each image; long ones are broken.
        title: title of the figure, one or more lines.
        across: images in a row.
    """
    panels = []
    for image, lines in zip(images, captions, strict=True):
        panels.append(Panel(_reduced(image), caption=lines))
    return draw_panels(panels, across=across, title=title, side=SMALL_SIDE, exact=False)


def _reduced(image: UInt8[np.ndarray, "_ _ _"]) -> UInt8[np.ndarray, "h w 3"]:
    """Return a photograph in fewer pixels, smaller images as they are; in colours."""
    image = np.broadcast_to(image, (*image.shape[:2], 3))
    factor = max(image.shape[:2]) // SHARP_SIDE
    if factor < 2:
        return image
    return np.asarray(Image.fromarray(np.ascontiguousarray(image)).reduce(factor))


def _pixel_dpi(figure: Figure, least: int = SCREEN_DPI) -> float:
    """Return dots per inch at which the largest image of a figure keeps each of its pixels."""
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
        content = encode_png(figure, software, _pixel_dpi(figure), source)
    write_bytes(path, content)


def _size(panel: Panel, side: float) -> tuple[float, float]:
    """Return width and height of an image in inches."""
    height, width = panel.pixels.shape[:2]
    inch = side / max(height, width)
    return width * inch, height * inch


def _font(side: float) -> float:
    """Return the points of a caption below an image of this side in inches."""
    return min(FONT, 7.2 * side)


def _gap(side: float) -> float:
    """Return the inches between images of this side in inches."""
    return min(GAP, 0.1 * side)


def _lefts(panels: Sequence[Panel], across: int, side: float) -> list[float]:
    """Return the left edge of each column in inches, and the right end."""
    lefts = [0.0]
    for column in range(across):
        widths = [min(NARROWEST, 0.9 * side)]
        for panel in panels[column::across]:
            widths.append(_size(panel, side)[0] + (BAR_ROOM if panel.scale else 0.0))
        lefts.append(lefts[-1] + max(widths) + _gap(side))
    return lefts


def _wrap(lines: Sequence[str], width: float, font: float) -> list[str]:
    letters = int(width * LETTERS_AN_INCH * FONT / font)
    return [part for line in lines for part in wrap_name(escape(line), letters)]


def _draw(
    figure: NotebookFigure,
    panel: Panel,
    caption: Sequence[str],
    corner: tuple[float, float],
    side: float,
) -> Axes:
    """Draw one image with its texts and its colour bar; `corner` is its lower left, in inches."""
    width, height = _size(panel, side)
    left, bottom = corner
    axes = figure.place(left, bottom, width, height, label="image")
    axes.imshow(panel.pixels, aspect="auto")
    axes.set_axis_off()
    font = min(8.0, 12 * side)
    look: dict[str, Any]
    if panel.title:
        # with a height: otherwise matplotlib measures all ticks, even invisible ones
        name = escape(panel.title)
        axes.set_title(name, loc="left", y=1.0, pad=3, fontsize=font, parse_math=False)
    if panel.row:
        look = {"ha": "right", "va": "center", "fontsize": font, "parse_math": False}
        axes.text(-0.06, 0.5, escape(panel.row), transform=axes.transAxes, **look)
    away = -min(4.0, 3 * side)
    below: dict[str, Any] = {"xycoords": "axes fraction", "textcoords": "offset points"}
    look = {"va": "top", "fontsize": _font(side), "linespacing": 1.25, "parse_math": False}
    axes.annotate("\n".join(caption), (0, 0), (0, away), **below, **look)
    if panel.scale is not None:
        bar = figure.place(left + width + 0.06, bottom, BAR, max(height, LOWEST_BAR), label="bar")
        _draw_bar(bar, panel.scale, panel.unit)
    return axes


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


def _write(figure: NotebookFigure, top: float, lines: Sequence[str], size: float = FONT) -> None:
    """Write lines of text at the left, whose upper edge is at a height in inches."""
    if lines:
        place = 0.0, top / figure.get_figheight()
        text = "\n".join(lines)
        figure.text(*place, text, va="top", fontsize=size, linespacing=1.25, parse_math=False)


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
    for text in figure.texts:
        x, y = text.get_position()
        text.set_position((x * width * dpi / across, y * height * dpi / up))
    # half a dot more than needed, because the renderer rounds down
    figure.set_size_inches(across / dpi, up / dpi)
