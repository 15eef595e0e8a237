"""The page that compares runs."""

import string
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from vitkit import errors, messages
from vitkit.evaluation.comparison import Comparison
from vitkit.evaluation.metrics import Metrics
from vitkit.evaluation.result import ClassScore, Evaluation
from vitkit.io.atomic import write_bytes
from vitkit.plots.html import page_templates, render_page
from vitkit.training.monitoring.figures import LearningCurves
from vitkit.weights.inspection import inspect

GENERATOR = "vitkit compare"
"""Text of the first lines of a comparison."""
MOST_CURVES = 7
"""Runs that have curves: as many as there are colours that everybody can tell apart."""
NOT_LISTED = (
    "output", "resume", "overwrite", "quiet", "plots", "report", "recipe", "start", "spec",
)  # fmt: skip
"""Settings of the folder or the call only, or listed field by field."""
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
"""Scores of a page, and what they are called there."""


class Score(NamedTuple):
    """A score as text with its interval; both are empty where it is missing."""

    value: str = ""
    interval: str = ""


def score_rows(columns: Sequence[Metrics]) -> list[tuple[str, list[Score]]]:
    """Return the name of each score that is known, and its values in columns, as text.

    Args:
        columns: the scores of each column, such as those of one split.
    """
    rows = []
    for name, title in SCORES.items():
        cells = []
        for scores in columns:
            low, high = scores.get(f"{name}_low"), scores.get(f"{name}_high")
            interval = "" if low is None or high is None else f"{low:.4f} to {high:.4f}"
            cells.append(Score(f"{scores[name]:.4f}", interval) if name in scores else Score())
        if any(cell.value for cell in cells):
            rows.append((title, cells))
    return [*rows, ("images", [Score(f"{one.get('images', 0):,.0f}") for one in columns])]


def write_comparison(comparison: Comparison, path: Path) -> None:
    """Write a comparison as one HTML file, which any browser shows without a network.

    Args:
        comparison: comparison of run folders or checkpoints, by their paths.
        path: the file to write.

    Raises:
        OutputError: the file cannot be written.
    """
    names, evaluations = [*comparison.scores], [*comparison.scores.values()]
    letters = [*string.ascii_uppercase, *map(str, range(27, len(names) + 1))][: len(names)]
    settings = [_settings(name) for name in names]
    page = render_page(
        page_templates("vitkit.reporting"),
        "compare.html",
        generator=GENERATOR,
        runs=[(letter, messages.escape(name)) for letter, name in zip(letters, names, strict=True)],
        letters=letters,
        verdicts=[messages.escape(pair.verdict) for pair in comparison.pairs],
        repeats=comparison.repeats,
        scores=score_rows(evaluations),
        settings=_different(settings),
        known=[bool(one) for one in settings],
        most_curves=MOST_CURVES,
        classes=_class_rows(evaluations),
        **_curves(dict(zip(letters, names, strict=True))),
    )
    write_bytes(path, page.encode("utf-8", "replace"))


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
        values = [messages.escape(str(one.get(key, ""))) for one in settings]
        if len(set(values)) > 1:
            rows.append((messages.escape(key), values))
    return rows


def _class_rows(evaluations: Sequence[Evaluation]) -> list[tuple[str, list[ClassScore]]]:
    """Return the score of each run on each class that has images."""
    by_run = [{score.name: score for score in one.per_class} for one in evaluations]
    return [(messages.escape(name), [scores[name] for scores in by_run]) for name in by_run[0]]


def _curves(names: Mapping[str, str]) -> dict[str, Any]:
    """Return a figure of the runs' curves, and the letters of those that have none."""
    # imported here: matplotlib takes half a second
    from vitkit.plots.curves import draw_compared_curves

    found: dict[str, Mapping[str, np.ndarray]] = {}
    for letter, name in names.items():
        # none without a complete epoch, as of a checkpoint
        with suppress(errors.DataError, errors.OutputError):
            if len(found) < MOST_CURVES:
                found[letter] = LearningCurves.read(name).columns
    figure = draw_compared_curves(found) if found else None
    return {"figure": figure, "without": [letter for letter in names if letter not in found]}
