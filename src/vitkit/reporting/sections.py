"""The sections of the report; a new one is a function and a line of `SECTIONS`.

The function gets a `ReportedRun`, whose properties read the files of the run: `predictions` (arrays
of N images, such as `labels`, `probability` and `right`), `held_out`, `curves`, `scores`,
`settings`, `checkpoint`, `dataset`. Some raise `Missing`, which the page shows in place of the
section. The function returns a `PlainSection`, or the values of a template of its own.
"""

from __future__ import annotations

import json
import os
import platform
import re
import shlex
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

import numpy as np

from vitkit import errors, plots
from vitkit.data.images.decode import as_rgb
from vitkit.data.images.preprocess import preprocess_images
from vitkit.evaluation.intervals import wilson_interval
from vitkit.io.results import MEMORY_PREFIX
from vitkit.messages import escape, plural
from vitkit.reporting.comparison import score_rows
from vitkit.reporting.mistakes import MOST_IN_A_TABLE, mistakes, suspects
from vitkit.reporting.run import SPLITS, Missing, ReportedRun, data_address
from vitkit.training.config.merging import with_flat_spec
from vitkit.training.config.train_config import USUAL, TrainConfig

if TYPE_CHECKING:
    from matplotlib.figure import Figure

PLACES = {
    "amp": "mixed precision",
    "devices": "processes",
    "threads": "CPU threads",
    "workers": "loader processes",
    "seed": "seed",
}
"""Settings that describe the machine, and the seed; and what they are called in the page."""
DEVICE = re.compile(r"^\S+ training: .*, on (\S+), into ")
"""The line of train.log that names the device of a run."""
OWN_PLACE = ("data", "output", "start", "resume", "overwrite", "quiet", "plots", "report")
"""Settings that are not listed: they are shown elsewhere, or about this call alone."""
SHEET_DPI = 110
"""Dots an inch of the sheet of a model, and of a matrix of many classes."""
MEASURED = 16
"""Images on which attention over depth is measured."""
NAMED = 8
"""Images that the page names of a finding."""


@dataclass(frozen=True)
class PlainSection:
    """A section that needs no template: a paragraph, figures and a table, each if it is given.

    Attributes:
        text: the paragraph.
        figures: side by side, each with its caption: what it shows, with its numbers.
        is_wide: each figure is as wide as the page, and its caption is for screen readers alone.
        rows: name and value.
    """

    text: str = ""
    figures: Sequence[tuple[str, Figure]] = ()
    is_wide: bool = False
    rows: Sequence[tuple[str, str]] = ()


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
    images = int(main.get("images", 0))
    low, high = wilson_interval(round(main["top1"] * images), images) if images else (0.0, 1.0)
    ends = [line.partition(" ")[2] for line in run.log if " ended after " in line]
    return {
        "top1": main["top1"],
        "low": low,
        "high": high,
        "images": images,
        "rows": score_rows([run.scores[split] for split in splits]),
        "splits": [SPLITS[name] for name in splits],
        "end": ends[-1].partition(";")[0] if ends else "",
    }


def repetition(run: ReportedRun) -> dict[str, Any]:
    """Return the command that repeats the run, and the settings that differ from the defaults.

    Raises:
        Missing: config.yaml cannot be read.
    """
    if not run.settings:
        raise Missing("config.yaml cannot be read, so the settings of the run are not known.")
    config, relabel = run.folder.config, run.relabel_words
    again = run.root.with_name(f"{run.root.resolve().name}-again")
    # objects of a call, which no command line can name
    given = [name for name, value in run.settings.items() if MEMORY_PREFIX in str(value)]
    call = ["DATA" if "data" in given else repr(run.settings["data"]), f"recipe={str(config)!r}"]
    call += [f"{name}=..." for name in given if name != "data"]
    usual = with_flat_spec(TrainConfig(data="").to_json() | USUAL)
    changed = []
    for name, value in with_flat_spec(run.settings).items():
        if name not in OWN_PLACE and value != usual.get(name):
            changed.append((escape(name), escape(str(value))))
    return {
        "command": run.command("train", run.data, "--recipe", config, *relabel, "--output", again),
        "python": f"vitkit.train({', '.join(call)})",
        "given": given,
        "test": run.command("eval", run.root, run.data, *relabel),
        "report": run.command("report", run.root),
        "folder": shlex.quote(os.getcwd()),
        "settings": changed,
    }


def curves(run: ReportedRun) -> PlainSection:
    """Return the learning curves. Raises `Missing` where no epoch was complete."""
    found = run.curves
    epochs, best, validation = plural(int(found.columns["epoch"].max()), "epoch"), "", ""
    if found.best_epoch:
        best = f"; the best one by validation is epoch {found.best_epoch:,}"
        validation = (
            ", and it is measured with the augmentation and regularisation of the run; the "
            "validation loss has neither, so it may be the lower one"
        )
    text = (
        f"{epochs}{best}. The training loss is the mean of all steps of an epoch, while the "
        f"weights still change{validation}."
    )
    words = "Loss, accuracy and learning rate over the epochs"
    return PlainSection(text, [(words, found.plot())], is_wide=True)


def classes(run: ReportedRun) -> dict[str, Any]:
    """Return a row for each class: images, accuracy with interval, precision, usual mistake."""
    predictions = run.predictions
    labels, predicted, names = predictions.labels, predictions.predicted, predictions.classes
    # not as a matrix: thousands of classes would make it larger than the memory
    ends = np.bincount(labels, minlength=len(names)).cumsum()
    of_class = np.split(predicted[np.argsort(labels, kind="stable")], ends[:-1])
    times_predicted = np.bincount(predicted, minlength=len(names)).tolist()
    rows = []
    for number, name in enumerate(names):
        count, wrong = len(of_class[number]), of_class[number][of_class[number] != number]
        hits = count - len(wrong)
        row: dict[str, Any] = {"name": escape(name), "images": count, "times": 0, "mistaken": ""}
        row["precision"] = None
        if count:
            row["low"], row["high"] = wilson_interval(hits, count)
            row["accuracy"] = hits / count
        if times_predicted[number]:
            row["precision"] = hits / times_predicted[number]
        if len(wrong):
            times = np.bincount(wrong)
            row |= {"times": int(times.max()), "mistaken": escape(names[times.argmax()])}
        rows.append(row)
    empty = sum(not row["images"] for row in rows)
    return {"rows": rows, "empty": empty, "predictions": predictions}


def confusion(run: ReportedRun) -> dict[str, Any]:
    """Return the confusion matrix: a table with links, or an image where classes are many."""
    predictions = run.predictions
    size = len(predictions.classes)
    if size > plots.MAX_CLASSES:
        raise Missing(
            f"A confusion matrix is drawn of up to {plots.MAX_CLASSES:,} classes, and there are "
            f"{size:,}. This command writes it as a table.",
            run.command("eval", run.root, run.data, "--confusion", run.root / "confusion.csv"),
        )
    # images of class i predicted as class j, at [i, j]
    pairs = predictions.labels * size + predictions.predicted
    counts = np.bincount(pairs, minlength=size**2).reshape(size, size)
    names = [escape(name) for name in predictions.classes]
    shown = {"names": names, "predictions": predictions}
    from vitkit.plots.confusion import draw_confusion, row_shares

    if size > MOST_IN_A_TABLE:
        from vitkit.plots.figure import encode_png

        png = encode_png(draw_confusion(counts, predictions.classes, ""), dpi=SHEET_DPI)
        return {**shown, "rows": [], "image": data_address(png, "png")}
    return {**shown, "rows": counts.tolist(), "shares": row_shares(counts).tolist(), "image": ""}


def calibration(run: ReportedRun) -> PlainSection:
    """Return reliability diagrams: of validation without and with temperature, and of the test."""
    # imported here, as in each section that draws: matplotlib takes half a second
    from vitkit.plots.curves import draw_reliability

    panels: dict[str, Any] = {}
    temperature = run.temperature
    if run.held_out is not None:
        logits, labels = run.held_out
        for value in (1.0, temperature):
            confidence, predicted = (logits / value).softmax(1).max(1)
            title = f"validation, temperature {value:.3g}"
            panels[title] = confidence.numpy(), (predicted == labels).numpy()
    try:
        found = run.predictions
        title = f"{SPLITS[found.split]}, temperature {temperature:.3g}"
        panels.setdefault(title, (found.probability, found.right))
    except Missing:
        if not panels:
            raise
    figures = []
    for title, (confidence, right) in panels.items():
        words = (
            f"{title}: mean confidence {100 * np.mean(confidence):.1f} %, right "
            f"{100 * np.mean(right):.1f} % of {len(right):,} images"
        )
        figures.append((words, draw_reliability(confidence, right, title)))
    divided = "The weights have no temperature."
    if temperature != 1.0:
        divided = f"The stored temperature {temperature:.3f} divides the logits."
    text = (
        "The share of right predictions for each confidence. Calibrated probabilities lie on the "
        "dashed line; bars below it are too confident. The points are at the mean confidence of "
        f"their bar. {divided}"
    )
    return PlainSection(text, figures)


def learned(run: ReportedRun) -> dict[str, Any]:
    """Return the sheet of a model: filters, positions, and attention over depth."""
    command = run.command("explain", run.root, "--model", "--output", run.root / "model")
    if run.checkpoint is None:
        raise Missing(
            "The run has no weights that can be read; resume it, or draw the sheet of another "
            "checkpoint with vitkit explain CHECKPOINT --model."
        )
    # imported here: both need matplotlib or much of torch
    from vitkit.explaining.measure import ModelMeasurement
    from vitkit.plots.figure import encode_png

    measurement, preprocess = ModelMeasurement(run.checkpoint.model), run.checkpoint.preprocess
    images = _unseen_images(run)
    size = measurement.batch_size(preprocess.image_size)
    try:
        for begin in range(0, len(images), size):
            measurement.add(preprocess_images(images[begin : begin + size], preprocess))
        found = measurement.result(run.name)
        content = encode_png(found.plot(), dpi=SHEET_DPI)
    except errors.VitkitError as error:
        raise Missing(f"The sheet cannot be drawn: {error}.", command) from None
    image, lines = data_address(content, "png"), found.lines()
    return {"image": image, "measured": len(images), "lines": lines, "command": command}


def _unseen_images(run: ReportedRun) -> list[np.ndarray]:
    """Return some images that the run was not trained on; none where they cannot be read."""
    found: list[np.ndarray] = []
    splits = run.dataset.splits if run.dataset else {}
    split = splits.get("test") or splits.get("val")
    if split is None:
        return found
    # from all of the split, which is often in the order of its classes
    places = np.linspace(0, len(split) - 1, min(MEASURED, len(split))).round().astype(int)
    for place in places.tolist():
        with suppress(errors.ImageError, OSError):
            found.append(as_rgb(split.read(place)))
    return found


def check_findings(run: ReportedRun) -> dict[str, Any]:
    """Return the findings of the check of the data. Raises `Missing` without check.json."""
    path = run.folder.check
    command = run.command("check", run.data, *run.relabel_words, "--output", path)
    try:
        document = json.loads(path.read_bytes())
        checked = sum(sum(counts.values()) for counts in document["images"].values())
        findings = []
        for found in document["findings"]:
            names = [escape(" = ".join(map(str, images))) for images in found["images"]]
            # the report of training names only the first images
            more = max(0, len(names) - NAMED) + int(found.get("more", 0))
            message, severity = escape(str(found["message"])), str(found["severity"])
            one = {"severity": severity, "message": message, "images": names[:NAMED], "more": more}
            findings.append(one)
    except FileNotFoundError:
        raise Missing(
            "The folder has no report of a check of the data. This command writes one; make this "
            "report again afterwards.",
            command,
        ) from None
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError):
        raise Missing(f"{path.name} is not a report of vitkit check.", command) from None
    return {"findings": findings, "checked": checked}


def costs(run: ReportedRun) -> PlainSection:
    """Return time, speed, memory and size. Raises `Missing` where none of them is known."""
    rows = []
    with suppress(Missing):
        columns = run.curves.columns
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
        used = [line[key] for line in run.lines if key in line]
        if used:
            rows.append((f"{title}, the highest", f"{max(used):,.0f} MB"))
    if run.checkpoint is not None and run.checkpoint.path is not None:
        count = sum(weight.numel() for weight in run.checkpoint.model.parameters())
        size = run.checkpoint.path.stat().st_size
        rows.append(("model", f"{count:,} parameters, {size / 1e6:,.1f} MB"))
    if not rows:
        raise Missing("The run has neither metrics nor weights, so its costs are not known.")
    return PlainSection(rows=rows)


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


def environment(run: ReportedRun) -> PlainSection:
    """Return the versions, the machine's settings and the data of the run."""
    versions, data = run.metadata.get("versions"), run.metadata.get("data")
    rows = []
    if isinstance(versions, dict):
        rows += [(f"{name} (training)", str(value)) for name, value in versions.items()]
    # of `auto` the one that was chosen, if the log still has it
    named = [match[1] for line in run.log if (match := DEVICE.match(line))]
    device = (named or [str(run.settings.get("device", ""))])[-1]
    if device:
        rows.append(("device", device.replace("auto", "the fastest one available")))
    for name, title in PLACES.items():
        value = run.settings.get(name)
        rows.append((title, "" if value is None else str(value)))
    if isinstance(data, dict):
        counts = ", ".join(f"{count:,} {name}" for name, count in run.image_counts.items())
        rows.append(("images", counts))
        rows.append(("fingerprint of the data", str(data.get("fingerprint", ""))))
    times = [line.partition(" ")[0] for line in run.log]
    if times:
        rows.append(("log from", f"{times[0]} to {times[-1]}".replace("T", " ")))
    here = f"vitkit {version('vitkit')}, Python {platform.python_version()}, {platform.platform()}"
    shown = [(escape(name), escape(value)) for name, value in rows if value]
    return PlainSection(rows=[*shown, ("this report", here)])


Collect = Callable[[ReportedRun], PlainSection | dict[str, Any]]
SECTIONS: dict[str, tuple[str, Collect]] = {
    "headline": ("Result", best_score),
    "repetition": ("Repeat this run", repetition),
    "curves": ("Learning curves", curves),
    "classes": ("Classes", classes),
    "confusion": ("Confusion matrix", confusion),
    "mistakes": ("Most confident mistakes", mistakes),
    "suspects": ("Suspected wrong labels", suspects),
    "calibration": ("Calibration", calibration),
    "learned": ("What the model has learned", learned),
    "check": ("Check of the data", check_findings),
    "costs": ("Time and memory", costs),
    "environment": ("Environment", environment),
}
"""The sections in the order of the page: name -> heading, and function. The name is that of the
section's place in the page, and of its template in `templates/sections/` if it has one."""
