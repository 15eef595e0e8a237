"""`vitkit check DATA`."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import tyro
from tyro.conf import Positional

from vitkit.cli.arguments import as_flags
from vitkit.data.checks.check import Report, check
from vitkit.data.sources.open import open_dataset
from vitkit.errors import DataError
from vitkit.io.atomic import refuse_unwritable, write_bytes
from vitkit.io.progress import bar

SHOWN = 10
"""Images of a finding that the table names."""


def check_data(
    data: Positional[str],
    *,
    json: bool = False,
    output: Path | None = None,
    strict: bool = False,
    data_root: str | None = None,
    ignore_extra_classes: bool = False,
    follow_links: bool = False,
    workers: int = 0,
) -> None:
    """Look at every image before you train on it.

    Errors (exit code 2): images that cannot be decoded; training refuses them. Warnings: images
    in two splits, exactly or nearly, or under two classes; classes without images, or with one;
    blank images. Notes: repeated images, rare classes, odd sizes and modes. Unchanged files
    are not decoded again.

    Two images are nearly the same if their grey thumbnails of 16 x 16 correlate by 0.997 or more.
    This finds copies that were saved again, scaled or mirrored, most with a changed contrast or
    gamma, few that were cropped or have a visible watermark.

    Args:
        data: a folder of images, a list of them, or a named data set, as for train.
        json: print JSON.
        output: also write the JSON to this file.
        strict: exit with 2 at warnings too.
        data_root: where to look for named data sets; for a CSV the folder its paths begin at.
        ignore_extra_classes: leave out classes of val and test that train lacks.
        follow_links: follow symbolic links that lead out of the folder.
        workers: threads; 0 means one for each core.
    """
    if output is not None:
        refuse_unwritable(output)
    dataset = open_dataset(
        data,
        data_root=data_root,
        ignore_extra_classes=ignore_extra_classes,
        follow_links=follow_links,
    )
    with bar(sum(map(len, dataset.splits.values()))) as advance:
        report = check(dataset, workers=workers, advance=advance)
    text = _json(report)
    if json:
        sys.stdout.write(text)
    else:
        _print(report)
    if output is not None:
        write_bytes(output, text.encode())
    warned = [f for f in report.findings if f.severity == "warning"]
    if report.refused:
        bad = sum(map(len, report.problems.values()))
        raise DataError(
            f"{report.name}: {bad:,} of {report.total:,} images cannot be decoded; remove them, "
            f"or train with --bad-images skip"
        )
    if strict and warned:
        raise DataError(f"{report.name}: {len(warned)} warnings, and --strict was given")


def run(arguments: list[str]) -> None:
    """Parse and check."""
    with as_flags("workers"):
        tyro.cli(check_data, args=arguments, prog="vitkit check")


def _json(report: Report) -> str:
    return json.dumps(report.as_dict(), indent=1) + "\n"


def _print(report: Report) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    # A name must stand on one line and whole, however wide the terminal is.
    console = Console(file=sys.stdout, soft_wrap=True, highlight=False, markup=False)
    table = Table(title=Text(report.name), title_justify="left")
    for column in ("split", "images", "unreadable", "classes", "smallest class"):
        table.add_column(column, justify="left" if column == "split" else "right")
    for split, counts in report.images.items():
        present = [count for count in counts.values() if count]
        bad = len(report.problems.get(split, ()))
        smallest = f"{min(present):,}" if present else "-"
        table.add_row(split, f"{sum(counts.values()):,}", f"{bad:,}", f"{len(present):,}", smallest)
    console.print(table)
    for finding in report.findings:
        style = {"error": "bold red", "warning": "yellow", "note": "dim"}[finding.severity]
        console.print(Text(f"{finding.severity:<8}", style=style) + Text(finding.message))
        lines = [" = ".join(names) for names in finding.images]
        if finding.kind == "unreadable":
            problems = report.problems[finding.split]
            lines = [f"{each.name}: {each.reason}: {each.detail}" for each in problems]
        for line in lines[:SHOWN]:
            console.print(f"        {line}")
        if len(lines) > SHOWN:
            console.print("        and more; --output FILE lists them")
    for note in report.notes:
        console.print(Text(f"{'note':<8}", style="dim") + Text(note))
    known = f", {report.recalled:,} of them unchanged since the last check"
    found = "nothing found; " if not report.findings else ""
    console.print(f"{found}{report.total:,} images looked at{known if report.recalled else ''}")
