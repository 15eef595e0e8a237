"""`vitkit report RUN`."""

from __future__ import annotations

import csv
from pathlib import Path

import tyro
from tyro.conf import Positional

from vitkit.cli.output import print_results
from vitkit.cli.parsing import as_flags

EXAMPLES = (
    "vitkit report runs/photos-vit-1  # writes runs/photos-vit-1/report.html",
    "vitkit report runs/photos-vit-1 --suspects  # also search the train images for wrong labels",
    "vitkit report runs/photos-vit-1 --output photos.html  # a page to send to others",
    "vitkit report runs/photos-vit-1 --output photos.html --overwrite  # whatever photos.html is",
)


def report_command(
    run: Positional[Path],
    *,
    output: Path | None = None,
    overwrite: bool = False,
    suspects: str | None = None,
    device: str = "auto",
) -> None:
    """Write a page about a run: scores, curves, classes, mistakes, calibration, time and memory.

    The page is one HTML file that any browser shows without a network. vitkit train writes it at
    the end of a run; this command writes it again, also while the run is still training.

    Args:
        run: a run folder.
        output: the .html file to write; default report.html in the run folder.
        overwrite: let --output replace any file that is not in the run folder; default: only an
            earlier report.
        suspects: search train (or val, or test) for wrong labels, without using the label of an
            image to judge it; the list, suspects.csv, stays in the run folder.
        device: for that search: cpu, cuda, mps or auto.
    """
    # imported here: --help does not wait for torch
    from vitkit.reporting.report import report

    path = report(run, output=output, overwrite=overwrite, suspects=suspects, device=device)
    found = []
    if suspects is not None:
        table = run / "suspects.csv"
        with table.open(encoding="utf-8", newline="") as file:
            count = sum(1 for _ in csv.reader(file)) - 1
        found = [f"suspected wrong labels: {count:,}, in {table}"]
    print_results(*found, f"report: {path}, {path.stat().st_size / 1e6:.1f} MB")


def run(arguments: list[str]) -> None:
    """Parse the arguments and write the report."""
    with as_flags("run", "suspects", "device"):
        tyro.cli(report_command, args=arguments, prog="vitkit report")
