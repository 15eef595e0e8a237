"""Images with captions in rows, as a figure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
from jaxtyping import UInt8
from PIL import Image

from vitkit.messages import escape
from vitkit.plots.figure import SCREEN_DPI, NotebookFigure, drawing_style, fit_to_contents
from vitkit.plots.wrapping import wrap_name

SIDE, GAP, LINE, TITLE = 1.15, 0.1, 0.125, 0.3
"""Longer side of an image, the space between two, the height of a caption's line and of the title;
inches."""
LETTERS = 19
"""Letters of a caption's line."""
ACROSS = 6
"""Images in a row."""
SHARP_SIDE = 700
"""Pixels of the longer side, twice those of a file; larger images are reduced to this at least."""


def draw_images(
    images: Iterable[UInt8[np.ndarray, "_ _ _"]],
    captions: Sequence[Sequence[str]],
    title: str,
    across: int = ACROSS,
) -> NotebookFigure:
    """Draw images in rows, each above its caption; nothing of a caption is cut.

    Args:
        images: (H, W, 3) RGB or (H, W, 1) grey, uint8; each of its own size. Of an iterator, one
            image after the other is read and reduced.
        captions: lines of text for each image; long ones are broken.
        title: title of the figure, one or more lines.
        across: images in a row.
    """
    wrapped = []
    for lines in captions:
        wrapped.append([part for line in lines for part in wrap_name(escape(line), LETTERS)])
    rows = -(-len(captions) // across)  # rounded up
    columns = min(across, max(1, len(captions)))
    text = max((len(lines) for lines in wrapped), default=0) * LINE
    size = (columns * (SIDE + GAP), rows * (SIDE + text + GAP) + TITLE)
    everything = "".join([title, *("".join(lines) for lines in wrapped)])
    with drawing_style(everything) as missing:
        figure = NotebookFigure(figsize=size, dpi=SCREEN_DPI)
        figure.missing = missing
        for number, (image, lines) in enumerate(zip(images, wrapped, strict=True)):
            left = number % across * (SIDE + GAP)
            top = size[1] - TITLE - number // across * (SIDE + text + GAP)
            place = (left / size[0], (top - SIDE) / size[1], SIDE / size[0], SIDE / size[1])
            axes = figure.add_axes(place)
            axes.imshow(_reduced(image), cmap="gray", vmin=0, vmax=255)
            axes.set_axis_off()
            axes.set_anchor("S")
            if number == 0:
                # a wide image fills the lower part of its place, the title is above the whole
                height, width = image.shape[:2]
                top_edge = max(1.0, width / height)
                lines_above = "\n".join(map(escape, title.split("\n")))
                axes.set_title(lines_above, loc="left", y=top_edge, parse_math=False)
            axes.annotate(
                "\n".join(lines),
                (0.5, 0),
                xycoords="axes fraction",
                xytext=(0, -3),
                textcoords="offset points",
                ha="center",
                va="top",
                fontsize=7,
                parse_math=False,
            )
        fit_to_contents(figure)
    return figure


def _reduced(image: UInt8[np.ndarray, "_ _ _"]) -> UInt8[np.ndarray, "..."]:
    """Return a photograph in fewer pixels, smaller images as they are; grey ones as (H, W)."""
    if image.shape[2] == 1:
        image = image[..., 0]
    factor = max(image.shape[:2]) // SHARP_SIDE
    if factor < 2:
        return image
    return np.asarray(Image.fromarray(image).reduce(factor))
