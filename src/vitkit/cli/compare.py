"""`vitkit compare RUN_OR_CHECKPOINT RUN_OR_CHECKPOINT ...`, and `vitkit report RUN`."""

from __future__ import annotations

import csv
import json as json_format
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from vitkit.cli.output import print_results, suggest
from vitkit.messages import escape, fold, format_table, terminal_width

if TYPE_CHECKING:
    from vitkit.evaluation.comparison import Comparison

SCORES = ("balanced_accuracy", "loss", "ece")
"""Scores of the table, beside top-1 with its interval."""

EXAMPLES = (
    "vitkit compare runs/a runs/b  # on the test images of the data of both",
    "vitkit compare runs/a runs/b runs/c --split val  # on the validation images",
    "vitkit compare runs/a runs/b --report  # also as a page, comparison.html",
    "vitkit compare timm.safetensors runs/b --data photos --json  # on other data, for a program",
    "vitkit report runs/photos-vit-1  # writes runs/photos-vit-1/report.html",
    "vitkit report runs/photos-vit-1 --suspects  # also search the train images for wrong labels",
    "vitkit report runs/photos-vit-1 --output photos.html  # a page to send to others",
)


def compare_command(
    checkpoint: str,
    other_checkpoint: tuple[str, ...],
    *,
    data: str | None = None,
    split: str | None = None,
    data_root: str | None = None,
    cache: str | None = None,
    device: str = "auto",
    batch_size: int = 256,
    workers: int = 0,
    relabel: Path | None = None,
    report: Path | None = None,
    overwrite: bool = False,
    json: bool = False,
) -> None:
    """Test if one model is better than another on the same images, by McNemar's exact test.

    Args:
        checkpoint: a run folder (its best weights) or a checkpoint.
        other_checkpoint: one or more others; the first one is compared with each of them.
        data: as for train; default the data that all were trained on.
        split: train, val or test; default test, or val if there is no test.
        data_root: the folder of named datasets.
        cache: folder for decoded images, as for train; `auto`: the user's cache folder.
        device: cpu, cuda, mps or auto.
        batch_size: images per batch.
        workers: number of loader processes.
        relabel: a CSV file of corrected labels, as for train.
        report: also write a page with the models side by side: scores, curves, settings that
            differ, classes. Without a name it is comparison.html.
        overwrite: let --report replace an existing file.
        json: print JSON.
    """
    # imported here: --help does not wait for torch
    from vitkit.api import compare

    comparison = compare(
        checkpoint,
        *other_checkpoint,
        data=data,
        split=split,
        data_root=data_root,
        cache=cache,
        device=device,
        batch_size=batch_size,
        workers=workers,
        relabel=relabel,
        report=report,
        overwrite=overwrite,
    )
    if json:
        sys.stdout.write(_json(comparison))
        return
    sys.stdout.write(_table(comparison))
    if report is not None:
        print_results(f"report: {report}")
    best = max(comparison.scores, key=lambda name: comparison.scores[name]["top1"])
    suggest(("summary", best))


def _json(comparison: Comparison) -> str:
    # `asdict` leaves properties out
    pairs = [asdict(pair) | {"verdict": pair.verdict} for pair in comparison.pairs]
    repeats = [asdict(group) for group in comparison.repeats]
    document = {"scores": comparison.scores, "pairs": pairs, "repeats": repeats}
    return json_format.dumps(document) + "\n"


def _table(comparison: Comparison) -> str:
    rows = [["checkpoint", "top1", "95 %", *SCORES, "images"]]
    for name, scores in comparison.scores.items():
        interval = f"{scores['top1_low']:.4f} to {scores['top1_high']:.4f}"
        row = [escape(name), f"{scores['top1']:.4f}", interval]
        row += [f"{scores[score]:.4f}" for score in SCORES]
        rows.append([*row, f"{scores['images']:,.0f}"])
    lines = []
    for group in comparison.repeats:
        lines.append(
            f"{len(group.names)} seeds of the same settings: top1 {group.mean:.4f}, standard "
            f"deviation {group.spread:.4f} ({group.low:.4f} to {group.high:.4f})"
        )
    # the verdicts come last, next to the prompt
    lines += [pair.verdict for pair in comparison.pairs]
    width = terminal_width()
    return format_table(rows, width) + "".join(fold(f"{escape(line)}\n", width) for line in lines)


def report_command(
    run: Path,
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
        overwrite: let --output replace an existing file.
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
