"""`vitkit eval CHECKPOINT DATA`."""

from __future__ import annotations

import csv
import io
import json as json_text
import sys
from dataclasses import asdict
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from vitkit import errors, messages
from vitkit.cli import images, output
from vitkit.engines.registry import EngineChoice, PrecisionChoice
from vitkit.io import atomic, results
from vitkit.plots import MAX_CLASSES

if TYPE_CHECKING:
    from vitkit.evaluation.result import ClassScore, Evaluation

TOP_LOSSES = 50
"""Images with the highest losses in the JSON."""
LISTED_CLASSES = 5
"""Classes that the table names."""


EXAMPLES = (
    "vitkit eval runs/photos-vit-1 photos  # scores of the test images",
    "vitkit eval runs/photos-vit-1 photos --split val --confusion confusion.png",
    "vitkit eval runs/photos-vit-1 photos --predictions predictions.csv  # which images are wrong",
)


def eval_command(
    checkpoint: str,
    data: str,
    *,
    split: str | None = None,
    data_root: str | None = None,
    cache: str | None = None,
    device: str = "auto",
    batch_size: int = 256,
    workers: int = 0,
    relabel: Path | None = None,
    engine: EngineChoice = "torch",
    precision: PrecisionChoice = "float32",
    calibrate: str | None = None,
    json: bool = False,
    confusion: Path | None = None,
    predictions: Path | None = None,
    overwrite: bool = False,
    trust_code: bool = False,
) -> None:
    """Evaluate a checkpoint: top-1, top-k, loss and calibration, per class, with 95 % intervals.

    Args:
        checkpoint: a run folder (its best weights), a checkpoint, or an exported model.
        data: as for train; classes are matched by name.
        split: train, val or test; default test, or val if there is no test.
        data_root: the folder of named datasets; for a CSV the folder of its paths.
        cache: folder for decoded images, as for train; `auto`: the user's cache folder.
        device: cpu, cuda, mps or auto.
        batch_size: images per batch.
        workers: loader processes.
        relabel: a CSV file of corrected labels, as for train; the images stay as they are.
        engine: what runs the model; auto: the fastest here, by trials.
        precision: float32, bfloat16 or int8; auto: the fastest with the same predictions.
        calibrate: DATA for int8, such as the training data; its test split is not used.
        json: print JSON, with every class, the confusion matrix and the 50 highest losses.
        confusion: .png, .svg or .csv file for the confusion matrix; rows are true classes.
        predictions: write a row for each image to this .csv file; loss_rank 1 has the highest loss.
        overwrite: let both replace existing files that are not inputs.
        trust_code: open an exported .pt2 model, which can run code that is in it.
    """
    from vitkit.exporting.exported_model import evaluate  # here: --help does not wait for torch

    images.refuse_images_first("eval", checkpoint, "DATA")
    _check_files(checkpoint, data, data_root, relabel, overwrite, confusion, predictions)
    options = images.engine_options(engine, precision, calibrate, data_root)
    evaluation = evaluate(
        checkpoint, data, split=split, data_root=data_root, cache=cache, device=device,
        batch_size=batch_size, workers=workers, relabel=relabel, engine=options,
        trust_code=trust_code,
    )  # fmt: skip
    sys.stdout.write(_json(evaluation) if json else _table(evaluation))
    written = _write_files(evaluation, confusion, predictions, data)
    if json:
        return
    output.print_results(*written)
    if predictions is None:
        given = output.flags(
            split=split, data_root=data_root, relabel=relabel, trust_code=trust_code
        )
        output.suggest(("eval", checkpoint, data, *given, "--predictions", "predictions.csv"))


def _check_files(
    checkpoint: str,
    data: str,
    data_root: str | None,
    relabel: Path | None,
    overwrite: bool,
    confusion: Path | None,
    predictions: Path | None,
) -> None:
    """Raise an error if a file must not be written, before minutes of evaluation."""
    if confusion and predictions and confusion.resolve() == predictions.resolve():
        raise errors.SettingError(
            f"--confusion and --predictions both name {predictions}; choose another name for one "
            "of them"
        )
    outputs = (
        ("--confusion", confusion, (".png", ".svg", ".csv")),
        ("--predictions", predictions, (".csv",)),
    )
    for flag, path, endings in outputs:
        if path is not None:
            inputs = chain(
                images.files_of_checkpoint(checkpoint),
                filter(None, [relabel]),
                images.files_of_data(data, path, data_root=data_root),
            )
            results.check_outputs([path], endings, inputs=inputs, overwrite=overwrite, flag=flag)


def _write_files(
    evaluation: Evaluation, confusion: Path | None, predictions: Path | None, data: str
) -> list[str]:
    """Write the files that were asked for; return a line on each."""
    written = []
    # first the table: a figure of very many classes is refused
    if predictions is not None:
        atomic.write_bytes(predictions, evaluation.predictions_csv())
        count = int(evaluation["images"])
        written.append(f"predictions: {predictions}, {messages.plural(count, 'row')}")
    if confusion is not None:
        title = f"{data}, {evaluation.split_name} split"
        atomic.write_bytes(confusion, _confusion(evaluation, confusion, title))
        written.append(f"confusion matrix: {confusion}")
    return written


def _json(evaluation: Evaluation) -> str:
    classes = []
    for score in evaluation.per_class:
        interval = {"low": score.low, "high": score.high}
        classes.append(
            {"class": score.name, "images": score.images, "accuracy": score.accuracy, **interval}
        )
    document = {
        **evaluation,
        "split": evaluation.split_name,
        "per_class": classes,
        "classes_without_images": evaluation.without_images,
        "confusion": evaluation.confusion.tolist(),
        "top_losses": [asdict(one) for one in evaluation.top_losses(TOP_LOSSES)],
    }
    return json_text.dumps(document) + "\n"


def _confusion(evaluation: Evaluation, path: Path, title: str) -> bytes:
    """Return the content of the confusion matrix's file, by its ending."""
    classes = evaluation.classes
    if path.suffix.lower() == ".csv":
        text = io.StringIO()
        writer = csv.writer(text, lineterminator="\n")
        writer.writerow([r"true\predicted", *classes])
        for name, row in zip(classes, evaluation.confusion.tolist(), strict=True):
            writer.writerow([name, *row])
        return text.getvalue().encode()
    if len(classes) > MAX_CLASSES:
        raise errors.SettingError(
            f"--confusion {path}: a {path.suffix} has room for {MAX_CLASSES} classes, and there "
            f"are {len(classes)}; name a .csv file"
        )
    # imported here: nothing else needs matplotlib
    from vitkit.plots.confusion import draw_confusion
    from vitkit.plots.figure import encode_png, encode_svg

    figure = draw_confusion(evaluation.confusion, classes, title)
    if path.suffix.lower() == ".svg":
        return encode_svg(figure)
    return encode_png(figure)


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
            notes.append(f"calibrated: {evaluation[f'calibrated_{name}']:.4f}")
        if name == "images":
            notes.append(f"{evaluation.split_name} split")
        shown = str(value) if isinstance(value, int) else f"{value:.4f}"
        scores.append([name, shown, ", ".join(notes)])
    width = messages.terminal_width()
    table = messages.format_table(scores, width)
    # classes without mistakes are left out below
    worst = sorted(evaluation.per_class, key=lambda score: score.accuracy)[:LISTED_CLASSES]
    rows = [_class_row(evaluation, score) for score in worst if score.accuracy < 1]
    if rows:
        heading = ["worst classes", "top1", "right", "95 %", "most often predicted as"]
        table += "\n" + messages.format_table([heading, *rows], width)
    return table + messages.fold(_without_images(evaluation), width)


def _without_images(evaluation: Evaluation) -> str:
    """Name classes without images, the first few of many."""
    names = evaluation.without_images
    if not names:
        return ""
    shown = ", ".join(map(messages.escape, names[:LISTED_CLASSES]))
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
    # (K,) images of this class by predicted class
    mistakes = np.bincount(evaluation.predicted[wrong], minlength=len(classes))
    return [
        messages.escape(score.name),
        f"{score.accuracy:.4f}",
        f"{score.right:,} of {score.images:,}",
        f"{score.low:.4f} to {score.high:.4f}",
        f"{messages.escape(classes[mistakes.argmax()])} ({mistakes.max():,})",
    ]
