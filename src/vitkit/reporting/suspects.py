"""The section on suspected wrong labels, and the page that exports corrections."""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from vitkit.data.datasets.split import LabelChange, Split, read_label_changes
from vitkit.devices import on_device, resolve_device
from vitkit.errors import DataError, SettingError
from vitkit.evaluation.evaluate import with_labels_of
from vitkit.evaluation.features import (
    FOLDS,
    extract_features,
    out_of_fold_probabilities,
    rank_suspects,
)
from vitkit.io.atomic import write_bytes
from vitkit.io.results import csv_result
from vitkit.messages import escape
from vitkit.reporting.predictions import Missing, Predictions, is_small
from vitkit.reporting.run import ReportedRun
from vitkit.reporting.sections import SPLITS

SUSPECTS_HEADER = (
    "path",
    "split",
    "number",
    "label",
    "predicted",
    "probability",
    "label_probability",
)
"""Columns of suspects.csv: the image as relabel.csv names it, its split and its number there; its
class, a more probable one, and both probabilities."""
SUSPECTS_FILE = csv_result("a list of suspects", SUSPECTS_HEADER)
SHOWN = 120
"""Suspects of the page; suspects.csv has all."""
UNFOLDED = 24
"""Suspects that are shown at once; the others are folded."""
SPLIT_NAMES = {"train": "training"} | SPLITS


@dataclass(frozen=True)
class Suspect:
    """An image whose label is probably wrong.

    Attributes:
        path: the image, as relabel.csv names it.
        number: number of the image in its split.
        label: its class.
        predicted: a more probable class.
        probability: probability of that class, in [0, 1].
        label_probability: probability of its own class, in [0, 1].
        image: a small copy as an address that contains it; empty where there is none.
        is_small: whether the copy is enlarged without blur.
        name: the image, as predictions and messages name it; empty where that is not known.
    """

    path: str
    number: int
    label: str
    predicted: str
    probability: float
    label_probability: float
    image: str = ""
    is_small: bool = False
    name: str = ""


@dataclass(frozen=True)
class SuspectList:
    """The suspects of a split, the least probable label first.

    Attributes:
        split: name of the split.
        suspects: all of them.
        is_out_of_fold: whether classifiers that never saw the label have found them; else the
            predictions of the run.
    """

    split: str
    suspects: Sequence[Suspect]
    is_out_of_fold: bool


def write_suspects(run: ReportedRun, split: str, device: str = "auto") -> None:
    """Find the suspects among the images of a split, and write suspects.csv into the run folder.

    The features are those of the best weights; linear classifiers are fitted on four fifths of the
    images and asked about the rest.

    Args:
        run: with weights, and data that can still be read.
        split: `train`, `val` or `test`.
        device: `cpu`, `cuda`, `mps`; auto picks the fastest available.

    Raises:
        SettingError: another split than the data have, or a run without weights.
        DataError: data that cannot be opened, have changed, or are of one class.
        DeviceError: a device that is not there.
        OutputError: the folder cannot be written.
    """
    checkpoint, dataset = run.checkpoint, run.images.dataset
    if checkpoint is None:
        raise SettingError(f"--suspects: {escape(run.root)} has no weights that can be read")
    if dataset is None:
        raise DataError(f"--suspects: {run.images.problem.rstrip('.')}")
    if split not in dataset.splits:
        raise SettingError.about(
            "suspects", split, f"{dataset.name} has the splits {', '.join(dataset.splits)}"
        )
    model_device = resolve_device(device)
    features, _ = extract_features(
        on_device(checkpoint.model, model_device),
        dataset,
        split,
        checkpoint.preprocess,
        device=model_device,
    )
    checkpoint.model.to("cpu")  # as the other sections expect it
    # numbered as the classes of the checkpoint
    images = with_labels_of(checkpoint, dataset, split)
    classes = checkpoint.classes or dataset.classes
    labels = np.ascontiguousarray(images.labels)
    probabilities = out_of_fold_probabilities(
        features, torch.from_numpy(labels), len(classes), device=model_device
    )
    found = probabilities.double().numpy()
    predicted = np.argmax(np.nan_to_num(found), axis=1)
    rows = np.arange(len(labels))
    order = rank_suspects(labels, predicted, found[rows, predicted], found[rows, labels])
    suspected = []
    for number in order.tolist():
        other = int(predicted[number])
        suspected.append(
            Suspect(
                path=images.path(number),
                number=number,
                label=classes[labels[number]],
                predicted=classes[other],
                probability=float(found[number, other]),
                label_probability=float(found[number, labels[number]]),
            )
        )
    write_bytes(run.folder.suspects, _to_csv(split, suspected))


def _to_csv(split: str, suspected: Sequence[Suspect]) -> bytes:
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(SUSPECTS_HEADER)
    for one in suspected:
        probabilities = (f"{one.probability:.6f}", f"{one.label_probability:.6g}")
        writer.writerow([one.path, split, one.number, one.label, one.predicted, *probabilities])
    return text.getvalue().encode("utf-8", "replace")


def suspects(run: ReportedRun) -> dict[str, Any]:
    """Return the suspects of suspects.csv, else those among the predictions of the run.

    Raises:
        Missing: neither of them, or a suspects.csv of another program.
    """
    again = run.command("report", run.root, "--suspects", "train")
    found = _read(run, again) if run.folder.suspects.exists() else _predicted(run, again)
    split = run.images.split(found.split)
    shown = [_with_image(run, split, one) for one in found.suspects[:SHOWN]]
    # labels cannot be judged without the images
    can_tick = any(one.image for one in shown)
    dataset = run.images.dataset
    return {
        "count": len(found.suspects),
        "shown": shown,
        "unfolded": UNFOLDED,
        "split": SPLIT_NAMES.get(found.split, found.split),
        "is_out_of_fold": found.is_out_of_fold,
        "folds": FOLDS,
        "table": run.folder.suspects.name,
        "can_tick": can_tick,
        # the problem may concern another split
        "problem": "" if can_tick else run.images.problem,
        "classes": [] if dataset is None else dataset.classes,
        "earlier": _earlier(run),
        "again": again,
        **_commands(run),
    }


def _read(run: ReportedRun, again: str) -> SuspectList:
    path = run.folder.suspects
    try:
        with path.open(encoding="utf-8", newline="") as file:
            header, *rows = list(csv.reader(file)) or [[]]
        if tuple(header) != SUSPECTS_HEADER:
            raise ValueError
        found = [
            Suspect(row[0], int(row[2]), row[3], row[4], float(row[5]), float(row[6]))
            for row in rows
        ]
        split = rows[0][1] if rows else "train"
    except (OSError, ValueError, IndexError, csv.Error):
        raise Missing(
            f"{path.name} is not a list of suspects of vitkit. Once it has another name, this "
            "command writes one.",
            again,
        ) from None
    return SuspectList(split, found, is_out_of_fold=True)


def _predicted(run: ReportedRun, again: str) -> SuspectList:
    """Return the suspects among the images that the run has predicted and was not trained on."""
    try:
        predictions = run.predictions
    except Missing:
        raise Missing(
            "The folder has neither suspects.csv nor predictions. This command looks for wrong "
            "labels among the training images.",
            again,
        ) from None
    numbers = rank_suspects(
        predictions.labels,
        predictions.predicted,
        predictions.probability,
        predictions.label_probability,
    )
    split = run.images.of(predictions)
    found = [_of_prediction(predictions, split, int(number)) for number in numbers]
    return SuspectList(predictions.split, found, is_out_of_fold=False)


def _of_prediction(predictions: Predictions, split: Split | None, number: int) -> Suspect:
    place = int(predictions.places[number])
    if split is not None:
        path = split.path(place)
    elif predictions.names:
        path = predictions.names[number]
    else:
        path = f"{predictions.split}/{place}"
    return Suspect(
        path,
        place,
        predictions.classes[predictions.labels[number]],
        predictions.classes[predictions.predicted[number]],
        float(predictions.probability[number]),
        float(predictions.label_probability[number]),
    )


def _with_image(run: ReportedRun, split: Split | None, one: Suspect) -> Suspect:
    """Return a suspect with its image and name, where the split still has it in its place."""
    image = None
    if split is not None and one.number < len(split) and split.path(one.number) == one.path:
        one = replace(one, name=split.name(one.number))
        image = run.images.thumbnail(split, one.number)
    if image is None:
        return one
    return replace(one, image=image, is_small=is_small(image))


def _earlier(run: ReportedRun) -> Sequence[LabelChange]:
    """Return the corrections that the run was trained with: a new list needs them, too."""
    if run.relabel_file is None:
        return ()
    try:
        return read_label_changes(run.relabel_file).changes
    except DataError:
        return ()


def _commands(run: ReportedRun) -> dict[str, str]:
    again = run.root.with_name(f"{run.root.resolve().name}-relabelled")
    return {
        "train": run.command(
            "train",
            run.data,
            "--recipe",
            run.folder.config,
            "--relabel",
            "relabel.csv",
            "--output",
            again,
        ),
        "check": run.command("check", run.data, "--relabel", "relabel.csv"),
    }
