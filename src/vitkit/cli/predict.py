"""`vitkit predict CHECKPOINT IMAGES...`."""

from __future__ import annotations

import csv as csv_format
import json as json_format
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import tyro
from tyro.conf import Positional

from vitkit.cli.arguments import as_flags
from vitkit.cli.images import UsableImages, find_images
from vitkit.io.atomic import refuse_unwritable, replacing
from vitkit.io.progress import discard_stdout
from vitkit.messages import escape
from vitkit.prediction import Prediction, Predictor
from vitkit.weights.load import load

Write = Callable[[Path, Prediction], object]


def predict_command(
    checkpoint: Positional[str],
    images: Positional[tuple[str, ...]],
    *,
    top_k: int = 5,
    device: str = "auto",
    batch_size: int = 64,
    json: bool = False,
    csv: str | None = None,
    strict: bool = False,
    allow_partial: bool = False,
) -> None:
    """Predict the classes of images, most probable class first.

    Each line is printed as soon as its batch is done. An image that cannot be used is named on
    stderr and left out; the others go on, and the exit code is 2 at the end.

    Args:
        checkpoint: a run folder (its best weights), or a checkpoint of any known format.
        images: files, or folders of them.
        top_k: how many classes to show.
        device: cpu, cuda, mps or auto.
        batch_size: images run at once.
        json: print JSON.
        csv: write a CSV file instead of printing.
        strict: stop at the first image that cannot be used, and write no CSV.
        allow_partial: go on with weights that have unknown or missing tensors: leave out the
            unknown, give the missing random values, and list both.
    """
    if csv is not None:
        refuse_unwritable(Path(csv))
    loaded = load(checkpoint, strict=not allow_partial)
    predictor = Predictor.from_checkpoint(loaded, device=device, batch_size=batch_size)
    usable = UsableImages(find_images(images), strict=strict)
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
        writer.writerow(["image", "rank", "label", "probability"])

        def write(image: Path, prediction: Prediction) -> None:
            for rank, (label, probability) in enumerate(prediction.top, 1):
                writer.writerow([escape(image), rank, label, f"{probability:.6f}"])

        yield write
        file.flush()  # before `replacing` renames it
