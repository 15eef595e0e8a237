"""The page of a report: every section as HTML."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from jinja2 import Environment
from markupsafe import Markup

from vitkit.plots.html import page_templates, render_page
from vitkit.reporting.missing import Missing
from vitkit.reporting.reported_run import ReportedRun
from vitkit.reporting.sections import SECTIONS, Section

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
