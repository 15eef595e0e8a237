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
from vitkit.cli.image_arguments import Usable, find_images
from vitkit.data.images.decode import escape
from vitkit.io.atomic import refuse_unwritable, replacing
from vitkit.io.progress import let_stdout_go
from vitkit.prediction import Prediction, Predictor
from vitkit.weights.load import load

Write = Callable[[Path, Prediction], object]


def predict(
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
    """What a checkpoint says of images, most probable class first.

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
    stored = load(checkpoint, strict=not allow_partial)
    predictor = Predictor.from_checkpoint(stored, device=device, batch_size=batch_size)
    batch_images = Usable(find_images(images), strict)
    with ExitStack() as open_now:
        writers: list[Write] = []
        if csv is not None:
            writers.append(open_now.enter_context(_csv(Path(csv))))
        if json:
            writers.append(open_now.enter_context(_json(go_on=csv is not None)))
        for name, said in batch_images.of(predictor.stream(batch_images.names, top_k)):
            for write in writers or [_plain]:
                write(name, said)
    batch_images.refuse_broken()


def run(arguments: list[str]) -> None:
    """Parse and predict."""
    with as_flags("batch_size", "top_k"):
        tyro.cli(predict, args=arguments, prog="vitkit predict")


def _plain(name: Path, said: Prediction) -> None:
    shown = ", ".join(f"{escape(label)} {p:.3f}" for label, p in said.top)
    sys.stdout.write(f"{escape(name)}: {shown}\n")
    sys.stdout.flush()


@contextmanager
def _json(*, go_on: bool) -> Iterator[Write]:
    """Print a JSON list, an entry at a time.

    Args:
        go_on: whether to print no more when the reader has left (`| head`), instead of raising
            `BrokenPipeError`.
    """
    before = "[\n  "

    def say(text: str) -> None:
        try:
            sys.stdout.write(text)
        except BrokenPipeError:
            if not go_on:
                raise
            let_stdout_go()

    def write(name: Path, said: Prediction) -> None:
        nonlocal before
        row = {
            "image": escape(name),
            "label": said.label,
            "probability": said.probability,
            "top": [{"label": label, "probability": p} for label, p in said.top],
        }
        say(before + json_format.dumps(row, indent=2).replace("\n", "\n  "))
        before = ",\n  "

    yield write
    say("\n]\n")


@contextmanager
def _csv(path: Path) -> Iterator[Write]:
    """Write a CSV file, a row at a time; it takes its name when all are done."""
    with replacing(path) as temporary, temporary.open("w", encoding="utf-8", newline="") as file:
        writer = csv_format.writer(file, lineterminator="\n")
        writer.writerow(["image", "rank", "label", "probability"])

        def write(name: Path, said: Prediction) -> None:
            for rank, (label, probability) in enumerate(said.top, 1):
                writer.writerow([escape(name), rank, label, f"{probability:.6f}"])

        yield write
        file.flush()
