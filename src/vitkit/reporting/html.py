"""The page of a report: every section as HTML, with its style and its script inside."""

from __future__ import annotations

import base64
import hashlib
from dataclasses import dataclass
from importlib.resources import files
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

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
    environment = _environment()
    sections = [_fill(environment, section, run) for section in SECTIONS]
    return render_page("report.html", generator=GENERATOR, run=run, sections=sections)


def render_page(template: str, *, generator: str, **values: Any) -> str:
    """Return a page of HTML with its style and its script inside.

    Args:
        template: its name, of one that extends `base.html`.
        generator: the command that writes the page.
        **values: of the template; all text is escaped.
    """
    script = "".join(map(_text, ("sort.js", "relabel.js", "fold.js")))
    return (
        _environment()
        .get_template(template)
        .render(
            generator=generator,
            style=Markup(_text("style.css")),
            script=Markup(script),
            # the browser runs this script and no other
            script_hash=base64.b64encode(hashlib.sha256(script.encode()).digest()).decode(),
            **values,
        )
    )


def _environment() -> Environment:
    environment = Environment(
        loader=PackageLoader("vitkit.reporting"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {"percent": _percent, "svg": Markup}
    return environment


def _fill(environment: Environment, section: Section, run: ReportedRun) -> FilledSection:
    try:
        values = section.collect(run)
    except Missing as missing:
        return FilledSection(section, Markup(), missing)
    template = environment.get_template(f"sections/{section.name}.html")
    return FilledSection(section, Markup(template.render(values)))


def _percent(share: Any) -> str:
    """Format a share in [0, 1], with a space where no line ends."""
    return f"{100 * share:.1f}\N{NO-BREAK SPACE}%"


def _text(name: str) -> str:
    return (files("vitkit.reporting") / "templates" / name).read_text(encoding="utf-8")
