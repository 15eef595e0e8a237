"""`report`: a run as one HTML file, `report.html`."""

from __future__ import annotations

from os import PathLike
from pathlib import Path

from vitkit.errors import check_type
from vitkit.io.atomic import write_bytes
from vitkit.io.results import ResultKind, check_outputs, nonempty_path

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
    from vitkit.reporting.html import page
    from vitkit.reporting.reported_run import ReportedRun

    expected = "the path of a run folder, such as result.run"
    check_type(run, (str, PathLike), "report", expected)
    found = ReportedRun(run)
    path = found.folder.report if output is None else nonempty_path(output, "--output")
    # files of a run are never replaced; only its report ends in .html
    inputs = [entry for entry in found.root.rglob("*") if entry.suffix.lower() != ".html"]
    check_outputs([path], REPORT_FILE, inputs=inputs, overwrite=overwrite, flag="--output")
    if suspects is not None:
        from vitkit.reporting.sections.suspects import SUSPECTS_FILE, write_suspects

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
