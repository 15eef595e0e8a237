"""The sections of images: the most confident mistakes with maps, and suspected wrong labels."""

import csv
import io
import time
from collections import defaultdict
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from PIL import Image

from vitkit import devices, errors
from vitkit.data.datasets.split import LabelChange, Split, read_label_changes
from vitkit.data.images.decode import as_rgb
from vitkit.evaluation.evaluate import with_labels_of
from vitkit.evaluation.features import (
    FOLDS,
    extract_features,
    out_of_fold_probabilities,
    rank_suspects,
)
from vitkit.explaining.methods import DEFAULTS
from vitkit.io.atomic import write_bytes
from vitkit.plots.overlay import ColourScale
from vitkit.reporting.run import SPLITS, THUMBNAIL, Missing, Predictions, ReportedRun, data_address
from vitkit.weights.checkpoint import Checkpoint

SHOWN = 24
"""The most confident mistakes."""
SECONDS = 10.0
"""After this time, the other mistakes are shown without a map."""
MOST_OF_A_PAIR = 6
"""Mistakes that are listed of a pair of classes."""
PAIR_IMAGES = 120
"""Images of all pairs together, which keep the page small."""
MOST_PAIRS = 60
"""Pairs of classes that are listed where there is no table with a cell for each."""
PAIRS_UNFOLDED = 9
"""Pairs of classes that are shown at once; the others are folded."""
MOST_IN_A_TABLE = 30
"""Classes of the largest confusion matrix that is a table with links."""


@dataclass(frozen=True)
class ShownImage:
    """An image whose class is not the predicted one.

    Attributes:
        name: name of the image.
        label: its class.
        predicted: the class that was predicted.
        probability: probability of that class, in [0, 1].
        label_probability: probability of its own class, in [0, 1].
        image: a small copy as an address that contains it; empty without one.
        explanation: an overlay of what speaks for the predicted class, likewise.
        path: the image, as relabel.csv names it.
        number: number of the image in its split.
    """

    name: str
    label: str
    predicted: str
    probability: float
    label_probability: float
    image: str = ""
    explanation: str = ""
    path: str = ""
    number: int = 0

    @property
    def is_small(self) -> bool:
        """True if the copy is enlarged without blur."""
        return self.image.startswith("data:image/png")


def mistakes(run: ReportedRun) -> dict[str, Any]:
    """Return the most confident mistakes, and those of each pair of classes."""
    predictions = run.predictions
    wrong = np.flatnonzero(~predictions.right)
    # stable: equally confident images keep the order of the split
    numbers = wrong[np.argsort(-predictions.probability[wrong], kind="stable")].tolist()
    split = run.split_of(predictions) if numbers else None
    checkpoint, end = run.checkpoint, time.monotonic() + SECONDS
    unexplained = "The run has no weights, so its mistakes are not explained."
    if checkpoint:
        unexplained = ""
    shown = []
    for number in numbers[:SHOWN]:
        one = _predicted_image(predictions, split, number)
        one = replace(one, image=run.thumbnail(split, one.number))
        if checkpoint and split and one.image and not unexplained and time.monotonic() < end:
            try:
                one = replace(one, explanation=_explain(checkpoint, split, one.number))
            except errors.VitkitError as error:
                unexplained = f"The mistakes are not explained: {error}."
        shown.append(one)
    return {
        "count": len(numbers),
        "images": predictions.images,
        "shown": shown,
        "pairs": _pairs(run, predictions, split, numbers),
        "problem": run.problem,
        "explained": sum(bool(one.explanation) for one in shown),
        "unfolded": PAIRS_UNFOLDED,
        "method": DEFAULTS[0],
        "unexplained": unexplained,
        "has_table": len(predictions.classes) <= MOST_IN_A_TABLE,
        "table": run.folder.predictions.name if run.folder.predictions.exists() else "",
    }


def _predicted_image(predictions: Predictions, split: Split | None, number: int) -> ShownImage:
    """Return one of the predictions, without its image."""
    place = int(predictions.places[number])
    name = f"{predictions.split}[{place}]" if split is None else split.name(place)
    if predictions.names:
        name = predictions.names[number]
    return ShownImage(
        name,
        predictions.classes[predictions.labels[number]],
        predictions.classes[predictions.predicted[number]],
        float(predictions.probability[number]),
        float(predictions.label_probability[number]),
        path=name if split is None else split.path(place),
        number=place,
    )


def _pairs(
    run: ReportedRun, predictions: Predictions, split: Split | None, numbers: Sequence[int]
) -> list[dict[str, Any]]:
    """Return the pairs of classes with mistakes, the most frequent first.

    Every pair of up to 30 classes is there, and the 60 most frequent ones of more.
    """
    by_pair: dict[tuple[int, int], list[int]] = defaultdict(list)
    for number in numbers:
        by_pair[int(predictions.labels[number]), int(predictions.predicted[number])].append(number)
    pairs = sorted(by_pair.items(), key=lambda pair: (-len(pair[1]), pair[0]))
    if len(predictions.classes) > MOST_IN_A_TABLE:
        pairs = pairs[:MOST_PAIRS]
    each = max(1, min(MOST_OF_A_PAIR, PAIR_IMAGES // max(1, len(pairs))))
    found = []
    for place, ((label, predicted), wrong) in enumerate(pairs):
        shown = []
        for number in wrong[:each]:
            one = _predicted_image(predictions, split, number)
            if place * each < PAIR_IMAGES:  # beyond that number, only the names are shown
                one = replace(one, image=run.thumbnail(split, one.number))
            shown.append(one)
        pair = {
            "label": predictions.classes[label],
            "predicted": predictions.classes[predicted],
            "key": f"pair-{label}-{predicted}",
            "count": len(wrong),
            "mistakes": shown,
            "images": int((predictions.labels == label).sum()),
        }
        found.append(pair)
    return found


def _explain(checkpoint: Checkpoint, split: Split, place: int) -> str:
    """Return the address of a small overlay of an image of the split, by its predicted class."""
    # imported here: a report without mistakes explains nothing
    from vitkit.explaining.explain import ImageExplainer

    explainer = ImageExplainer(checkpoint, as_rgb(split.read(place)), faithfulness=False)
    explanation = explainer.explain(DEFAULTS[0])
    # one colour scale for all maps, also if no patch speaks against the class
    scale = ColourScale.of(explanation.values, -explanation.values)
    image = Image.fromarray(explanation.panel(scale=scale).pixels)
    # two pixels for each one of the page, since the map has fine lines
    image.thumbnail((2 * THUMBNAIL, 2 * THUMBNAIL), Image.Resampling.LANCZOS)
    return data_address(image.convert("RGB"), "jpeg")


# Suspected wrong labels, and the page that exports corrections.

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
SUSPECTS_SHOWN, SUSPECTS_UNFOLDED = 120, 24
"""Suspects of the page, of which suspects.csv has all, and those that are not folded."""


def write_suspects(run: ReportedRun, split: str, device: str = "auto") -> None:
    """Find the suspects among the images of a split, and write suspects.csv into the run folder.

    The features are those of the best weights; linear classifiers are fitted on four fifths of the
    images and asked about the rest. The least probable label comes first.

    Args:
        run: with weights, and data that can still be read.
        split: `train`, `val` or `test`.
        device: `cpu`, `cuda`, `mps`; auto picks the fastest available.

    Raises:
        SettingError: another split than the data have.
        DataError: no weights; data that cannot be opened, have changed, or are of one class.
        DeviceError: a device that is not there.
        OutputError: the folder cannot be written.
    """
    checkpoint, dataset = run.checkpoint, run.dataset
    if checkpoint is None or dataset is None:
        raise errors.DataError(f"--suspects: {run.problem.rstrip('.')}")
    if split not in dataset.splits:
        expected = f"{dataset.name} has the splits {', '.join(dataset.splits)}"
        raise errors.SettingError.about("suspects", split, expected)
    chosen = devices.resolve_device(device)
    model = devices.on_device(checkpoint.model, chosen)
    features, _ = extract_features(model, dataset, split, checkpoint.preprocess, device=chosen)
    checkpoint.model.to("cpu")  # as the other sections expect it
    # numbered as the classes of the checkpoint
    images = with_labels_of(checkpoint, dataset, split)
    classes = checkpoint.classes or dataset.classes
    labels = np.ascontiguousarray(images.labels)
    targets = torch.from_numpy(labels)
    fitted = out_of_fold_probabilities(features, targets, len(classes), device=chosen)
    found = fitted.double().numpy()
    predicted = np.argmax(np.nan_to_num(found), axis=1)
    rows = np.arange(len(labels))
    probability, own = found[rows, predicted], found[rows, labels]
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(SUSPECTS_HEADER)
    for number in rank_suspects(labels, predicted, probability, own).tolist():
        names = classes[labels[number]], classes[predicted[number]]
        numbers = f"{probability[number]:.6f}", f"{own[number]:.6g}"
        writer.writerow([images.path(number), split, number, *names, *numbers])
    write_bytes(run.folder.suspects, text.getvalue().encode("utf-8", "replace"))


def suspects(run: ReportedRun) -> dict[str, Any]:
    """Return the suspects of suspects.csv, else those among the predictions of the run.

    Raises:
        Missing: neither of them, or a suspects.csv of another program.
    """
    again = run.command("report", run.root, "--suspects", "train")
    is_out_of_fold = run.folder.suspects.exists()
    name, found = _read(run, again) if is_out_of_fold else _predicted(run, again)
    split, shown = run.split(name), []
    for one in found[:SUSPECTS_SHOWN]:
        # where the split still has it in its place
        if split and one.number < len(split) and split.path(one.number) == one.path:
            image = run.thumbnail(split, one.number)
            one = replace(one, name=split.name(one.number), image=image)
        shown.append(one)
    # labels cannot be judged without the images
    can_tick = any(one.image for one in shown)
    dataset, data = run.dataset, run.data
    earlier: Sequence[LabelChange] = ()
    if run.relabel_file:  # a new list needs the corrections that the run was trained with, too
        with suppress(errors.DataError):
            earlier = read_label_changes(run.relabel_file).changes
    output = run.root.with_name(f"{run.root.resolve().name}-relabelled")
    relabel = ("--relabel", "relabel.csv")
    return {
        "count": len(found),
        "shown": shown,
        "unfolded": SUSPECTS_UNFOLDED,
        "split": {"train": "training", **SPLITS}.get(name, name),
        "is_out_of_fold": is_out_of_fold,
        "folds": FOLDS,
        "table": run.folder.suspects.name,
        "can_tick": can_tick,
        # the problem may concern another split
        "problem": "" if can_tick else run.problem,
        "classes": [] if dataset is None else dataset.classes,
        "earlier": earlier,
        "again": again,
        "train": run.command(
            "train", data, "--recipe", run.folder.config, *relabel, "--output", output
        ),
        "check": run.command("check", data, *relabel),
    }


def _read(run: ReportedRun, again: str) -> tuple[str, list[ShownImage]]:
    """Return the split and the images of suspects.csv."""
    path = run.folder.suspects
    try:
        with path.open(encoding="utf-8", newline="") as file:
            header, *rows = list(csv.reader(file)) or [[]]
        if tuple(header) != SUSPECTS_HEADER:
            raise ValueError
        found = []
        for name, _, number, label, other, probability, own in rows:
            numbers = float(probability), float(own)
            one = ShownImage(name, label, other, *numbers, path=name, number=int(number))
            found.append(one)
    except (OSError, ValueError, csv.Error):
        raise Missing(
            f"{path.name} is not a list of suspects of vitkit. Once it has another name, this "
            "command writes one.",
            again,
        ) from None
    return rows[0][1] if rows else "train", found


def holds_suspects(run: ReportedRun) -> bool:
    """Return whether suspects.csv is a list that vitkit wrote."""
    try:
        _read(run, "")
    except Missing:
        return False
    return True


def _predicted(run: ReportedRun, again: str) -> tuple[str, list[ShownImage]]:
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
    split = run.split_of(predictions)
    found = [_predicted_image(predictions, split, number) for number in numbers.tolist()]
    return predictions.split, found
