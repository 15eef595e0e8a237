"""Sections of the report: result, scores, data."""

from __future__ import annotations

import json
import os
import platform
import re
import shlex
from importlib.metadata import version
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Int64
from PIL import Image

from vitkit.data.images.decode import decode
from vitkit.errors import ImageError
from vitkit.evaluation.intervals import wilson_interval
from vitkit.evaluation.metrics import Metrics
from vitkit.io.results import MEMORY_PREFIX
from vitkit.messages import escape
from vitkit.plots import MAX_CLASSES
from vitkit.reporting.mistakes import MOST_IN_A_TABLE, Explanations, MistakeList, pair_key
from vitkit.reporting.predictions import Missing, Predictions, as_confidence, data_address
from vitkit.reporting.run import ReportedRun
from vitkit.training.config.meaning import Settings
from vitkit.training.config.merging import with_flat_spec
from vitkit.training.config.train_config import USUAL, TrainConfig

SPLITS = {"test": "test", "val": "validation"}
"""Splits with scores, the most reliable first, and their names in the page."""
SCORES = {
    "top1": "top-1 accuracy",
    "top5": "top-5 accuracy",
    "balanced_accuracy": "balanced accuracy",
    "loss": "loss (nats)",
    "calibrated_loss": "loss with the temperature (nats)",
    "brier": "Brier score",
    "ece": "calibration error",
    "calibrated_ece": "calibration error with the temperature",
}
"""Scores of the page, and what they are called there."""
PLACES = {
    "amp": "mixed precision",
    "devices": "processes",
    "threads": "CPU threads",
    "workers": "loader processes",
    "compile": "compiled training step",
    "seed": "seed",
}
"""Settings that describe the machine, and the seed; and what they are called in the page."""
CHOSEN: dict[str, dict[object, str]] = {
    "amp": {"off": "none, float32", "auto": "chosen for the device"},
    "threads": {None: "as many as torch chooses"},
    "workers": {None: "chosen by the data and the number of cores"},
    "compile": {False: "no", True: "yes"},
}
"""Values of these settings in words."""
DEVICE = re.compile(r"^\S+ training: .*, on (\S+), into ")
"""The line of train.log that names the device of a run."""
OWN_PLACE = ("data", "output", "start", "resume", "overwrite", "quiet", "plots", "report")
"""Settings that are not listed: they are shown elsewhere, or about this call alone."""


def best_score(run: ReportedRun) -> dict[str, Any]:
    """Return the score of the best weights with its interval, and the other scores.

    Raises:
        Missing: no epoch was complete.
    """
    splits = [name for name in SPLITS if "top1" in run.scores.get(name, {})]
    if not splits:
        raise Missing(
            "The run has no scores yet: no epoch is complete. Resume it; it writes the report at "
            "its end.",
            run.command("train", "--resume", run.root),
        )
    main = run.scores[splits[0]]
    low, high = _interval(main)
    ends = [line.partition(" ")[2] for line in run.log if " ended after " in line]
    return {
        "split": SPLITS[splits[0]],
        "top1": main["top1"],
        "low": low,
        "high": high,
        "images": int(main.get("images", 0)),
        "rows": _score_rows(run, splits),
        "splits": [SPLITS[name] for name in splits],
        "end": ends[-1].partition(";")[0] if ends else "",
        "chosen": splits == ["val"],
    }


def _interval(scores: Metrics) -> tuple[float, float]:
    """Return the 95 % interval of top-1: the stored one, else Wilson's."""
    if "top1_low" in scores and "top1_high" in scores:
        return scores["top1_low"], scores["top1_high"]
    images = int(scores.get("images", 0))
    if images < 1:
        return 0.0, 1.0
    return wilson_interval(round(scores["top1"] * images), images)


def _score_rows(run: ReportedRun, splits: list[str]) -> list[tuple[str, list[Score]]]:
    """Return the name of each score, and its values by split."""
    rows = []
    for name, title in SCORES.items():
        cells = [format_score(run.scores[split], name) for split in splits]
        if any(cell.value for cell in cells):
            rows.append((title, cells))
    counts = [Score(f"{int(run.scores[split].get('images', 0)):,}") for split in splits]
    return [*rows, ("images", counts)]


class Score(NamedTuple):
    """A score as text; both are empty where it is missing."""

    value: str = ""
    interval: str = ""


def format_score(scores: Metrics, name: str) -> Score:
    """Format a score, with its interval where that is stored.

    Args:
        scores: scores of one split.
        name: name of the score, such as `top1`.
    """
    if name not in scores:
        return Score()
    low, high = scores.get(f"{name}_low"), scores.get(f"{name}_high")
    interval = "" if low is None or high is None else f"{low:.4f} to {high:.4f}"
    return Score(f"{scores[name]:.4f}", interval)


def repetition(run: ReportedRun) -> dict[str, Any]:
    """Return the command that repeats the run, and the settings that differ from the defaults.

    Raises:
        Missing: config.yaml cannot be read.
    """
    if not run.settings:
        raise Missing("config.yaml cannot be read, so the settings of the run are not known.")
    config = run.folder.config
    again = run.root.with_name(f"{run.root.resolve().name}-again")
    given = [name for name, value in run.settings.items() if MEMORY_PREFIX in str(value)]
    return {
        "command": run.command(
            "train", run.data, "--recipe", config, *run.relabel_words, "--output", again
        ),
        "python": f"vitkit.train({', '.join(_python_call(run, given))})" if given else "",
        "given": given,
        "test": run.command("eval", run.root, run.data, *run.relabel_words),
        "report": run.command("report", run.root),
        "folder": shlex.quote(os.getcwd()),
        "settings": _changed_settings(run),
    }


def _python_call(run: ReportedRun, given: list[str]) -> list[str]:
    """Return the arguments of a call whose objects no command line can name."""
    words = ["DATA" if "data" in given else repr(run.settings["data"])]
    words.append(f"recipe={str(run.folder.config)!r}")
    return words + [f"{name}=..." for name in given if name != "data"]


def _changed_settings(run: ReportedRun) -> list[tuple[str, str]]:
    """Return the settings that differ from the defaults, by name."""
    usual = with_flat_spec(TrainConfig(data="").to_json() | USUAL)
    rows = []
    for name, value in with_flat_spec(run.settings).items():
        if name not in OWN_PLACE and value != usual.get(name):
            rows.append((escape(name), escape(str(value))))
    return rows


def environment(run: ReportedRun) -> dict[str, Any]:
    """Return the versions, the machine's settings and the data of the run."""
    versions, data = run.metadata.get("versions"), run.metadata.get("data")
    rows = []
    if isinstance(versions, dict):
        rows += [(f"{name} (training)", str(value)) for name, value in versions.items()]
    device = _device(run)
    if device:
        rows.append(("device", device))
    for name, title in PLACES.items():
        if name in run.settings:
            value = run.settings[name]
            rows.append((title, CHOSEN.get(name, {}).get(value, str(value))))
    if isinstance(data, dict):
        counts = ", ".join(f"{count:,} {name}" for name, count in run.image_counts.items())
        if counts:
            rows.append(("images", counts))
        rows.append(("fingerprint of the data", str(data.get("fingerprint", ""))))
    times = [line.partition(" ")[0] for line in run.log]
    if times:
        rows.append(("log from", f"{times[0]} to {times[-1]}".replace("T", " ")))
    here = f"vitkit {version('vitkit')}, Python {platform.python_version()}, {platform.platform()}"
    return {"rows": [*rows, ("this report", here)]}


def _device(run: ReportedRun) -> str:
    """Return the device of the run; of `auto` the one that was chosen, if the log still has it."""
    found = [match[1] for line in run.log if (match := DEVICE.match(line))]
    setting = str(run.settings.get("device", ""))
    if found:
        return escape(found[-1])
    return "the fastest one available" if setting == "auto" else escape(setting)


def costs(run: ReportedRun) -> dict[str, Any]:
    """Return time, speed, memory and size. Raises `Missing` where none of them is known."""
    rows = []
    try:
        columns = run.curves.columns
    except Missing:
        columns = {}
    # an epoch may lack a value
    finite = {name: column[np.isfinite(column)] for name, column in columns.items()}
    known = {name: column for name, column in finite.items() if column.size}
    if "seconds" in known:
        rows.append(("training", _duration(float(known["seconds"].max()))))
        rows.append(("epochs", f"{len(columns['epoch']):,}"))
    if "images_per_s" in known:
        rows.append(("speed", f"{np.median(known['images_per_s']):,.0f} images/s, the median"))
    if "data_wait" in known:
        share = float(known["data_wait"].mean())
        rows.append(("waiting for images", f"{100 * share:.0f} % of the time"))
    for key, title in (("memory", "memory"), ("cuda_memory", "memory on CUDA")):
        used = [line[key] for line in run.lines if isinstance(line.get(key), int | float)]
        if used:
            rows.append((f"{title}, the highest", f"{max(used):,.0f} MB"))
    if run.checkpoint is not None and run.checkpoint.path is not None:
        count = sum(weight.numel() for weight in run.checkpoint.model.parameters())
        size = run.checkpoint.path.stat().st_size
        rows.append(("model", f"{count:,} parameters, {size / 1e6:,.1f} MB"))
    if not rows:
        raise Missing("The run has neither metrics nor weights, so its costs are not known.")
    return {"rows": rows}


def _duration(seconds: float) -> str:
    """Return a time in words.

    >>> _duration(4.2), _duration(75.0), _duration(7384.0)
    ('4.2 s', '1 min 15 s', '2 h 3 min')
    """
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest} s"
    return f"{minutes // 60:,} h {minutes % 60} min"


# Sections about the predictions: curves, classes, confusions, mistakes, calibration.
#
# Each raises `Missing` where the run has neither predictions.csv nor validation logits.

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
    counts = _confusion_counts(predictions)
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


def _confusion_counts(predictions: Predictions) -> Int64[np.ndarray, "K K"]:
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


# Sections about the data: the findings of the check, and images as training saw them.

NAMED = 8
"""Images that the page names of a finding."""
WIDEST = 1200
"""Pixels of the grid of augmented images at most."""
LARGEST = 400_000
"""Bytes of the grid that stays a PNG file."""


def check_findings(run: ReportedRun) -> dict[str, Any]:
    """Return the findings of the check of the data. Raises `Missing` without check.json."""
    command = run.command("check", run.data, *run.relabel_words, "--output", run.folder.check)
    try:
        document = json.loads(run.folder.check.read_bytes())
        findings = [_finding(found) for found in document["findings"]]
        checked = sum(sum(counts.values()) for counts in document["images"].values())
    except FileNotFoundError:
        raise Missing(
            "The folder has no report of a check of the data. This command writes one; make this "
            "report again afterwards.",
            command,
        ) from None
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError):
        raise Missing(
            f"{run.folder.check.name} is not a report of vitkit check.", command
        ) from None
    return {"findings": findings, "checked": checked}


def _finding(found: dict[str, Any]) -> dict[str, Any]:
    """Return a finding of the JSON report as the page shows it."""
    images = [" = ".join(map(str, names)) for names in found["images"]]
    return {
        "severity": str(found["severity"]),
        "message": escape(str(found["message"])),
        "images": [escape(name) for name in images[:NAMED]],
        # the report of training names only the first images
        "more": max(0, len(images) - NAMED) + int(found.get("more", 0)),
    }


def augmented(run: ReportedRun) -> dict[str, Any]:
    """Return the grid of augmented images of the first step. Raises `Missing` without it."""
    path = run.folder.augmented
    again = run.root.with_name(f"{run.root.resolve().name}-augmented")
    command = run.command(
        "train", run.data, "--recipe", run.folder.config, "--output", again, "--max-steps", "1",
        "--save-augmented-grid",
    )  # fmt: skip
    if not path.exists():
        raise Missing(
            "The run has not written a sample of its augmented images. This command writes one, "
            f"{escape(again / path.name)}; copy it into the folder of this run.",
            command,
        )
    try:
        image = Image.fromarray(decode(path, name=path.name))
    except ImageError as error:
        raise Missing(f"The sample cannot be read: {error}.", command) from None
    if path.stat().st_size <= LARGEST:
        return {"image": data_address(image, "png")}
    image.thumbnail((WIDEST, 2 * WIDEST))
    return {"image": data_address(image, "jpeg")}
