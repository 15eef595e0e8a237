"""`vitkit eval CHECKPOINT DATA`."""

from __future__ import annotations

import csv
import io
import json as json_text
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import tyro
from tyro.conf import Positional

from vitkit.cli.arguments import as_flags, fill_value
from vitkit.cli.output import align
from vitkit.errors import SettingError
from vitkit.evaluation.confusion_plot import MAX_CLASSES, confusion_matrix, png
from vitkit.evaluation.evaluate import evaluate
from vitkit.evaluation.result import ClassScore, Evaluation
from vitkit.io.atomic import refuse_unwritable, write_bytes
from vitkit.messages import escape

LISTED_CLASSES = 5
"""Classes that the table names."""


def eval_command(
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
    """Evaluate a checkpoint: top-1, top-k, per class, loss, calibration; intervals of 95 %.

    Args:
        checkpoint: a run folder (its best weights) or a checkpoint.
        data: as for train: a folder, CSV, Parquet, tars or a named set; classes match by name.
        split: train, val or test; default test, else val.
        data_root: the folder of named datasets; for a CSV the folder of its paths.
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
    # before the evaluation, which may take minutes
    for path in (confusion, predictions):
        if path is not None:
            refuse_unwritable(path)
    evaluation = evaluate(
        checkpoint,
        data,
        split=split,
        data_root=data_root,
        cache=cache,
        device=device,
        batch_size=batch_size,
        workers=workers,
    )
    sys.stdout.write(_json(evaluation) if json else _table(evaluation))
    if confusion is not None:
        write_bytes(confusion, _confusion(evaluation, confusion, data))
    if predictions is not None:
        rows: list[Iterable[str]] = [["image", "label", "predicted", "probability"]]
        for *names, probability in evaluation.rows():
            rows.append([*map(str, names), f"{probability:.6f}"])
        write_bytes(predictions, _csv(rows))


def run(arguments: list[str]) -> None:
    """Parse the arguments and evaluate."""
    with as_flags("batch_size", "workers"):
        arguments = fill_value(arguments, "--cache", "auto")
        tyro.cli(eval_command, args=arguments, prog="vitkit eval")


def _json(evaluation: Evaluation) -> str:
    classes = []
    for score in evaluation.per_class:
        classes.append(
            {
                "class": score.name,
                "images": score.images,
                "accuracy": score.accuracy,
                "low": score.low,
                "high": score.high,
            }
        )
    document = {
        **evaluation,
        "per_class": classes,
        "classes_without_images": evaluation.without_images,
        "confusion": evaluation.confusion.tolist(),
    }
    return json_text.dumps(document) + "\n"


def _csv(rows: Iterable[Iterable[Any]]) -> bytes:
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows(rows)
    return text.getvalue().encode()


def _confusion(evaluation: Evaluation, path: Path, data: str) -> bytes:
    """Return the content of the confusion matrix's file, by its ending."""
    classes = evaluation.classes
    if path.suffix == ".csv":
        rows: list[list[Any]] = [["", *classes]]
        for name, row in zip(classes, evaluation.confusion.tolist(), strict=True):
            rows.append([name, *row])
        return _csv(rows)
    if len(classes) > MAX_CLASSES:
        raise SettingError(
            f"--confusion {path}: {len(classes)} classes, an image holds {MAX_CLASSES}; "
            f"name it .csv"
        )
    return png(confusion_matrix(evaluation.confusion, classes, data))


def _table(evaluation: Evaluation) -> str:
    """Format the scores, the worst classes and the classes without images."""
    scores = []
    for name, value in evaluation.items():
        # these are notes beside their score
        if name.endswith(("_low", "_high")) or name.startswith("calibrated_"):
            continue
        notes = []
        if f"{name}_low" in evaluation:
            low = evaluation[f"{name}_low"]
            high = evaluation[f"{name}_high"]
            notes.append(f"95 %: {low:.4f} to {high:.4f}")
        if f"calibrated_{name}" in evaluation:
            notes.append(f"with the temperature: {evaluation[f'calibrated_{name}']:.4f}")
        shown = f"{value:.0f}" if name == "images" else f"{value:.4f}"
        scores.append([name, shown, ", ".join(notes)])
    table = align(scores)
    worst = sorted(evaluation.per_class, key=lambda score: score.accuracy)[:LISTED_CLASSES]
    rows = [_class_row(evaluation, score) for score in worst if score.accuracy < 1]
    if rows:
        heading = ["worst classes", "top1", "right", "95 %", "most often taken for"]
        table += "\n" + align([heading, *rows])
    return table + _without_images(evaluation)


def _without_images(evaluation: Evaluation) -> str:
    """Name classes without images, the first few of many."""
    names = evaluation.without_images
    if not names:
        return ""
    shown = ", ".join(map(escape, names[:LISTED_CLASSES]))
    if len(names) > LISTED_CLASSES:
        shown += " ..."
    return (
        f"\nno images of {len(names):,} of the {len(evaluation.classes):,} classes: {shown}; "
        f"balanced_accuracy is over the others\n"
    )


def _class_row(evaluation: Evaluation, score: ClassScore) -> list[str]:
    """Format a class's accuracy and the class that it is most often mistaken for."""
    classes = evaluation.classes
    wrong = (evaluation.labels == classes.index(score.name)) & ~evaluation.right
    mistakes = np.bincount(evaluation.predicted[wrong], minlength=len(classes))
    return [
        escape(score.name),
        f"{score.accuracy:.4f}",
        f"{score.right:,} of {score.images:,}",
        f"{score.low:.4f} to {score.high:.4f}",
        f"{escape(classes[mistakes.argmax()])} ({mistakes.max():,})",
    ]
