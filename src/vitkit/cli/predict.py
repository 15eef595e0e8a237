"""`vitkit predict CHECKPOINT IMAGES...`."""

from __future__ import annotations

import csv as csv_format
import json as json_format
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

import tyro
from tyro.conf import Positional

from vitkit.cli.arguments import as_flags
from vitkit.cli.images import UsableImages, files_of_checkpoint, find_images, refuse_images_first
from vitkit.io.atomic import replacing
from vitkit.io.progress import discard_stdout
from vitkit.io.results import check_outputs, csv_result
from vitkit.messages import escape

if TYPE_CHECKING:
    from vitkit.prediction import Prediction

Write: TypeAlias = "Callable[[Path, Prediction], object]"
CSV_HEADER = ("image", "rank", "label", "probability")
CSV_FILE = csv_result("a table of predictions", CSV_HEADER)


def predict_command(
    checkpoint: Positional[str],
    images: Positional[tuple[str, ...]],
    *,
    top_k: int = 5,
    device: str = "auto",
    batch_size: int = 64,
    json: bool = False,
    csv: str | None = None,
    overwrite: bool = False,
    strict: bool = False,
    allow_partial: bool = False,
) -> None:
    """Classify images with a checkpoint, most probable class first.

    Each line is printed as soon as its batch is computed. An image that cannot be used is named on
    stderr and left out; the others are predicted, and the exit code is 2 at the end.

    Args:
        checkpoint: a run folder (its best weights), or a checkpoint of any known format.
        images: files, or folders of them.
        top_k: number of classes to show.
        device: cpu, cuda, mps or auto.
        batch_size: images per batch.
        json: print JSON.
        csv: write this .csv file; without --json, nothing is printed then.
        overwrite: let --csv replace any existing file that is not an input; default: only earlier
            predictions.
        strict: stop at the first image that cannot be used, and write no CSV.
        allow_partial: accept weights with unknown or missing tensors: leave out the unknown ones,
            initialise the missing ones at random, and list both.
    """
    refuse_images_first("predict", checkpoint, "IMAGES")
    usable = UsableImages(find_images(images), strict=strict)
    if csv is not None:
        inputs = [*usable.paths, *files_of_checkpoint(checkpoint)]
        check_outputs([Path(csv)], CSV_FILE, inputs=inputs, overwrite=overwrite, flag="--csv")
    # imported here: --help and wrong paths do not wait for torch
    from vitkit.prediction import Predictor
    from vitkit.weights.load import load

    loaded = load(checkpoint, strict=not allow_partial)
    predictor = Predictor.from_checkpoint(loaded, device=device, batch_size=batch_size)
    with ExitStack() as stack:
        writers: list[Write] = []
        if csv is not None:
            writers.append(stack.enter_context(_csv(Path(csv))))
        if json:
            writers.append(stack.enter_context(_json(ignore_closed_pipe=csv is not None)))
        for path, prediction in usable.with_outputs(predictor.stream(usable.paths, top_k)):
            for write in writers or [_plain]:
                write(path, prediction)
    usable.refuse_broken()


def run(arguments: list[str]) -> None:
    """Parse the arguments and predict."""
    with as_flags("batch_size", "top_k"):
        tyro.cli(predict_command, args=arguments, prog="vitkit predict")


def _plain(path: Path, prediction: Prediction) -> None:
    classes = ", ".join(f"{escape(label)} {p:.3f}" for label, p in prediction.top)
    sys.stdout.write(f"{escape(path)}: {classes}\n")
    sys.stdout.flush()


@contextmanager
def _json(*, ignore_closed_pipe: bool) -> Iterator[Write]:
    """Print a JSON list, an entry at a time.

    Args:
        ignore_closed_pipe: print no more when the reader has left (`| head`), instead of raising
            `BrokenPipeError`.
    """
    # a list is open until the last image, as entries are printed one by one
    separator = "[\n  "

    def print_text(text: str) -> None:
        try:
            sys.stdout.write(text)
        except BrokenPipeError:
            if not ignore_closed_pipe:
                raise
            discard_stdout()

    def write(path: Path, prediction: Prediction) -> None:
        nonlocal separator
        row = {
            "image": escape(path),
            "label": prediction.label,
            "probability": prediction.probability,
            "top": [{"label": label, "probability": p} for label, p in prediction.top],
        }
        print_text(separator + json_format.dumps(row, indent=2).replace("\n", "\n  "))
        separator = ",\n  "

    yield write
    print_text("\n]\n")


@contextmanager
def _csv(path: Path) -> Iterator[Write]:
    """Write a CSV file, a row at a time; it takes its name when all are done."""
    with replacing(path) as temporary, temporary.open("w", encoding="utf-8", newline="") as file:
        writer = csv_format.writer(file, lineterminator="\n")
        writer.writerow(CSV_HEADER)

        def write(image: Path, prediction: Prediction) -> None:
            for rank, (label, probability) in enumerate(prediction.top, 1):
                writer.writerow([escape(image), rank, label, f"{probability:.6f}"])

        yield write
        file.flush()  # before `replacing` renames it
