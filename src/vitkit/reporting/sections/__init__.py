"""The sections of a report, in their order; a new one is a function, a template and a line here."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from vitkit.reporting.reported_run import ReportedRun
from vitkit.reporting.sections import data_views, learned, overview, scores, suspects


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
    Section("headline", "Result", overview.best_score),
    Section("repetition", "Repeat this run", overview.repetition),
    Section("curves", "Learning curves", scores.curves),
    Section("classes", "Classes", scores.classes),
    Section("confusion", "Confusion matrix", scores.confusion),
    Section("mistakes", "Most confident mistakes", scores.mistakes),
    Section("suspects", "Suspected wrong labels", suspects.suspects),
    Section("calibration", "Calibration", scores.calibration),
    Section("learned", "What the model has learned", learned.what_was_learned),
    Section("check", "Check of the data", data_views.check_findings),
    Section("augmented", "Augmented images", data_views.augmented),
    Section("costs", "Time and memory", overview.costs),
    Section("environment", "Environment", overview.environment),
)
