"""matplotlib figures that do not touch its global state, grids of images, and PNG and SVG files.

Modules that draw import matplotlib, so they are imported in the functions that need them.
"""

import math
import re
import textwrap
import warnings
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from io import BytesIO
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import UInt8
from markupsafe import Markup
from matplotlib import style
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.font_manager import fontManager
from matplotlib.ticker import MaxNLocator, StrMethodFormatter
from PIL import Image

from vitkit.io.atomic import write_bytes
from vitkit.messages import escape
from vitkit.plots.overlay import ColourScale

DPI = 300
"""Dots an inch of a PNG file, as journals ask for."""
SCREEN_DPI = 150
"""Dots an inch in a notebook."""
BLUE, ORANGE, RED = "#0072b2", "#e69f00", "#d55e00"
"""Colours for all kinds of colour vision (Okabe and Ito, 2008)."""
FONTS = (
    "DejaVu Sans", "Noto Sans CJK JP", "Noto Sans CJK SC", "Hiragino Sans", "PingFang SC",
    "Yu Gothic", "Microsoft YaHei", "Malgun Gothic", "WenQuanYi Zen Hei", "Noto Sans Devanagari",
    "Noto Sans Thai", "Arial Unicode MS",
)  # fmt: skip
"""Matplotlib's own font, and fonts of scripts that it lacks; those that are installed are used."""
STYLE: dict[Any, Any] = {
    "font.size": 8.0,
    "axes.titlesize": 9.0,
    "axes.labelsize": 8.0,
    "xtick.labelsize": 7.0,
    "ytick.labelsize": 7.0,
    "legend.fontsize": 7.0,
    "axes.linewidth": 0.6,
    "xtick.major.width": 0.6,
    "ytick.major.width": 0.6,
    "xtick.major.size": 2.5,
    "ytick.major.size": 2.5,
    "lines.linewidth": 1.0,
    "figure.dpi": SCREEN_DPI,
    # text stays text: it can be searched and edited, and a viewer uses its own fonts
    "svg.fonttype": "none",
    # identifiers are drawn at random otherwise, so that no two files would be equal
    "svg.hashsalt": "vitkit",
}
"""matplotlib's parameters of all figures; sizes in points, as printed at a paper's width."""
PADDING = 0.06
"""Inches around the outermost texts of a figure."""
COMPRESSION = 4
"""zlib's level in PNG files: Pillow's own, 6, takes up to twice the time and saves 1 to 3 %."""
TEXT: dict[str, Any] = {"va": "top", "parse_math": False, "linespacing": 1.25, "fontsize": 7.0}
"""Look of captions; a name may have a dollar sign, which would begin a formula."""
BELOW: dict[str, Any] = {"xycoords": "axes fraction", "textcoords": "offset points", **TEXT}
"""Look of a caption that begins some points from a corner of axes."""
BRIEF = "{x:.3g}"
"""Format of the numbers of an axis, as matplotlib would write a common factor above it."""
OUTSIDE = re.compile(r"<metadata>.*?</metadata>|<defs>\s*<style.*?</defs>", re.DOTALL)
"""Parts of matplotlib's SVG that a page does not need, or that would change the whole page."""


class NotebookFigure(Figure):
    """A matplotlib figure that does not depend on the user's style.

    A notebook shows it also where pyplot was never imported.
    """

    def place(
        self, left: float, bottom: float, width: float, height: float, label: str = ""
    ) -> Axes:
        """Add axes at a place in inches, from the lower left corner of the figure.

        Args:
            left: of the axes.
            bottom: of the axes.
            width: of the axes.
            height: of the axes.
            label: a name to find them by.
        """
        across, up = self.get_size_inches()
        return self.add_axes((left / across, bottom / up, width / across, height / up), label=label)

    def draw(self, renderer: Any) -> None:
        """Draw the figure in its own style: matplotlib makes some marks of the axes only now."""
        with _drawing_style():
            super().draw(renderer)

    def get_tightbbox(self, renderer: Any = None, **settings: Any) -> Any:
        """Return the box around all that is drawn, in inches, in the figure's own style."""
        with _drawing_style():
            return super().get_tightbbox(renderer, **settings)

    def _repr_png_(self) -> bytes:
        return encode_png(self, dpi=SCREEN_DPI)


@contextmanager
def _drawing_style() -> Iterator[None]:
    """Set the parameters of a drawing, and restore the user's own afterwards."""
    installed = set(fontManager.get_font_names())
    families = {"font.family": [name for name in FONTS if name in installed]}
    with style.context(["default", STYLE | families]), warnings.catch_warnings():
        # letters that no font has are drawn as boxes
        warnings.filterwarnings("ignore", "Glyph .* missing from font", UserWarning)
        yield


@contextmanager
def new_figure(width: float, height: float) -> Iterator[NotebookFigure]:
    """Draw a figure in the style of all figures, and fit it to its contents at the end.

    Args:
        width: in inches, before it is fitted.
        height: likewise.

    Yields:
        The empty figure.
    """
    with _drawing_style():
        figure = NotebookFigure(figsize=(width, height), dpi=SCREEN_DPI)
        yield figure
        box = figure.get_tightbbox()  # inches
        # the drawn elements keep their size, and the figure gets that of all of them
        old = figure.get_size_inches()
        new = np.array([box.width, box.height]) + 2 * PADDING
        corner = PADDING - np.array([box.x0, box.y0])
        for axes in figure.axes:
            place = axes.get_position()
            place.set_points((place.get_points() * old + corner) / new)
            axes.set_position(place)
        for text in figure.texts:
            text.set_position((np.array(text.get_position()) * old + corner) / new)
        figure.set_size_inches(*new)


def decorate(axes: Axes) -> int:
    """Give a panel its grid, and its legend above it, where that hides nothing.

    Args:
        axes: without a frame at the right and above from now on.

    Returns:
        Rows of the legend. A title stands there, too: pad it by them, as `draw_distance` does.
    """
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(visible=True, linewidth=0.4, color="#dddddd")
    axes.set_axisbelow(True)
    rows = len(axes.get_legend_handles_labels()[1])
    if rows:
        above: dict[str, Any] = {"loc": "lower left", "bbox_to_anchor": (-0.02, 1.0)}
        axes.legend(frameon=False, handlelength=1.8, labelspacing=0.25, borderpad=0.2, **above)
    return rows


def wrap(text: str, letters: int | float) -> list[str]:
    """Break a text into lines, between its words where it can; of an empty one, one empty line."""
    # 97.3 % is one word
    lines = textwrap.wrap(text.replace(" %", "\N{NO-BREAK SPACE}%"), max(1, int(letters)))
    return [line.replace("\N{NO-BREAK SPACE}", " ") for line in lines] or [""]


# Files.


def encode_png(figure: Figure, software: str = "vitkit", dpi: int | float = DPI) -> bytes:
    """Encode a figure as a PNG file.

    Args:
        figure: the figure.
        software: its text `Software`.
        dpi: dots per inch.
    """
    pillow = {"compress_level": COMPRESSION}
    return _encode(
        figure, format="png", dpi=dpi, metadata={"Software": software}, pil_kwargs=pillow
    )


def encode_svg(figure: Figure, software: str = "vitkit") -> bytes:
    """Encode a figure as an SVG file without a date; text stays text, not outlines.

    Args:
        figure: the figure.
        software: its creator, in the metadata.
    """
    return _encode(figure, format="svg", metadata={"Date": None, "Creator": software})


def _encode(figure: Figure, **settings: Any) -> bytes:
    content = BytesIO()
    with _drawing_style():
        figure.savefig(content, **settings)
    return content.getvalue()


def save_figure(figure: Figure, path: Path, software: str) -> None:
    """Write a figure as PNG, with all pixels of the images of its grid, or as SVG.

    Args:
        figure: the figure.
        path: ends in .png or .svg; a file that exists is replaced.
        software: named in the file's metadata.

    Raises:
        OutputError: a path that cannot be written.
    """
    if path.suffix.lower() == ".svg":
        write_bytes(path, encode_svg(figure, software))
    else:
        dpi = SCREEN_DPI
        for axes in figure.axes:
            if axes.get_label() == "image":
                width = axes.get_position().width * figure.get_figwidth()
                dpi = max(dpi, math.ceil(axes.get_images()[0].get_size()[1] / width))
        write_bytes(path, encode_png(figure, software, dpi))


def inline_svg(figure: Figure, name: str) -> Markup:
    """Return a figure as an SVG element without a background, for a light or a dark page.

    Args:
        figure: with no text of the user; matplotlib escapes its texts, but quotes stay.
        name: begins its identifiers, which must be unique in the page.
    """
    figure.patch.set_visible(False)
    for axes in figure.axes:
        axes.patch.set_visible(False)
    text = encode_svg(figure).decode("utf-8")
    text = OUTSIDE.sub("", text[text.index("<svg") :])
    # two figures have the same identifiers otherwise
    text = re.sub(r'(?<=\sid=")|(?<=url\(#)|(?<=href="#)', f"{name}-", text)
    # its size comes from the page
    return Markup(re.sub(r'\s(width|height)="[\d.]+pt"', "", text, count=2))


# Grids of images: side by side, each with a title, a caption and a colour bar.

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

    def size(self, side: float) -> tuple[float, float]:
        """Return width and height of the image in inches, for the longer side of it."""
        height, width = self.pixels.shape[:2]
        inch = side / max(height, width)
        return width * inch, height * inch


def image_grid(
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
        title: title of the figure, one or more lines.
        caption: lines below the whole figure.
        side: longer side of an image, in inches.

    Returns:
        A figure; `save_figure` writes it with all pixels of the images.
    """
    across = max(1, min(across, len(panels)))
    gap, font = min(GAP, 0.1 * side), min(FONT, 7.2 * side)
    # all sizes in inches first: a figure is created with its own
    lefts = [0.0]
    for column in range(across):
        width = min(NARROWEST, 0.9 * side)
        for panel in panels[column::across]:
            width = max(width, panel.size(side)[0] + (BAR_ROOM if panel.scale else 0.0))
        lefts.append(lefts[-1] + width + gap)
    above, below = _lines(title.split("\n") if title else []), _lines(caption, lefts[-1])
    placed, height = [], len(above) * TITLE
    for start in range(0, len(panels), across):
        row = panels[start : start + across]
        height += max(max(panel.size(side)[1], LOWEST_BAR * bool(panel.scale)) for panel in row)
        height += TITLE * any(panel.title for panel in row)
        most = 0
        for panel, left, right in zip(row, lefts, lefts[1:], strict=False):
            lines = _lines(panel.caption, right - left - gap, font)
            placed.append((panel, lines, left, height))
            most = max(most, len(lines))
        height += most * LINE * font / FONT + gap
    whole = height + len(below) * LINE + GAP
    with new_figure(lefts[-1], whole) as figure:
        for panel, lines, left, down in placed:
            _draw(figure, panel, lines, (left, whole - down), side)
        for down, lines, size in ((0.0, above, 9.0), (height - gap / 2, below, FONT)):
            if lines:
                figure.text(0.0, 1 - down / whole, "\n".join(lines), **TEXT | {"fontsize": size})
    return figure


def grid_of_images(
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
        pixels = np.broadcast_to(image, (*image.shape[:2], 3))
        factor = max(image.shape[:2]) // SHARP_SIDE
        if factor > 1:
            pixels = np.asarray(Image.fromarray(np.ascontiguousarray(pixels)).reduce(factor))
        panels.append(Panel(pixels, caption=lines))
    return image_grid(panels, across=across, title=title, side=SMALL_SIDE)


def _lines(texts: Sequence[str], width: float = math.inf, font: float = FONT) -> list[str]:
    """Return texts as lines that fit into a width in inches."""
    letters = min(width, 1e3) * LETTERS_AN_INCH * FONT / font
    return [line for text in texts for line in wrap(escape(text), letters)]


def _draw(
    figure: NotebookFigure,
    panel: Panel,
    caption: Sequence[str],
    corner: tuple[float, float],
    side: float,
) -> None:
    """Draw one image with its texts and its colour bar; `corner` is its lower left, in inches."""
    width, height = panel.size(side)
    left, bottom = corner
    axes = figure.place(left, bottom, width, height, label="image")
    # pixels of small images stay squares
    is_small = max(panel.pixels.shape) < SCREEN_DPI * side
    axes.imshow(panel.pixels, aspect="auto", interpolation="nearest" if is_small else "auto")
    axes.set_axis_off()
    font = min(8.0, 12 * side)
    look: dict[str, Any] = {"fontsize": font, "parse_math": False}
    if panel.title:
        # with a height: otherwise matplotlib measures all ticks, even invisible ones
        axes.set_title(escape(panel.title), loc="left", y=1.0, pad=3, **look)
    if panel.row:
        look |= {"ha": "right", "va": "center", "transform": axes.transAxes}
        axes.text(-0.06, 0.5, escape(panel.row), **look)
    below = BELOW | {"fontsize": min(FONT, 7.2 * side)}
    axes.annotate("\n".join(caption), (0, 0), (0, -min(4.0, 3 * side)), **below)
    if panel.scale is not None:
        bar = figure.place(left + width + 0.06, bottom, BAR, max(height, LOWEST_BAR), label="bar")
        _draw_bar(bar, panel.scale, panel.unit)


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
    axes.yaxis.set_major_formatter(StrMethodFormatter(BRIEF))
    axes.tick_params(labelsize=6, length=2, pad=1.5)
    axes.set_ylabel(escape(unit), fontsize=7, labelpad=3, parse_math=False)
    axes.spines[:].set_linewidth(0.4)
