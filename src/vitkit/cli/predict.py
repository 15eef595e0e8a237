"""`vitkit predict CHECKPOINT PICTURES...`."""

from __future__ import annotations

import csv
import io
import json as json_format
import sys
from pathlib import Path

import tyro
from tyro.conf import Positional

from vitkit.cli.pictures import find_pictures
from vitkit.data.images import printable
from vitkit.prediction import Prediction, Predictor
from vitkit.weights.files import refuse_unwritable, write_bytes


def predict(
    checkpoint: Positional[str],
    pictures: Positional[tuple[str, ...]],
    *,
    top_k: int = 5,
    device: str = "auto",
    batch_size: int = 64,
    json: bool = False,
    csv: str | None = None,
) -> None:
    """What a checkpoint says of pictures, most probable class first.

    Args:
        checkpoint: a run folder (its best weights), or a checkpoint of any known format.
        pictures: files, or folders of them.
        top_k: how many classes to show.
        device: cpu, cuda, mps or auto.
        batch_size: pictures run at once.
        json: print JSON.
        csv: write a CSV file instead of printing.
    """
    if csv is not None:
        refuse_unwritable(Path(csv))
    predictor = Predictor.from_checkpoint(checkpoint, device=device, batch_size=batch_size)
    names = find_pictures(pictures)
    predictions = predictor(names, top_k=top_k)
    if csv is not None:
        write_bytes(Path(csv), _csv(names, predictions).encode())
    if json:
        sys.stdout.write(_json(names, predictions) + "\n")
    elif csv is None:
        for name, said in zip(names, predictions, strict=True):
            shown = ", ".join(f"{printable(label)} {p:.3f}" for label, p in said.top)
            sys.stdout.write(f"{printable(name)}: {shown}\n")


def run(arguments: list[str]) -> None:
    """Parse and predict."""
    tyro.cli(predict, args=arguments, prog="vitkit predict")


def _json(names: list[Path], predictions: list[Prediction]) -> str:
    rows = [
        {
            "picture": printable(name),
            "label": said.label,
            "probability": said.probability,
            "top": [{"label": label, "probability": p} for label, p in said.top],
        }
        for name, said in zip(names, predictions, strict=True)
    ]
    return json_format.dumps(rows, indent=2)


def _csv(names: list[Path], predictions: list[Prediction]) -> str:
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(["picture", "rank", "label", "probability"])
    for name, said in zip(names, predictions, strict=True):
        for rank, (label, probability) in enumerate(said.top, 1):
            writer.writerow([printable(name), rank, label, f"{probability:.6f}"])
    return text.getvalue()
