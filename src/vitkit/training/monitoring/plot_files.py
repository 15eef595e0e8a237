"""Figures in the folder of a run: a figure that cannot be drawn is a line in the log, no error."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from jaxtyping import Int64, UInt8
from PIL import Image

from vitkit.errors import Interrupted
from vitkit.io.atomic import write_bytes
from vitkit.training.monitoring.learning_curves import LearningCurves
from vitkit.training.run_folder import RunFolder

if TYPE_CHECKING:
    from vitkit.plots.figure import NotebookFigure

SPLIT_TITLES = {"val": "validation split", "test": "test split"}
SCREEN_REDUCTION = 3
"""Pixels of a PNG file in a row for each pixel on the screen."""


def write_figure(
    path: Path, draw: Callable[[], NotebookFigure], log: Callable[[str], object]
) -> bytes | None:
    """Draw a figure and write it as a PNG file, and as an SVG file beside it.

    Args:
        path: the PNG file.
        draw: returns the figure; it imports matplotlib, so it is called once, here.
        log: receives a line where the figure cannot be drawn or written, or lacks characters.

    Returns:
        The PNG file's content, or None where there is none.

    Raises:
        Interrupted: a signal came.
    """
    try:
        figure = draw()
        from vitkit.plots.figure import encode_png, encode_svg

        content = encode_png(figure)
        files = {path: content, path.with_suffix(".svg"): encode_svg(figure)}
        for file, written in files.items():
            write_bytes(file, written)
    except Interrupted:  # signals are not drawing errors
        raise
    except Exception as error:  # noqa: BLE001 - a figure must never fail a run
        reason = f"{type(error).__name__}: {error}".splitlines()[0]
        log(f"warning: {path.name} is not written: {reason}; the results are complete without it")
        return None
    if figure.missing:
        log(
            f"{path.name}: no font here has {figure.missing!r}, so boxes are drawn; "
            f"{path.with_suffix('.svg').name} shows them where a font has them"
        )
    return content


def write_curves(folder: RunFolder, log: Callable[[str], object]) -> None:
    """Write the learning curves of a run, as `write_figure` does."""
    write_figure(folder.curves, lambda: LearningCurves.read(folder.root).plot(), log)


def write_confusion(
    folder: RunFolder,
    split: str,
    counts: Int64[np.ndarray, "K K"],
    classes: Sequence[str],
    log: Callable[[str], object],
) -> UInt8[np.ndarray, "H W 3"] | None:
    """Write the confusion matrix of a split, as `write_figure` does.

    Args:
        folder: folder of the run.
        split: `val` or `test`, for the title.
        counts: images of class i predicted as class j, at [i, j].
        classes: the K names.
        log: as for `write_figure`.

    Returns:
        The figure in a size for the screen; None where it cannot be drawn.
    """

    def draw() -> NotebookFigure:
        # imported here: a run needs matplotlib only at its end
        from vitkit.plots.confusion import draw_confusion

        return draw_confusion(counts, classes, SPLIT_TITLES[split])

    content = write_figure(folder.confusion, draw, log)
    if content is None:
        return None
    return np.asarray(Image.open(BytesIO(content)).convert("RGB").reduce(SCREEN_REDUCTION))
