"""Predictions on the standard output, one by one: a table, lines, or a JSON list."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, TypeAlias

from vitkit.cli.printing.columns import terminal_width
from vitkit.cli.printing.prediction_table import PredictionTable
from vitkit.io.progress import discard_stdout
from vitkit.messages import escape

if TYPE_CHECKING:
    from vitkit.prediction.image_list import ImageList
    from vitkit.prediction.images import FoundImage
    from vitkit.prediction.predictor import Prediction

Write: TypeAlias = "Callable[[FoundImage, Prediction], object]"
NAMES_MEASURED = 1_000
"""Most images whose names decide the width of the column; with more, it is the widest."""


def print_now(text: str, *, keeps_running: bool) -> None:
    """Print at once.

    Args:
        text: text to print.
        keeps_running: print no more when the reader has left (`| head`), instead of raising
            `BrokenPipeError`.
    """
    try:
        sys.stdout.write(text)
        sys.stdout.flush()
    except BrokenPipeError:
        if not keeps_running:
            raise
        discard_stdout()


@contextmanager
def print_table(
    images: ImageList, classes: Iterable[str], *, keeps_running: bool
) -> Iterator[Write]:
    """Print a row for each class of an image, with bars, or a line per image for programs.

    Args:
        images: images that will be predicted.
        classes: classes that can be predicted.
        keeps_running: as for `print_now`.
    """
    width = terminal_width()
    if width is None:
        yield partial(_print_line, keeps_running=keeps_running)
        return
    # for more images the longest name is not searched: the first row must appear at once
    few = images.total is not None and images.total <= NAMES_MEASURED
    table = PredictionTable([image.name for image in images] if few else (), classes, width)
    print_now(table.header(), keeps_running=keeps_running)

    def write(image: FoundImage, prediction: Prediction) -> None:
        print_now(table.rows(image.name, prediction.top), keeps_running=keeps_running)

    yield write


def _print_line(image: FoundImage, prediction: Prediction, *, keeps_running: bool) -> None:
    classes = ", ".join(f"{escape(label)} {p:.3f}" for label, p in prediction.top)
    print_now(f"{escape(image.name)}: {classes}\n", keeps_running=keeps_running)


@contextmanager
def print_json(*, keeps_running: bool) -> Iterator[Write]:
    """Print a JSON list, an entry at a time; `keeps_running` as for `print_now`.

    Names of files are exact: a byte that is not UTF-8 is a lone surrogate, as for `os.fsencode`.
    """
    # the list is closed after the last image, as entries are printed one by one
    separator = "[\n  "

    def write(image: FoundImage, prediction: Prediction) -> None:
        nonlocal separator
        row: dict[str, Any] = {
            "image": image.name,
            "label": prediction.label,
            "probability": prediction.probability,
            "top": [{"label": label, "probability": p} for label, p in prediction.top],
        }
        if image.label:
            row["true_label"] = image.label
        entry = json.dumps(row, indent=2).replace("\n", "\n  ")
        print_now(separator + entry, keeps_running=keeps_running)
        separator = ",\n  "

    yield write
    print_now("\n]\n", keeps_running=keeps_running)
