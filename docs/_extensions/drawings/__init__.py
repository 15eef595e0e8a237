"""Drawings of the tutorial: `{drawing} NAME` puts one into a page; its body is the caption.

They are written by code (`pages.py`), so that a change of words or colours is a change of a line.
`svg` returns a drawing as a file of its own, for notebooks and for scripts/draw_diagrams.py.
"""

from __future__ import annotations

import re
from collections.abc import Callable

from docutils import nodes
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective
from sphinx.util.osutil import relative_uri

from .animation import animation
from .pages import DRAWINGS
from .shapes import WIDTH, Drawing

DRAWINGS["patches-to-tokens"] = animation
LINK = re.compile(r"\{link:([\w-]+)((?:#[\w-]+)?)\}")
LIGHT = {
    "ink": "#1b1f24", "paper": "#ffffff", "muted": "#57606a", "line": "#6b7480",
    "blue": "#d6e4fb", "green": "#d3efdd", "orange": "#fde3c8", "violet": "#e8dcfa", "grey": "#eef0f2",
    "strong": "#2f6fd0",
}  # fmt: skip
DARK = {
    "ink": "#e2e6ea", "paper": "#131416", "muted": "#a3adb8", "line": "#8b949e",
    "blue": "#1f3d6b", "green": "#1d4a33", "orange": "#5f3d17", "violet": "#43306b", "grey": "#24282d",
    "strong": "#6ea3f5",
}  # fmt: skip
RULES = """
.drawing text { font: 13px system-ui, "Segoe UI", "Noto Sans", "DejaVu Sans", sans-serif; fill: var(--draw-ink); }
.drawing .note { font-size: 11px; fill: var(--draw-muted); }
.drawing .small { font-size: 0.75em; }
.drawing .math { font-style: italic; }
.drawing :is(rect, circle, path) { stroke: var(--draw-line); stroke-width: 1.2; fill: none; }
.drawing :is(.plain, .paper) { fill: var(--draw-paper); }
.drawing .paper, .drawing .ink { stroke-width: 0.4; }
.drawing .ink { fill: var(--draw-ink); }
.drawing .edge { stroke: var(--draw-ink); stroke-width: 1.4; }
.drawing .frame { fill: var(--draw-grey); stroke-dasharray: 4 3; }
.drawing :is(.op, .head0, .patch) { fill: var(--draw-blue); }
.drawing :is(.norm, .position, .head1) { fill: var(--draw-green); }
.drawing :is(.cross, .class, .head2) { fill: var(--draw-orange); }
.drawing .teacher { fill: var(--draw-violet); }
.drawing .head { fill: var(--draw-line); stroke: none; }
.drawing .stream { stroke: var(--draw-strong); stroke-width: 4; }
.drawing .thin { stroke-width: 0.6; }
.drawing .bar { fill: var(--draw-grey); }
.drawing :is(.best, .yes) { fill: var(--draw-strong); }
.drawing .no { fill: var(--draw-grey); }
.drawing :is(.w0, .w1, .w2, .w3) { fill: var(--draw-strong); stroke: none; }
.drawing .w0 { fill-opacity: 0.12; }
.drawing .w1 { fill-opacity: 0.3; }
.drawing .w2 { fill-opacity: 0.6; }
.drawing a { cursor: pointer; text-decoration: none; }
.drawing a:is(:hover, :focus-visible) rect { stroke: var(--draw-strong); stroke-width: 2.2; }
.drawing a:focus-visible { outline: 2px solid var(--draw-strong); outline-offset: 2px; }
"""


def variables(colours: dict[str, str]) -> str:
    """Return colours as declarations of CSS."""
    return " ".join(f"--draw-{name}: {value};" for name, value in colours.items())


def site_style() -> str:
    """Return the style sheet of the site: it follows the theme that the reader has chosen."""
    light, dark = variables(LIGHT), variables(DARK)
    return f"""svg.drawing {{ {light} display: block; width: 100%; max-width: 460px; height: auto; }}
body[data-theme="dark"] svg.drawing {{ {dark} }}
@media (prefers-color-scheme: dark) {{ body:not([data-theme="light"]) svg.drawing {{ {dark} }} }}
{RULES}"""


def file_style() -> str:
    """Return the style of a drawing that is a file of its own: it follows the system."""
    dark = f"@media (prefers-color-scheme: dark) {{ svg {{ {variables(DARK)} }} }}"
    return f"svg {{ {variables(LIGHT)} background: var(--draw-paper); }} {dark} {RULES}"


def element(name: str, address: Callable[[str, str], str] | None, style: str = "") -> str:
    """Return a drawing as an SVG element.

    Args:
        name: one of `DRAWINGS`.
        address: the address of a page and an anchor; `None` leaves the links out.
        style: a style sheet to put in.
    """
    drawing: Drawing = DRAWINGS[name]()
    if address is None:
        body = re.sub(r"<a href=[^>]*>|</a>", "", drawing.body)
    else:
        body = LINK.sub(lambda found: address(found[1], found[2]), drawing.body)
    reached = "<a href" in body or "tabindex" in body  # a screen reader does not enter an img
    role = "group" if reached else "img"
    names = f'aria-labelledby="{name}-title {name}-description"'
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" class="drawing" role="{role}" {names} '
        f'viewBox="0 0 {WIDTH} {drawing.height}">'
        f'<title id="{name}-title">{drawing.title}</title>'
        f'<desc id="{name}-description">{drawing.description}</desc>'
        + (f"<style>{style}</style>" if style else "") + body + "</svg>"
    )  # fmt: skip


def svg(name: str) -> str:
    """Return a drawing as the text of an SVG file."""
    return element(name, None, file_style())


class DrawingDirective(SphinxDirective):
    """`{drawing} NAME`; its body is the caption."""

    required_arguments = 1
    has_content = True

    def run(self) -> list[nodes.Node]:
        """Return a figure."""
        name, here = self.arguments[0], self.env.docname
        if name not in DRAWINGS:
            raise self.error(f"no drawing {name!r}; there are {', '.join(DRAWINGS)}")

        def address(page: str, anchor: str) -> str:
            document = f"tutorial/{page}"
            if document == here:
                return anchor or "#"
            return f"{relative_uri(here, document)}.html{anchor}"

        figure = nodes.figure("", nodes.raw("", element(name, address), format="html"))
        if self.content:
            text, _ = self.state.inline_text(" ".join(self.content), self.lineno)
            figure += nodes.caption("", "", *text)
        return [figure]


def write_style(app: Sphinx) -> None:
    """Write the style sheet of the drawings."""
    if app.builder.format == "html":
        place = app.outdir / "_static" / "drawings.css"
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_text(site_style(), encoding="utf-8")


def setup(app: Sphinx) -> dict[str, object]:
    """Add the directive and the style sheet."""
    app.add_directive("drawing", DrawingDirective)
    app.add_css_file("drawings.css")
    app.connect("builder-inited", write_style)
    return {"version": "1", "parallel_read_safe": True, "parallel_write_safe": True}
