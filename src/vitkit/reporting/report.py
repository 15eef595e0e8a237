"""Write the report of a run: `vitkit report RUN`, and the page after each training."""

import os
from contextlib import suppress
from datetime import datetime
from os import PathLike
from pathlib import Path

from markupsafe import Markup

from vitkit import errors, process
from vitkit.io import atomic, results
from vitkit.plots.html import page_templates, render_page
from vitkit.reporting.mistakes import holds_suspects, write_suspects
from vitkit.reporting.run import Missing, ReportedRun
from vitkit.reporting.sections import SECTIONS, PlainSection
from vitkit.training.monitoring.run_log import Display
from vitkit.training.run import TrainResult
from vitkit.training.run_folder import RunFolder


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
        overwrite: let `output` replace a file.
        suspects: the split, such as `train`, whose images are searched for wrong labels: by
            classifiers on the features of the best weights that never saw the label. The list,
            `suspects.csv` in the run folder, is shown by later reports, too.
        device: for that search: `cpu`, `cuda`, `mps`; auto picks the fastest available.

    Returns:
        The path of the file.

    Raises:
        SettingError, DataError, DeviceError: a split that cannot be searched.
        OutputError: no such run, or an output that exists or cannot be written.
    """
    errors.check_type(
        run, (str, PathLike), "report", "the path of a run folder, such as result.run"
    )
    found = ReportedRun(run)
    path = found.folder.report if output is None else Path(output)
    own = path.absolute() == found.folder.report.absolute()  # a run may replace its own report
    results.check_outputs([path], (".html",), overwrite=overwrite or own, flag="--output")
    if suspects is not None:
        own = holds_suspects(found)  # an earlier list of vitkit
        table = found.folder.suspects
        results.check_outputs([table], overwrite=overwrite or own, flag="--suspects")
        write_suspects(found, suspects, device)
    atomic.write_bytes(path, page(found).encode("utf-8", "replace"))
    return path


def report_after_training(result: TrainResult, *, quiet: bool) -> Path | None:
    """Write the report of a run that has just ended; if that fails, log a line.

    Args:
        result: result of the run; after `--auto` the winner's run has the report.
        quiet: print nothing.

    Returns:
        The path of the report; None without one.
    """
    folder = RunFolder(result.run)
    if not folder.config.exists():
        folder = RunFolder(result.last.parents[1])
    # one of several processes writes it; a probe by nearest neighbours leaves no weights
    is_first = os.environ.get("RANK", "0") == "0"
    if not folder.config.exists() or not is_first:
        return None
    try:
        with process.raise_on_signal(folder.resume_hint):
            return report(folder.root)
    except errors.Interrupted:
        raise
    except Exception as error:  # noqa: BLE001 - a report must never fail a run
        reason = f"{type(error).__name__}: {error}".splitlines()[0]
        _log(
            folder,
            f"warning: {folder.report.name} is not written: {reason}; the results are complete "
            "without it",
            quiet=quiet,
        )
    return None


def _log(folder: RunFolder, line: str, *, quiet: bool) -> None:
    """Print a line, and add it to the log of a run that has ended."""
    Display(total=0, done=0, quiet=quiet).print(line)
    # a full disk must not fail a run whose results are written
    with suppress(OSError), folder.log.open("a", encoding="utf-8") as file:
        file.write(f"{datetime.now().isoformat(timespec='seconds')} {line}\n")


# The page of a report: every section as HTML.

GENERATOR = "vitkit report"
"""Text of the page that names the command which wrote it."""


def page(run: ReportedRun) -> str:
    """Return the report of a run: HTML that loads nothing, with all names escaped."""
    templates, sections = page_templates("vitkit.reporting"), []
    for name, (title, collect) in SECTIONS.items():
        missing, content = None, Markup()
        try:
            values, template = collect(run), f"sections/{name}.html"
            if isinstance(values, PlainSection):
                values, template = {"name": name, **vars(values)}, "sections/plain.html"
            content = Markup(templates.get_template(template).render(values))
        except Missing as error:
            missing = error
        sections.append({"name": name, "title": title, "content": content, "missing": missing})
    return render_page(templates, "report.html", generator=GENERATOR, run=run, sections=sections)
