"""Sections about the predictions: curves, classes, confusions, mistakes, calibration.

Each raises `Missing` where the run has neither predictions.csv nor validation logits.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from jaxtyping import Int64

from vitkit.evaluation.intervals import wilson_interval
from vitkit.messages import escape
from vitkit.plots import MAX_CLASSES
from vitkit.reporting.missing import Missing
from vitkit.reporting.prediction_source import Predictions, as_confidence
from vitkit.reporting.reported_run import ReportedRun
from vitkit.reporting.sections.explained import Explanations
from vitkit.reporting.sections.mistakes import MOST_IN_A_TABLE, MistakeList, pair_key
from vitkit.reporting.sections.overview import SPLITS
from vitkit.training.config.field_types import Settings

PAIRS_UNFOLDED = 9
"""Pairs of classes that are shown at once; the others are folded."""


def curves(run: ReportedRun) -> dict[str, Any]:
    """Return the learning curves as SVG.

    Raises:
        Missing: no epoch was complete.
    """
    # imported here, as in each section that draws: matplotlib takes half a second
    from vitkit.reporting.figures import inline_svg

    found = run.curves
    best = found.best_epoch
    return {
        "svg": inline_svg(found.plot(), "curves"),
        "best": best,
        "epochs": int(found.columns["epoch"].max()),
        "harder": _made_harder(run.settings) if best else "",  # else nothing is validated
    }


def _made_harder(settings: Settings) -> str:
    """Name what raises the training loss but not the validation loss; empty if nothing."""
    words = ["augmented images"] if _is_augmented(settings) else []
    smoothing = settings.get("label_smoothing")
    if smoothing:
        words.append(f"label smoothing {smoothing}")
    words += [name for name in ("mixup", "cutmix") if settings.get(name)]
    # a field of the spec, or a setting
    spec = settings.get("spec") or {}
    if settings.get("drop_path") or any(spec[name] for name in spec if "drop" in name):
        words.append("dropout")
    if settings.get("teacher"):
        words.append("the loss to the teacher")
    if settings.get("loss", "cross-entropy") != "cross-entropy":
        words.append(f"the loss {escape(str(settings['loss']))}")
    *first, last = words or [""]
    return f"{', '.join(first)} and {last}" if first else last


def _is_augmented(settings: Settings) -> bool:
    """Return whether a setting changes the training images."""
    names = ("transform", "flip", "shift", "aa", "color_jitter", "reprob")
    return any(settings.get(name) for name in names) or settings.get("crop_scale", 1) != 1


def classes(run: ReportedRun) -> dict[str, Any]:
    """Return a row for each class: images, accuracy with interval, precision, usual mistake."""
    predictions = run.predictions
    size = len(predictions.classes)
    images = np.bincount(predictions.labels, minlength=size)
    predicted = np.bincount(predictions.predicted, minlength=size)
    right = np.bincount(predictions.labels[predictions.right], minlength=size)
    usual = _usual_mistakes(predictions)
    rows = []
    for number, name in enumerate(predictions.classes):
        row: dict[str, Any] = {
            "name": escape(name), "images": int(images[number]), "right": int(right[number]),
            "accuracy": None, "precision": None, "mistaken": "", "times": 0,
        }  # fmt: skip
        if images[number]:
            row["accuracy"] = right[number] / images[number]
            row["low"], row["high"] = wilson_interval(int(right[number]), int(images[number]))
        if predicted[number]:
            row["precision"] = right[number] / predicted[number]
        if number in usual:
            other, row["times"] = usual[number]
            row["mistaken"] = escape(predictions.classes[other])
        rows.append(row)
    empty = sum(row["images"] == 0 for row in rows)
    return {"rows": rows, "empty": empty} | _origin(predictions)


def _usual_mistakes(predictions: Predictions) -> dict[int, tuple[int, int]]:
    """Return the class that images of a class are mistaken for most often, and how often."""
    wrong = ~predictions.right
    # not as a matrix: thousands of classes would make it larger than the memory
    pairs = np.stack([predictions.labels[wrong], predictions.predicted[wrong]], axis=1)
    found, times = np.unique(pairs, axis=0, return_counts=True)
    usual: dict[int, tuple[int, int]] = {}
    for (label, other), count in zip(found.tolist(), times.tolist(), strict=True):
        if count > usual.get(label, (0, 0))[1]:
            usual[label] = (other, count)
    return usual


def confusion(run: ReportedRun) -> dict[str, Any]:
    """Return the confusion matrix: a table with links, or an image where classes are many."""
    predictions = run.predictions
    count = len(predictions.classes)
    shown: dict[str, Any] = {"names": [escape(name) for name in predictions.classes]}
    shown |= _origin(predictions)
    if count > MAX_CLASSES:
        raise Missing(
            f"A confusion matrix is drawn of up to {MAX_CLASSES:,} classes, and there are "
            f"{count:,}. This command writes it as a table.",
            run.command("eval", run.root, run.data, "--confusion", run.root / "confusion.csv"),
        )
    counts = confusion_counts(predictions)
    if count <= MOST_IN_A_TABLE:
        shares = counts / np.maximum(counts.sum(1, keepdims=True), 1)
        rows = []
        for label in range(count):
            cells = []
            for other in range(count):
                cells.append(
                    {
                        "count": int(counts[label, other]),
                        "share": float(shares[label, other]),
                        "key": "" if label == other else pair_key(label, other),
                    }
                )
            rows.append(cells)
        return shown | {"rows": rows, "image": ""}
    from vitkit.reporting.figures import confusion_image

    return shown | {"rows": [], "image": confusion_image(counts, predictions.classes)}


def mistakes(run: ReportedRun) -> dict[str, Any]:
    """Return the most confident mistakes, and those of each pair of classes."""
    predictions = run.predictions
    found = MistakeList(predictions, run.images)
    explanations = Explanations(run.checkpoint)
    shown = found.most_confident(explanations)
    table = run.folder.predictions
    return {
        "count": found.count,
        "images": len(predictions.labels),
        "shown": shown,
        "pairs": found.pairs(),
        "has_images": any(one.image for one in shown),
        "problem": run.images.problem,
        "explained": explanations.count,
        "unfolded": PAIRS_UNFOLDED,
        "method": explanations.method,
        "unexplained": explanations.problem,
        "has_table": len(predictions.classes) <= MOST_IN_A_TABLE,
        "table": table.name if table.exists() else "",
    } | _origin(predictions)


def calibration(run: ReportedRun) -> dict[str, Any]:
    """Return reliability diagrams: of validation without and with temperature, and of the test."""
    from vitkit.reporting.figures import reliability_svg

    panels = []
    temperature = run.temperature
    if run.held_out is not None:
        steps = {1.0: "validation, temperature 1"}
        steps.setdefault(temperature, f"validation, temperature {temperature:.2f}")
        for value, title in steps.items():
            panels.append((title, *as_confidence(run.held_out, value)))
    predictions = _predictions_or_none(run)
    if predictions is not None and (predictions.split == "test" or not panels):
        title = f"{SPLITS[predictions.split]}, temperature {temperature:.2f}"
        panels.append((title, predictions.probability, predictions.right))
    if not panels:
        _ = run.predictions  # raises `Missing`
    drawn = []
    for number, (title, confidence, right) in enumerate(panels):
        svg = reliability_svg(confidence, right, title, f"reliability{number}")
        words = (
            f"{title}: mean confidence {100 * np.mean(confidence):.1f} %, right "
            f"{100 * np.mean(right):.1f} % of {len(right):,} images"
        )
        drawn.append({"svg": svg, "words": words})
    return {"panels": drawn, "temperature": temperature}


def _predictions_or_none(run: ReportedRun) -> Predictions | None:
    try:
        return run.predictions
    except Missing:
        return None


def confusion_counts(predictions: Predictions) -> Int64[np.ndarray, "K K"]:
    """Return the images of class i predicted as class j, at [i, j]."""
    size = len(predictions.classes)
    pairs = predictions.labels * size + predictions.predicted
    return np.bincount(pairs, minlength=size**2).reshape(size, size)


def _origin(predictions: Predictions) -> dict[str, Any]:
    return {
        "split": SPLITS[predictions.split],
        "origin": predictions.origin,
        "total": len(predictions.labels),
    }
