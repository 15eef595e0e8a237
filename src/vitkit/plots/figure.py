"""matplotlib figures that do not touch its global state, as PNG and SVG files.

Modules that draw import matplotlib, so they are imported in the functions that need them.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache
from io import BytesIO
from typing import TYPE_CHECKING, Any
from unicodedata import east_asian_width

from matplotlib import rc_context, rcParamsDefault
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.font_manager import FontEntry, fontManager, get_font
from PIL import Image

if TYPE_CHECKING:
    pass

DPI = 300
"""Dots an inch of a PNG file, as journals ask for."""
SCREEN_DPI = 150
"""Dots an inch in a notebook."""
BLUE, ORANGE, RED = "#0072b2", "#e69f00", "#d55e00"
"""Colours for all kinds of colour vision (Okabe and Ito, 2008)."""
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
OWN_TO_THE_PROCESS = ("backend", "interactive", "toolbar", "webagg", "timezone", "tk", "macosx")
"""First words of parameters that are about the process and not about a drawing."""
DEFAULTS: dict[Any, Any] = {
    name: value
    for name, value in rcParamsDefault.items()
    if not name.startswith(OWN_TO_THE_PROCESS)
}
PADDING = 0.06
"""Inches around the outermost texts of a figure."""
COMPRESSION = 4
"""zlib's level in PNG files: Pillow's own, 6, takes up to twice the time and saves 1 to 3 %."""


OWN_FONT, BOXES = "DejaVu Sans", "Last Resort"
"""The font that is part of matplotlib, and the first words of the name of a font of boxes."""
PIECES = re.compile(
    r"(?:(?<!\S)-(?=\d)|\d+(?:[.,]\d+)*(?: %)?|[^\s_\-/.,;:|])*(?:(?!(?<=\s)-\d)[\s_\-/.,;:|])*"
)
"""A word with the signs after it, where a line may end; -0.19 and 97.3 % are one word each."""


class NotebookFigure(Figure):
    """A matplotlib figure that does not depend on the user's style.

    A notebook shows it also where pyplot was never imported.

    Attributes:
        missing: characters of its texts that no font on this computer has.
    """

    missing: str = ""

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
        """Draw the figure in its own style: matplotlib makes some marks of the axes only now.

        Args:
            renderer: matplotlib's.
        """
        with _drawing_style():
            super().draw(renderer)

    def get_tightbbox(self, renderer: Any = None, **settings: Any) -> Any:
        """Return the box around all that is drawn, in inches.

        Args:
            renderer: matplotlib's; default one for pixels.
            **settings: as for `Figure.get_tightbbox`.
        """
        with _drawing_style():
            return super().get_tightbbox(renderer, **settings)

    def _repr_png_(self) -> bytes:
        return encode_png(self, dpi=SCREEN_DPI)


@contextmanager
def _drawing_style(text: str = "") -> Iterator[str]:
    """Set the parameters of a drawing, and restore the user's own afterwards."""
    families, missing = covering_families(text)
    with rc_context(DEFAULTS | STYLE | {"font.family": families}), warnings.catch_warnings():
        # letters that no font has are drawn as boxes; `NotebookFigure.missing` names them
        warnings.filterwarnings("ignore", "Glyph .* missing from font", UserWarning)
        yield missing


@contextmanager
def new_figure(width: float, height: float, text: str = "") -> Iterator[NotebookFigure]:
    """Draw a figure in the style of all figures, and fit it to its contents at the end.

    Args:
        width: in inches, before it is fitted.
        height: likewise.
        text: all names that will be drawn.

    Yields:
        The empty figure.
    """
    with _drawing_style(text) as missing:
        figure = NotebookFigure(figsize=(width, height), dpi=SCREEN_DPI)
        figure.missing = missing
        yield figure
        _fit_to_contents(figure)


@lru_cache(maxsize=16)
def covering_families(text: str) -> tuple[list[str], str]:
    """Return font families that together have the characters of a text.

    Args:
        text: any text; line breaks and spaces need no font.

    Returns:
        The families, matplotlib's own first, and the characters that no font has, sorted.
    """
    families = [OWN_FONT]
    missing = {letter for letter in text if not letter.isascii() and not letter.isspace()}
    boxes = [entry.name for entry in fontManager.ttflist if entry.name.startswith(BOXES)]
    for entry in sorted(fontManager.ttflist, key=_order):
        if not missing:
            return families, ""
        found = set() if entry.name in boxes else missing & _characters(str(entry.fname))
        if found and entry.name not in families:
            families.append(entry.name)
        missing -= found
    # the font of boxes comes last, so that it replaces no letter of another font
    return families + boxes[:1], "".join(sorted(missing))


def _order(entry: FontEntry) -> tuple[object, ...]:
    """Sort fonts: matplotlib's own first, then those that look most like it."""
    weight_differs = str(entry.weight) not in ("400", "normal", "regular")
    differs = entry.style != "normal", weight_differs, "Sans" not in entry.name
    return entry.name != OWN_FONT, *differs, entry.name


def _characters(path: str) -> set[str]:
    """Return the characters of a font file; none of a file that cannot be opened."""
    try:
        return {chr(code) for code in get_font(path).get_charmap()}
    except (OSError, RuntimeError):
        return set()


def _fit_to_contents(figure: Figure) -> None:
    """Resize a figure to fit its texts; the drawn elements keep their size."""
    box = figure.get_tightbbox()  # inches
    width, height = figure.get_size_inches()
    new_width, new_height = box.width + 2 * PADDING, box.height + 2 * PADDING
    for axes in figure.axes:
        place = axes.get_position()
        left = (place.x0 * width - box.x0 + PADDING) / new_width
        bottom = (place.y0 * height - box.y0 + PADDING) / new_height
        size = (place.width * width / new_width, place.height * height / new_height)
        axes.set_position((left, bottom, *size))
    for text in figure.texts:
        x, y = text.get_position()
        left = (x * width - box.x0 + PADDING) / new_width
        text.set_position((left, (y * height - box.y0 + PADDING) / new_height))
    figure.set_size_inches(new_width, new_height)


def decorate(axes: Axes) -> int:
    """Give a panel its grid, and its legend above it, where that hides nothing.

    Args:
        axes: without a frame at the right and above from now on.

    Returns:
        Rows of the legend.
    """
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(visible=True, linewidth=0.4, color="#dddddd")
    axes.set_axisbelow(True)
    rows = len(axes.get_legend_handles_labels()[1])
    if rows:
        above: dict[str, Any] = {"loc": "lower left", "bbox_to_anchor": (-0.02, 1.0)}
        axes.legend(frameon=False, handlelength=1.8, labelspacing=0.25, borderpad=0.2, **above)
    return rows


def text_width(text: str) -> int:
    """Return the width of a text in letters; a Chinese character is as wide as two.

    >>> text_width("cat"), text_width("猫")
    (3, 2)
    """
    return sum(2 if east_asian_width(letter) in "WF" else 1 for letter in text)


def wrap_name(
    name: str, width: int | float, measure: Callable[[str], int | float] = text_width
) -> list[str]:
    """Break a name into lines of at most `width`, between its words where it can.

    >>> wrap_name("golden_retriever puppy", 10)
    ['golden_', 'retriever', 'puppy']
    >>> wrap_name("Donaudampfschiff", 9)
    ['Donaudamp', 'fschiff']
    >>> wrap_name("(p = 0.048), deletion -0.19", 20)
    ['(p = 0.048),', 'deletion -0.19']
    >>> wrap_name("(p = 0.048), deletion -0.19", 8)
    ['(p =', '0.048),', 'deletion', '-0.19']

    Args:
        name: any text; of spaces alone one empty line remains.
        width: of a line, in the unit of `measure`; a letter that is wider has a line of its own.
        measure: returns the width of a text; default in letters.
    """
    lines = [""]
    for piece in PIECES.findall(name):
        if measure((lines[-1] + piece).rstrip()) <= width:
            lines[-1] += piece
            continue
        if lines[-1]:
            lines.append("")
        # a word that is longer than a line is broken where the line ends
        for letter in piece:
            if lines[-1] and measure((lines[-1] + letter).rstrip()) > width:
                lines.append("")
            lines[-1] += letter
    return [line.rstrip() for line in lines if line.strip()] or [""]


def encode_png(
    figure: Figure, software: str = "vitkit", dpi: int | float = DPI, source: str | None = None
) -> bytes:
    """Encode a figure as a PNG file.

    Args:
        figure: the figure.
        software: its text `Software`.
        dpi: dots per inch.
        source: its text `Source`, in ASCII; none if absent.
    """
    texts = {"Software": software} | ({} if source is None else {"Source": source})
    pillow = {"compress_level": COMPRESSION}
    return _encode(figure, format="png", dpi=dpi, metadata=texts, pil_kwargs=pillow)


def encode_svg(figure: Figure, software: str = "vitkit", source: str | None = None) -> bytes:
    """Encode a figure as an SVG file without a date; text stays text, not outlines.

    Args:
        figure: the figure.
        software: its creator, in the metadata.
        source: its source, in the metadata; none if absent.
    """
    texts = {"Date": None, "Creator": software, "Source": source}
    return _encode(figure, format="svg", metadata=texts)


def encode_gif(figures: Sequence[Figure], durations: Sequence[int], software: str) -> bytes:
    """Encode figures as an animated GIF that begins again at its end.

    All frames have the same colours, so that what stands still is stored once.

    Args:
        figures: one or more; smaller ones are padded with white on the right and below.
        durations: of each, in milliseconds; players round to 10.
        software: the file's comment, in ASCII.
    """
    pngs = [BytesIO(encode_png(figure, dpi=SCREEN_DPI)) for figure in figures]
    images = [Image.open(png).convert("RGB") for png in pngs]
    width, height = (max(sides) for sides in zip(*(image.size for image in images), strict=True))
    strip = Image.new("RGB", (width, height * len(images)), "white")
    for number, image in enumerate(images):
        strip.paste(image, (0, number * height))
    # this choice of 256 colours keeps white and the few pixels of a colour bar
    strip = strip.quantize(method=Image.Quantize.MAXCOVERAGE, dither=Image.Dither.NONE)
    tops = range(0, strip.height, height)
    first, *others = (strip.crop((0, top, width, top + height)) for top in tops)
    frames: dict[str, Any] = {"save_all": True, "append_images": others, "loop": 0}
    content = BytesIO()
    first.save(content, "GIF", duration=list(durations), comment=software.encode(), **frames)
    return content.getvalue()


def _encode(figure: Figure, **settings: Any) -> bytes:
    content = BytesIO()
    with _drawing_style():
        figure.savefig(content, **settings)
    return content.getvalue()
