"""Write the report of a run: `vitkit report RUN`, and the page after each training."""

from __future__ import annotations

import os
from base64 import b64encode
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from os import PathLike
from pathlib import Path
from typing import Any

import numpy as np
from jinja2 import Environment
from markupsafe import Markup

from vitkit.data.images.decode import as_rgb
from vitkit.data.images.preprocess import preprocess_images
from vitkit.errors import ImageError, Interrupted, VitkitError, check_type
from vitkit.io.atomic import write_bytes
from vitkit.io.results import ResultKind, check_outputs, nonempty_path
from vitkit.plots.html import page_templates, render_page
from vitkit.process import raise_on_signal
from vitkit.reporting.predictions import Missing
from vitkit.reporting.run import ReportedRun
from vitkit.reporting.sections import (
    SPLITS,
    augmented,
    best_score,
    calibration,
    check_findings,
    classes,
    confusion,
    costs,
    curves,
    environment,
    mistakes,
    repetition,
)
from vitkit.reporting.suspects import suspects
from vitkit.training.config.train_config import TrainConfig
from vitkit.training.monitoring.run_log import Display
from vitkit.training.run import TrainResult
from vitkit.training.run_folder import RunFolder

MARK = b'<meta name="generator" content="vitkit report">'
"""Text of the first lines of a report."""


def _is_report(path: Path) -> bool:
    with path.open("rb") as file:
        return MARK in file.read(1024)


REPORT_FILE = ResultKind("a report", ".html", _is_report)


def report(
    run: str | Path,
    *,
    output: str | Path | None = None,
    overwrite: bool = False,
    suspects: str | None = None,
    device: str = "auto",
) -> Path:
    """Write the report of a run: one HTML file that shows it in any browser, without a network.

    It is made of the files in the run folder; thumbnails of mistakes are read from the data, where
    these are still as they were. A section that lacks something names the command that makes it.

    Args:
        run: a run folder.
        output: the file to write; default `report.html` in the run folder.
        overwrite: also replace a file that is no report of vitkit.
        suspects: the split, such as `train`, whose images are searched for wrong labels: by
            classifiers on the features of the best weights that never saw the label. The list,
            `suspects.csv` in the run folder, is shown by later reports, too.
        device: for that search: `cpu`, `cuda`, `mps`; auto picks the fastest available.

    Returns:
        The path of the file.

    Raises:
        SettingError, DataError, DeviceError: a split that cannot be searched.
        OutputError: no such run, or an output that exists and is no report, or cannot be written;
            or a `suspects.csv` that is no earlier list.
    """
    # imported here: the report needs torch, matplotlib and jinja2
    from vitkit.reporting.run import ReportedRun

    expected = "the path of a run folder, such as result.run"
    check_type(run, (str, PathLike), "report", expected)
    found = ReportedRun(run)
    path = found.folder.report if output is None else nonempty_path(output, "--output")
    # files of a run are never replaced; only its report ends in .html
    inputs = [entry for entry in found.root.rglob("*") if entry.suffix.lower() != ".html"]
    check_outputs([path], REPORT_FILE, inputs=inputs, overwrite=overwrite, flag="--output")
    if suspects is not None:
        from vitkit.reporting.suspects import SUSPECTS_FILE, write_suspects

        check_outputs(
            [found.folder.suspects],
            SUSPECTS_FILE,
            inputs=(),
            overwrite=overwrite,
            flag="--suspects",
        )
        write_suspects(found, suspects, device)
    write_bytes(path, page(found).encode("utf-8", "replace"))
    return path


# Training with a report at its end: for `vitkit train` and `vitkit.train`.


def train_and_report(config: TrainConfig) -> tuple[TrainResult, Path | None]:
    """Train, or search with `auto`, and write the report of the run where the setting is on.

    Args:
        config: every setting.

    Returns:
        The result, and the path of the report; None without one.

    Raises:
        VitkitError: as `train` and `run_search`. A report that cannot be written is a line in the
            log.
    """
    # imported here: a search is rare, and imports much more
    if config.auto:
        from vitkit.training.auto import run_search

        result = run_search(config)
    else:
        from vitkit.training.train import train

        result = train(config)
    return result, _report(result, config)


def _report(result: TrainResult, config: TrainConfig) -> Path | None:
    """Write the report at the end of training; if that fails, log a line.

    Args:
        result: result of the run; after `--auto` the winner's run has the report.
        config: the settings; `report` and `quiet` are used.

    Returns:
        The path of the report; None without one.
    """
    folder = RunFolder(result.run)
    if not folder.config.exists():
        folder = RunFolder(result.last.parents[1])
    # one of several processes writes it; a probe by nearest neighbours leaves no weights
    is_first = os.environ.get("RANK", "0") == "0"
    if not config.report or not folder.config.exists() or not is_first:
        return None
    try:
        with raise_on_signal(folder.resume_hint):
            return report(folder.root)
    except Interrupted:
        raise
    except Exception as error:  # noqa: BLE001 - a report must never fail a run
        reason = f"{type(error).__name__}: {error}".splitlines()[0]
        _log(
            folder,
            f"warning: {folder.report.name} is not written: {reason}; the results are complete "
            "without it",
            quiet=config.quiet,
        )
    return None


def _log(folder: RunFolder, line: str, *, quiet: bool) -> None:
    """Print a line, and add it to the log of a run that has ended."""
    Display(total=0, done=0, quiet=quiet).print(line)
    # a full disk must not fail a run whose results are written
    with suppress(OSError), folder.log.open("a", encoding="utf-8") as file:
        file.write(f"{datetime.now().isoformat(timespec='seconds')} {line}\n")


# The section on what the model has learned: the sheet of `vitkit explain --model`.

MEASURED = 16
"""Images on which attention over depth is measured."""
SHEET_DPI = 110
"""Dots an inch of the sheet."""


def _what_was_learned(run: ReportedRun) -> dict[str, Any]:
    """Return the sheet of a model: filters, positions, and attention over depth."""
    command = run.command("explain", run.root, "--model", "--output", run.root / "model")
    if run.checkpoint is None:
        raise Missing(
            "The run has no weights that can be read; resume it, or draw the sheet of another "
            "checkpoint with vitkit explain CHECKPOINT --model."
        )
    # imported here: both need matplotlib or much of torch
    from vitkit.explaining.model import ModelMeasurement
    from vitkit.plots.figure import encode_png

    measurement = ModelMeasurement(run.checkpoint.model)
    images = _images(run)
    size = measurement.batch_size(run.checkpoint.preprocess.image_size)
    try:
        for begin in range(0, len(images), size):
            batch = images[begin : begin + size]
            measurement.add(preprocess_images(batch, run.checkpoint.preprocess))
        found = measurement.result(run.name)
        content = encode_png(found.plot(), software="vitkit report", dpi=SHEET_DPI)
    except VitkitError as error:
        raise Missing(f"The sheet cannot be drawn: {error}.", command) from None
    return {
        "image": f"data:image/png;base64,{b64encode(content).decode('ascii')}",
        "measured": len(images),
        "lines": found.lines(),
        "command": command,
    }


def _images(run: ReportedRun) -> list[np.ndarray]:
    """Return some images that the run was not trained on; none where they cannot be read."""
    dataset = run.images.dataset
    names = [name for name in SPLITS if dataset is not None and name in dataset.splits]
    split = run.images.split(names[0]) if names else None
    if split is None:
        return []
    # from all of the split, which is often in the order of its classes
    places = np.linspace(0, len(split) - 1, min(MEASURED, len(split))).round().astype(int)
    found = []
    for place in places.tolist():
        try:
            found.append(as_rgb(split.read(place)))
        except (ImageError, OSError):
            continue
    return found


# The sections of a report, in their order; a new one is a function, a template and a line here.


@dataclass(frozen=True)
class Section:
    """A part of the page.

    Attributes:
        name: its place in the page, and its template: `templates/sections/NAME.html`.
        title: its heading.
        collect: returns what the template shows; raises `Missing` where the folder lacks it.
    """

    name: str
    title: str
    collect: Callable[[ReportedRun], dict[str, Any]]


SECTIONS = (
    Section("headline", "Result", best_score),
    Section("repetition", "Repeat this run", repetition),
    Section("curves", "Learning curves", curves),
    Section("classes", "Classes", classes),
    Section("confusion", "Confusion matrix", confusion),
    Section("mistakes", "Most confident mistakes", mistakes),
    Section("suspects", "Suspected wrong labels", suspects),
    Section("calibration", "Calibration", calibration),
    Section("learned", "What the model has learned", _what_was_learned),
    Section("check", "Check of the data", check_findings),
    Section("augmented", "Augmented images", augmented),
    Section("costs", "Time and memory", costs),
    Section("environment", "Environment", environment),
)


# The page of a report: every section as HTML.

GENERATOR = "vitkit report"
"""Text of the page that names the command which wrote it."""


@dataclass(frozen=True)
class FilledSection:
    """A section with its content, or the reason why it is missing.

    Attributes:
        section: its name and title.
        content: HTML; empty where something is missing.
        missing: why there is no content, and the command that changes that.
    """

    section: Section
    content: Markup
    missing: Missing | None = None


def page(run: ReportedRun) -> str:
    """Return the report of a run: HTML that loads nothing, with all names escaped."""
    templates = report_templates()
    sections = [_fill(templates, section, run) for section in SECTIONS]
    return render_page(templates, "report.html", generator=GENERATOR, run=run, sections=sections)


def report_templates() -> Environment:
    """Return the templates of reports and comparisons."""
    templates = page_templates("vitkit.reporting")
    templates.filters |= {"percent": _percent, "svg": Markup}
    return templates


def _fill(templates: Environment, section: Section, run: ReportedRun) -> FilledSection:
    try:
        values = section.collect(run)
    except Missing as missing:
        return FilledSection(section, Markup(), missing)
    template = templates.get_template(f"sections/{section.name}.html")
    return FilledSection(section, Markup(template.render(values)))


def _percent(share: Any) -> str:
    """Format a share in [0, 1], with a space where no line ends."""
    return f"{100 * share:.1f}\N{NO-BREAK SPACE}%"
