"""Reading of figures: the texts of an SVG, and the part of a PNG that is drawn on."""

import re
from html import unescape
from io import BytesIO

import numpy as np
from matplotlib.figure import Figure
from PIL import Image

from vitkit.plots.figure import encode_png, encode_svg


def svg_text(figure: Figure) -> str:
    """Return all texts of a figure's SVG, in order, without spaces and line breaks."""
    texts = re.findall(r"<text[^>]*>([^<]*)</text>", encode_svg(figure).decode())
    return "".join(unescape("".join(texts)).split())


def drawn_part(figure: Figure) -> tuple[float, float]:
    """Return the share of the figure's width and height between its first and last mark."""
    pixels = np.asarray(Image.open(BytesIO(encode_png(figure))).convert("L"))
    rows, columns = np.nonzero(pixels < 250)
    height, width = pixels.shape
    return (np.ptp(columns) + 1) / width, (np.ptp(rows) + 1) / height
