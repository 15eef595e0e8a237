"""`vitkit eval CHECKPOINT DATA`."""

from __future__ import annotations

import csv
import io
import json
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import tyro
from tyro.conf import Positional

from vitkit import api
from vitkit.cli.arguments import as_flags, filled
from vitkit.cli.output import aligned
from vitkit.data.images.decode import escape
from vitkit.errors import SettingError
from vitkit.evaluation.confusion_plot import LARGEST, confusion_matrix, png
from vitkit.evaluation.evaluate import ClassScore, Evaluation
from vitkit.io.atomic import refuse_unwritable, write_bytes

WORST = 5
"""Classes that the table names."""


def evaluate(
    checkpoint: Positional[str],
    data: Positional[str],
    *,
    split: str | None = None,
    data_root: str | None = None,
    cache: str | None = None,
    device: str = "auto",
    batch_size: int = 256,
    workers: int = 0,
    json: bool = False,
    confusion: Path | None = None,
    predictions: Path | None = None,
) -> None:
    """How good a checkpoint is: top-1, top-k, per class, loss, calibration; intervals of 95 %.

    Args:
        checkpoint: a run folder (its best weights) or a checkpoint.
        data: as for train: a folder, CSV, Parquet, tars or a named set; classes match by name.
        split: train, val or test; default test, else val.
        data_root: where to look for named data sets; for a CSV the folder its paths begin at.
        cache: folder of decoded images, as for train; `auto`: the user's own.
        device: cpu, cuda, mps or auto.
        batch_size: images run at once.
        workers: loader processes.
        json: print JSON, with every class and the confusion matrix.
        confusion: write the confusion matrix to this .png or .csv file; rows are true classes.
        predictions: write a row for each image to this CSV file.
    """
    if confusion is not None and confusion.suffix not in (".png", ".csv"):
        raise SettingError(f"--confusion {confusion}: name it .png or .csv")
    for asked in (confusion, predictions):
        if asked is not None:
            refuse_unwritable(asked)
    found = api.evaluate(
        checkpoint,
        data,
        split=split,
        data_root=data_root,
        cache=cache,
        device=device,
        batch_size=batch_size,
        workers=workers,
    )
    sys.stdout.write(_json(found) + "\n" if json else _table(found))
    if confusion is not None:
        write_bytes(confusion, _confusion(found, confusion, data))
    if predictions is not None:
        rows = ([*row[:3], f"{row[3]:.6f}"] for row in found.rows())
        header = ["image", "label", "predicted", "probability"]
        write_bytes(predictions, _csv([header, *rows]))


def run(arguments: list[str]) -> None:
    """Parse and evaluate."""
    with as_flags("batch_size", "workers"):
        tyro.cli(evaluate, args=filled(arguments, "--cache", "auto"), prog="vitkit eval")


def _json(found: Evaluation) -> str:
    classes = [
        {"class": one.name, "images": one.images, "accuracy": one.accuracy,
         "low": one.low, "high": one.high}
        for one in found.per_class
    ]  # fmt: skip
    return json.dumps({
        **found, "per_class": classes, "classes_without_images": found.without_images,
        "confusion": found.confusion.tolist(),
    })  # fmt: skip


def _csv(rows: Iterable[Iterable[Any]]) -> bytes:
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows(rows)
    return text.getvalue().encode()


def _confusion(found: Evaluation, path: Path, data: str) -> bytes:
    if path.suffix == ".csv":
        table = zip(found.classes, found.confusion.tolist(), strict=True)
        return _csv([["", *found.classes], *([name, *row] for name, row in table)])
    if len(found.classes) > LARGEST:
        raise SettingError(
            f"--confusion {path}: {len(found.classes)} classes, an image holds {LARGEST}; "
            f"name it .csv"
        )
    return png(confusion_matrix(found.confusion, found.classes, data))


def _table(found: Evaluation) -> str:
    scores = []
    for name, value in found.items():
        if name.endswith(("_low", "_high")) or name.startswith("calibrated_"):
            continue
        notes = []
        if f"{name}_low" in found:
            notes.append(f"95 %: {found[f'{name}_low']:.4f} to {found[f'{name}_high']:.4f}")
        if f"calibrated_{name}" in found:
            notes.append(f"with the temperature: {found[f'calibrated_{name}']:.4f}")
        shown = f"{value:.0f}" if name == "images" else f"{value:.4f}"
        scores.append([name, shown, ", ".join(notes)])
    worst = sorted(found.per_class, key=lambda one: one.accuracy)[:WORST]
    rows = [_worst(found, one) for one in worst if one.accuracy < 1]
    heading = ["worst classes", "top1", "right", "95 %", "most often taken for"]
    table = aligned(scores) + ("\n" + aligned([heading, *rows]) if rows else "")
    return table + _unseen(found.without_images, len(found.classes))


def _unseen(names: list[str], classes: int) -> str:
    """A line that names classes without images, the first few of many."""
    if not names:
        return ""
    shown = ", ".join(map(escape, names[:WORST])) + (" ..." if len(names) > WORST else "")
    return (
        f"\nno images of {len(names):,} of the {classes:,} classes: {shown}; balanced_accuracy is "
        f"over the others\n"
    )


def _worst(found: Evaluation, one: ClassScore) -> list[str]:
    missed = (found.labels == found.classes.index(one.name)) & ~found.right
    others = np.bincount(found.predicted[missed], minlength=len(found.classes))
    return [
        escape(one.name), f"{one.accuracy:.4f}", f"{one.right:,} of {one.images:,}",
        f"{one.low:.4f} to {one.high:.4f}",
        f"{escape(found.classes[others.argmax()])} ({others.max():,})",
    ]  # fmt: skip
