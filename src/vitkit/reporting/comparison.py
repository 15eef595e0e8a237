"""The page that compares runs."""

from __future__ import annotations

import string
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from vitkit.errors import DataError, OutputError
from vitkit.evaluation.comparison import Comparison
from vitkit.evaluation.result import Evaluation
from vitkit.io.atomic import write_bytes
from vitkit.io.results import ResultKind, check_outputs, nonempty_path
from vitkit.messages import escape
from vitkit.plots.html import render_page
from vitkit.reporting.sections import SCORES, Score, format_score
from vitkit.training.monitoring.figures import LearningCurves
from vitkit.weights.inspection import inspect

GENERATOR = "vitkit compare"
MARK = f'<meta name="generator" content="{GENERATOR}">'.encode()
"""Text of the first lines of a comparison."""
MOST_CURVES = 7
"""Runs that have curves: as many as there are colours that everybody can tell apart."""
NOT_LISTED = (
    "output",
    "resume",
    "overwrite",
    "quiet",
    "plots",
    "report",
    "recipe",
    "start",
    "spec",
)
"""Settings of the folder or the call only, or listed field by field."""


def _is_comparison(path: Path) -> bool:
    with path.open("rb") as file:
        return MARK in file.read(1024)


COMPARISON_FILE = ResultKind("a comparison", ".html", _is_comparison)


def check_comparison_output(
    report: str | Path, checkpoints: Sequence[str | Path], *, overwrite: bool = False
) -> Path:
    """Return the path of the page, once it is known that it may be written.

    Args:
        report: the .html file; an earlier comparison is replaced.
        checkpoints: the runs and checkpoints, none of whose files is replaced.
        overwrite: also replace any other file.

    Raises:
        OutputError: another ending, a file that is no earlier comparison, or a path that cannot be
            written.
    """
    path = nonempty_path(report, "--report")
    inputs = _inputs(checkpoints)
    check_outputs([path], COMPARISON_FILE, inputs=inputs, overwrite=overwrite, flag="--report")
    return path


def _inputs(checkpoints: Sequence[str | Path]) -> list[Path]:
    """Return the files that the page may not replace, even with `overwrite`."""
    inputs = [*map(Path, checkpoints)]
    for folder in map(Path, checkpoints):
        if folder.is_dir():
            # no file of a run ends in .html but its report, which is no comparison
            inputs += [entry for entry in folder.rglob("*") if entry.suffix.lower() != ".html"]
    return inputs


def write_comparison(comparison: Comparison, path: Path) -> None:
    """Write a comparison as one HTML file, which any browser shows without a network.

    Args:
        comparison: comparison of run folders or checkpoints, by their paths.
        path: the file to write.

    Raises:
        OutputError: the file cannot be written.
    """
    # imported here: the page needs jinja2
    from vitkit.reporting.report import report_templates

    names = [*comparison.scores]
    letters = _letters(len(names))
    settings = [_settings(name) for name in names]
    page = render_page(
        report_templates(),
        "compare.html",
        generator=GENERATOR,
        runs=[(letter, escape(name)) for letter, name in zip(letters, names, strict=True)],
        letters=letters,
        verdicts=[escape(pair.verdict) for pair in comparison.pairs],
        repeats=comparison.repeats,
        scores=_score_rows([*comparison.scores.values()]),
        settings=_different(settings),
        known=[bool(one) for one in settings],
        most_curves=MOST_CURVES,
        classes=_class_rows([*comparison.scores.values()]),
        **_curves(names, letters),
    )
    write_bytes(path, page.encode("utf-8", "replace"))


def _letters(count: int) -> list[str]:
    """Return short names: A, B, C, then numbers."""
    return [
        string.ascii_uppercase[number] if number < 26 else str(number + 1)
        for number in range(count)
    ]


def _settings(name: str) -> dict[str, Any]:
    """Return the settings that a checkpoint stores, with one entry per field of the model."""
    stored = inspect(name)
    recipe = stored.metadata.get("recipe")
    settings = recipe if isinstance(recipe, Mapping) else {}
    # all fields of the model, instead of those that the recipe set
    spec = {f"spec.{field}": value for field, value in stored.spec.to_json().items()}
    return {key: value for key, value in (spec | {**settings}).items() if key not in NOT_LISTED}


def _different(settings: Sequence[Mapping[str, Any]]) -> list[tuple[str, list[str]]]:
    """Return the settings in which the runs differ, with the value of each run."""
    rows = []
    for key in dict.fromkeys(key for one in settings for key in one):
        values = [escape(str(one.get(key, ""))) for one in settings]
        if len(set(values)) > 1:
            rows.append((escape(key), values))
    return rows


def _score_rows(evaluations: Sequence[Evaluation]) -> list[tuple[str, list[Score]]]:
    rows = []
    for name, title in SCORES.items():
        cells = [format_score(one, name) for one in evaluations]
        if any(cell.value for cell in cells):
            rows.append((title, cells))
    return [*rows, ("images", [Score(f"{one['images']:,.0f}") for one in evaluations])]


def _class_rows(evaluations: Sequence[Evaluation]) -> list[dict[str, Any]]:
    """Return a row for each class: its images, and the accuracy of each run with its interval."""
    by_run = [{score.name: score for score in one.per_class} for one in evaluations]
    rows = []
    for name in evaluations[0].classes:
        cells = [scores.get(name) for scores in by_run]
        first = cells[0]
        differences = [
            None if cell is None or first is None else cell.accuracy - first.accuracy
            for cell in cells[1:]
        ]
        images = first.images if first is not None else 0
        rows.append(
            {"name": escape(name), "images": images, "cells": cells, "differences": differences}
        )
    return rows


def _curves(names: Sequence[str], letters: Sequence[str]) -> dict[str, Any]:
    """Return the curves of the runs as SVG, and the letters of those that have none."""
    # imported here: matplotlib takes half a second
    from vitkit.plots.curves import RunCurves, draw_compared_curves
    from vitkit.reporting.figures import inline_svg

    found, without = [], []
    for name, letter in zip(names, letters, strict=True):
        try:
            columns = LearningCurves.read(name).columns
        except (DataError, OutputError):  # a checkpoint without a run, or a probe
            without.append(letter)
            continue
        found.append(
            RunCurves(
                letter,
                columns["epoch"],
                columns["train_loss"],
                columns.get("val_loss"),
                columns.get("val_top1"),
            )
        )
    svg = inline_svg(draw_compared_curves(found[:MOST_CURVES]), "curves") if found else ""
    return {"svg": svg, "without": without + [run.name for run in found[MOST_CURVES:]]}
