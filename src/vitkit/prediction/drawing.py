"""Drawings of predictions: an image with the most probable classes below it."""

import textwrap
from functools import cache
from pathlib import Path
from typing import TypeAlias

from PIL import Image, ImageDraw, ImageFont

from vitkit.data.images.decode import RGBPixels
from vitkit.io.atomic import replacing
from vitkit.messages import escape, percent
from vitkit.prediction.predictor import Prediction

Font: TypeAlias = ImageFont.FreeTypeFont

SMALLEST_SIDE = 224
LARGEST_SIDE = 1024
"""Pixels of the longer side: smaller images are enlarged, larger ones reduced."""
NARROWEST = 240
"""Pixels of the narrowest drawing; a narrow image stands in its middle."""
CLASSES_SHOWN = 3
INK, PALE, BAR, TRACK = "#1f2328", "#59636e", "#0969da", "#e6eaef"
RIGHT, WRONG = ("\N{CHECK MARK}", "#1a7f37"), ("\N{BALLOT X}", "#c4281c")
"""Mark and colour of the true class."""


def draw_prediction(
    pixels: RGBPixels, prediction: Prediction, *, true_label: str = "", is_right: bool = False
) -> Image.Image:
    """Draw an image with the names, probabilities and bars of the most probable classes below it.

    Names are wrapped, not cut.

    Args:
        pixels: (H, W, 3) uint8 RGB, [0, 255]. Images below 224 pixels are enlarged by a whole
            factor without smoothing, those above 1,024 reduced.
        prediction: the classes; at most three are drawn.
        true_label: the true class, if it is known; drawn with a mark.
        is_right: True if that is the predicted class.

    Returns:
        An RGB image, at least 240 pixels wide.
    """
    image = _scale(Image.fromarray(pixels))
    width = max(image.width, NARROWEST)
    size = round(min(max(width / 28, 13), 26))
    line_height, inner = round(size * 1.3), width - 2 * size
    # lines of text, their colour, bold or not, and the length of the bar below, if any
    rows: list[tuple[list[str], str, bool, float | None]] = []
    for rank, (label, probability) in enumerate(prediction.top[:CLASSES_SHOWN]):
        font = _font(size, bold=rank == 0)
        # the number stands on the right of the first line
        lines = _wrap(escape(label), font, inner - font.getlength("100.0 % "))
        rows.append((lines, PALE if rank else INK, rank == 0, probability))
    if true_label:
        mark, colour = RIGHT if is_right else WRONG
        text = f"{mark} true: {escape(true_label)}"
        rows.append((_wrap(text, _font(size), inner), colour, False, None))
    caption = sum(len(lines) * line_height + size for lines, *_ in rows)
    sheet = Image.new("RGB", (width, image.height + size + caption), "white")
    sheet.paste(image, ((width - image.width) // 2, 0))
    pen, top = ImageDraw.Draw(sheet), image.height + size
    for lines, colour, bold, share in rows:
        font = _font(size, bold=bold)
        if share is not None:
            pen.text((width - size, top), percent(share), colour, font, anchor="ra")
        for line in lines:
            pen.text((size, top), line, colour, font)
            top += line_height
        if share is not None:
            for part, fill in ((1.0, TRACK), (share, BAR)):
                # at least a pixel, so that the bar begins where the track does
                end = size + max(1, round(part * inner)) - 1
                pen.rectangle((size, top, end, top + max(2, size // 4) - 1), fill=fill)
        top += size
    return sheet


def _wrap(text: str, font: Font, width: float) -> list[str]:
    """Break a text into lines that are not wider than some pixels, between words where it can."""
    letters = max(1, int(width * len(text) / max(1, font.getlength(text))))
    lines = textwrap.wrap(text, letters) or [""]
    while letters > 1 and max(map(font.getlength, lines)) > width:
        letters -= 1
        lines = textwrap.wrap(text, letters)
    return lines


def save_drawing(path: Path, drawing: Image.Image) -> None:
    """Write a drawing as a PNG.

    Args:
        path: path of the file; one that exists is replaced.
        drawing: as `draw_prediction` returns it.

    Raises:
        OutputError: a path that cannot be written.
    """
    with replacing(path) as temporary:
        # of a photograph, higher levels take several times as long for a few per cent less
        drawing.save(temporary, format="PNG", compress_level=3)


def _scale(image: Image.Image) -> Image.Image:
    longer = max(image.size)
    if longer < SMALLEST_SIDE:
        factor = -(-SMALLEST_SIDE // longer)  # rounded up
        return image.resize((image.width * factor, image.height * factor), Image.Resampling.NEAREST)
    if longer > LARGEST_SIDE:
        image.thumbnail((LARGEST_SIDE, LARGEST_SIDE), Image.Resampling.LANCZOS)
    return image


@cache
def _font(size: int, *, bold: bool = False) -> Font:
    """Return matplotlib's own font: it has Latin, Greek and Cyrillic letters and many symbols."""
    # imported here: predictions without drawings need no matplotlib
    import matplotlib

    folder = Path(matplotlib.get_data_path(), "fonts", "ttf")
    return ImageFont.truetype(folder / f"DejaVuSans{'-Bold' if bold else ''}.ttf", size)
