"""`vitkit check DATA`."""

from __future__ import annotations

import json as json_text
import sys
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING

from vitkit.cli.images import files_of_data
from vitkit.cli.output import flags, print_results
from vitkit.errors import DataError
from vitkit.io import atomic, results
from vitkit.messages import fold, format_table, plural, progress_bar, terminal_width

if TYPE_CHECKING:
    from vitkit.data.checks.check import Report
    from vitkit.data.checks.findings import Finding

LINES_SHOWN = 10
"""Images of a finding that are printed."""
EXAMPLES = (
    "vitkit check photos  # a folder with one folder of images per class",
    "vitkit check photos.csv --strict --output report.json  # exit code 2 at warnings, too",
    "vitkit check 'wds:shards-{0000..0099}.tar' --json  # tar shards, for a program",
)


def check_command(
    data: str,
    *,
    json: bool = False,
    output: Path | None = None,
    overwrite: bool = False,
    strict: bool = False,
    data_root: str | None = None,
    ignore_extra_classes: bool = False,
    follow_links: bool = False,
    relabel: Path | None = None,
    workers: int = 0,
) -> None:
    """Check every image before you train on it.

    Errors (exit code 2): images that cannot be decoded; training refuses them. Warnings: images
    in two splits, exactly or nearly, or under two classes; classes without images; blank
    images. Notes: repeated images, rare classes, odd sizes. Unchanged files
    are not decoded again.

    Two images are nearly the same if their grey thumbnails of 16 x 16 correlate by 0.997 or more.
    This finds copies that were saved again, scaled or mirrored, most copies with changed contrast
    or gamma, and few that were cropped or have a visible watermark.

    Args:
        data: an image folder, a CSV or Parquet file, tar shards or a named dataset, as for train.
        json: print the report as JSON.
        output: also write the report to this .json file.
        overwrite: let --output replace an existing file that is not an input.
        strict: exit with code 2 at warnings, too.
        data_root: folder of named datasets; for a CSV, the folder its paths are relative to.
        ignore_extra_classes: leave out classes of val and test that train lacks.
        follow_links: follow symbolic links that lead out of the folder.
        relabel: a CSV file of corrected labels (path,old_class,new_class), as for train; the data
            are checked with them, and stay as they are.
        workers: number of threads; 0 means one per core.
    """
    from vitkit.data.checks.check import check_dataset, open_corrected

    if output is not None:
        inputs = chain(filter(None, [relabel]), files_of_data(data, output, data_root=data_root))
        results.check_outputs(
            [output], (".json",), inputs=inputs, overwrite=overwrite, flag="--output"
        )
    choice = {"ignore_extra_classes": ignore_extra_classes, "follow_links": follow_links}
    dataset = open_corrected(data, relabel, data_root=data_root, **choice)
    with progress_bar(sum(map(len, dataset.splits.values()))) as advance:
        report = check_dataset(dataset, workers=workers, advance=advance)
    _deliver(report, output, as_json=json)
    _refuse(report, strict=strict)
    if not json:  # with --json, stdout has the report only
        given = flags(data_root=data_root, relabel=relabel, **choice)
        print_results(then=[("train", data, *given)])


def _deliver(report: Report, output: Path | None, *, as_json: bool) -> None:
    """Print the report, and write it to a file if one is named."""
    text = json_text.dumps(report.as_dict(), indent=1) + "\n"
    if as_json:
        sys.stdout.write(text)
    else:
        _print(report)
    if output is not None:
        atomic.write_bytes(output, text.encode())
        if not as_json:
            print_results(f"report: {output}")


def _refuse(report: Report, *, strict: bool) -> None:
    """Raise for images that cannot be decoded, as training does; `strict`: for warnings, too."""
    if report.refused:
        bad = sum(map(len, report.problems.values()))
        raise DataError(
            f"{report.name}: {bad:,} of {report.total:,} images cannot be decoded; remove them, "
            f"or train with --bad-images skip"
        )
    warnings = report.warnings()
    if strict and warnings:
        raise DataError(
            f"{report.name}: {plural(len(warnings), 'warning')}; correct the data, or leave out "
            "--strict"
        )


def _print(report: Report) -> None:
    # Names are never cut; on a terminal, lines are broken between words.
    width = terminal_width()
    lines = [report.name, format_table(_table(report), width).rstrip("\n")]
    for finding in report.findings:
        lines.append(fold(f"{finding.severity:<8}{finding.message}", width))
        images = _lines(report, finding)
        lines += [fold(f"        {line}", width) for line in images[:LINES_SHOWN]]
        # the terminal shows a sample; the JSON has every image
        if len(images) > LINES_SHOWN:
            lines.append(f"        and {len(images) - LINES_SHOWN:,} more; --output FILE lists all")
    lines += [fold(f"{'note':<8}{note}", width) for note in report.notes]
    summary = f"{report.total:,} images checked"
    if not report.findings:
        summary = f"no problems found; {summary}"
    if report.recalled:
        summary += f", {report.recalled:,} of them unchanged since the last check"
    sys.stdout.writelines(f"{line}\n" for line in [*lines, fold(summary, width)])


def _table(report: Report) -> list[tuple[str, ...]]:
    """Count images and classes of each split."""
    rows: list[tuple[str, ...]] = [("split", "images", "unreadable", "classes", "smallest class")]
    for split, counts in report.images.items():
        present = [count for count in counts.values() if count]
        unreadable = len(report.problems.get(split, ()))
        smallest = f"{min(present):,}" if present else "-"
        total = f"{sum(counts.values()):,}"
        rows.append((split, total, f"{unreadable:,}", f"{len(present):,}", smallest))
    return rows


def _lines(report: Report, finding: Finding) -> list[str]:
    """List the images of a finding; unreadable ones with the reason."""
    if finding.kind != "unreadable":
        return [" = ".join(names) for names in finding.images]
    lines = []
    for problem in report.problems[finding.split]:
        lines.append(f"{problem.name}: {problem.reason}: {problem.detail}")
    return lines
