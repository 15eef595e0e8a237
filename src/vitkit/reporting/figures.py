"""Figures of a report as SVG inside the page, or as a small PNG where a matrix is large."""

from __future__ import annotations

import re
from base64 import b64encode
from collections.abc import Sequence

import numpy as np
from jaxtyping import Bool, Float64, Int64

from vitkit.plots.figure import SCREEN_DPI, NotebookFigure, encode_png, encode_svg

OUTSIDE = re.compile(r"<metadata>.*?</metadata>|<defs>\s*<style.*?</defs>", re.DOTALL)
"""Parts of matplotlib's SVG that the page does not need, or that would change the whole page."""
ABOVE_SCREEN = 110
"""Dots an inch of a matrix of many classes."""


def inline_svg(figure: NotebookFigure, name: str) -> str:
    """Return a figure as an SVG element without a background, for a light or a dark page.

    Args:
        figure: with no text of the user; matplotlib escapes its texts, but quotes stay.
        name: begins its identifiers, which must be unique in the page.
    """
    figure.patch.set_visible(False)
    for axes in figure.axes:
        axes.patch.set_visible(False)
    text = encode_svg(figure, software="vitkit report").decode("utf-8")
    text = OUTSIDE.sub("", text[text.index("<svg") :])
    # two figures have the same identifiers otherwise
    text = re.sub(r'(?<=\sid=")', f"{name}-", text)
    text = re.sub(r'((?<=url\(#)|(?<=href="#))', f"{name}-", text)
    # its size comes from the page
    return re.sub(r'\s(width|height)="[\d.]+pt"', "", text, count=2)


def reliability_svg(
    confidence: Float64[np.ndarray, " N"], right: Bool[np.ndarray, " N"], title: str, name: str
) -> str:
    """Return a reliability diagram as an SVG element.

    Args:
        confidence: as for `draw_reliability`.
        right: as for `draw_reliability`.
        title: title of the panel.
        name: begins its identifiers.
    """
    from vitkit.plots.curves import draw_reliability

    return inline_svg(draw_reliability(confidence, right, title), name)


def confusion_image(counts: Int64[np.ndarray, "K K"], classes: Sequence[str]) -> str:
    """Return a confusion matrix of many classes as the address of a PNG file that contains it."""
    from vitkit.plots.confusion import draw_confusion

    figure = draw_confusion(counts, classes, "")
    content = encode_png(figure, software="vitkit report", dpi=min(SCREEN_DPI, ABOVE_SCREEN))
    return f"data:image/png;base64,{b64encode(content).decode('ascii')}"
