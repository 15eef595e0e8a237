"""Pages for a screen reader: names, levels and elements that the theme and the builders leave out.

The rules are those of WCAG 2.2 and of WAI-ARIA 1.2.
"""

from __future__ import annotations

import re

from docutils import nodes
from sphinx.application import Sphinx

PARAMETERS = re.compile(r'<dl>\n((?:<dd><em class="sig-param">.*?</dd>\n)+)</dl>', re.DOTALL)
PARAMETER = re.compile(r"<dd>(.*?)</dd>\n", re.DOTALL)


def signatures_in_lines(body: str) -> str:
    """Write the parameters of a long signature as lines: in a `dl` each would need a term."""

    def lines(found: re.Match[str]) -> str:
        return PARAMETER.sub(r'<span class="sig-line">\1</span>', found[1])

    return PARAMETERS.sub(lines, body)


def without_common_label(body: str) -> str:
    """Remove the label that all hidden cells have in common: their own words name them."""
    return body.replace('<summary aria-label="Toggle hidden content">', "<summary>")


def with_levels(part: str) -> str:
    """Give the captions of lists of pages a level, which the role of a heading needs."""
    return part.replace('role="heading"', 'role="heading" aria-level="2"')


def mend(
    app: Sphinx, page: str, template: str, context: dict[str, object], document: nodes.document
) -> None:
    """Mend the parts of a page before they are put together."""
    if isinstance(body := context.get("body"), str):
        context["body"] = signatures_in_lines(without_common_label(with_levels(body)))
    if isinstance(navigation := context.get("furo_navigation_tree"), str):
        context["furo_navigation_tree"] = with_levels(navigation)


def setup(app: Sphinx) -> dict[str, object]:
    """After the theme, whose priority is the usual 500."""
    app.connect("html-page-context", mend, priority=900)
    return {"version": "1", "parallel_read_safe": True, "parallel_write_safe": True}
