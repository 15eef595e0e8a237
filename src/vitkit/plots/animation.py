"""Figures one after the other as an animated GIF."""

from __future__ import annotations

from collections.abc import Sequence
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from jaxtyping import UInt8
from PIL import Image

from vitkit.io.results import ResultKind

if TYPE_CHECKING:
    from vitkit.plots.figure import NotebookFigure

COLOURS, GREYS = 204, 52
"""Colours of all frames together, and levels of grey: 256, as many as the format has."""
ALIKE = 4
"""Levels of a channel that count as one colour when the colours are chosen."""
AT_ONCE = 4096
"""Colours that are compared with the palette at once."""


def encode_gif(figures: Sequence[NotebookFigure], durations: Sequence[int], software: str) -> bytes:
    """Encode figures as an animated GIF that begins again at its end.

    All frames have the same colours, so that what stands still is stored once.

    Args:
        figures: one or more; smaller ones are padded with white on the right and below.
        durations: of each, in milliseconds; players round to 10.
        software: the file's comment, in ASCII.
    """
    # imported here: `gif_result` needs no matplotlib
    from vitkit.plots.figure import SCREEN_DPI, encode_png

    frames = [
        Image.open(BytesIO(encode_png(figure, dpi=SCREEN_DPI))).convert("RGB") for figure in figures
    ]
    size = max(frame.width for frame in frames), max(frame.height for frame in frames)
    padded = []
    for frame in frames:
        sheet = Image.new("RGB", size, "white")
        sheet.paste(frame)
        padded.append(np.asarray(sheet))
    palette = _palette(padded)
    indexed = [_indexed(frame, palette) for frame in padded]
    content = BytesIO()
    indexed[0].save(
        content,
        format="GIF",
        save_all=True,
        append_images=indexed[1:],
        duration=list(durations),
        loop=0,
        comment=software.encode("ascii"),
    )
    return content.getvalue()


def _palette(frames: Sequence[UInt8[np.ndarray, "H W 3"]]) -> UInt8[np.ndarray, "n 3"]:
    """Return greys from black to white, and the frames' colours."""
    # each colour once: those of the colour bar are few pixels beside those of an image
    rough = [np.unique(frame.reshape(-1, 3) // ALIKE * ALIKE, axis=0) for frame in frames]
    sample = Image.fromarray(np.unique(np.concatenate(rough), axis=0)[None])
    quantised = sample.quantize(COLOURS, method=Image.Quantize.MEDIANCUT)
    chosen = np.reshape(quantised.getpalette() or [], (-1, 3))[:COLOURS]
    greys = np.linspace(0, 255, GREYS).round()[:, None].repeat(3, axis=1)
    return np.concatenate([greys, chosen]).astype(np.uint8)


def _indexed(frame: UInt8[np.ndarray, "H W 3"], palette: UInt8[np.ndarray, "n 3"]) -> Image.Image:
    """Return a frame by the nearest colours of a palette."""
    # not by Pillow, whose nearest colour of white may be a light grey
    colours, places = np.unique(frame.reshape(-1, 3), axis=0, return_inverse=True)
    nearest = np.empty(len(colours), np.uint8)
    for start in range(0, len(colours), AT_ONCE):
        some = colours[start : start + AT_ONCE, None].astype(np.int32)
        distances = ((some - palette.astype(np.int32)) ** 2).sum(axis=2)
        nearest[start : start + AT_ONCE] = distances.argmin(axis=1)
    image = Image.fromarray(nearest[places].reshape(frame.shape[:2]))
    image.putpalette(palette.ravel().tolist())
    return image


def gif_result(name: str, command: str) -> ResultKind:
    """Return the kind of GIF files whose comment is this command."""
    comment = bytes([0x21, 0xFE, len(command)]) + command.encode("ascii") + b"\0"

    def recognise(path: Path) -> bool:
        with path.open("rb") as file:
            head = file.read(2048)
        return head.startswith(b"GIF8") and comment in head

    return ResultKind(name, ".gif", recognise)
