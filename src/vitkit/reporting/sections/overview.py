"""Sections about the run as a whole: its score, how to repeat it, its environment, its costs."""

from __future__ import annotations

import os
import platform
import re
import shlex
from importlib.metadata import version
from typing import Any, NamedTuple

import numpy as np

from vitkit.evaluation.intervals import wilson_interval
from vitkit.evaluation.metrics import Metrics
from vitkit.io.import_path import MEMORY_PREFIX
from vitkit.messages import escape
from vitkit.reporting.missing import Missing
from vitkit.reporting.reported_run import ReportedRun
from vitkit.training.config.merging import with_flat_spec
from vitkit.training.config.run_config import USUAL
from vitkit.training.config.train_config import TrainConfig

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
