"""HTML: small tables for notebooks, and whole pages; they load nothing, on light or dark ground."""

from __future__ import annotations

import hashlib
from base64 import b64encode
from collections.abc import Iterable, Sequence
from html import escape
from typing import TYPE_CHECKING, Any

from vitkit.messages import escape as printable

if TYPE_CHECKING:
    from jinja2 import Environment

    from vitkit.plots.figure import NotebookFigure

# colours of text and page are the notebook's own; grey lines show on both
CELL = "text-align:left;padding:2px 8px;border-bottom:1px solid rgba(128,128,128,.35)"
BAR = "background:rgba(0,114,178,.45);height:.8em;display:inline-block"


def html_text(text: object) -> str:
    """Escape a text for HTML; characters that cannot be printed are written as `\\n` is.

    >>> html_text("<b> & 'c'")
    '&lt;b&gt; &amp; &#x27;c&#x27;'
    """
    return escape(printable(str(text)))


def html_table(header: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """Return a table; every cell is escaped.

    Args:
        header: titles of the columns; no line of them where all are empty.
        rows: cells of each row.
    """
    parts = ['<table style="border-collapse:collapse;background:transparent">']
    if any(header):
        parts.append(_row("th", map(html_text, header)))
    parts += [_row("td", map(html_text, row)) for row in rows]
    return "".join([*parts, "</table>"])


def html_bars(rows: Iterable[tuple[str, float]]) -> str:
    """Return a table of names with a bar and per cent each.

    Args:
        rows: a name, and its share in [0, 1].
    """
    cells = []
    for name, share in rows:
        width = 8 * min(max(share, 0), 1)  # NaN has no bar
        bar = f'<span style="{BAR};width:{width:.2f}em"></span>'
        cells.append(_row("td", [html_text(name), f"{100 * share:.1f} %", bar]))
    return f'<table style="border-collapse:collapse">{"".join(cells)}</table>'


def html_image(figure: NotebookFigure, description: str) -> str:
    """Return a figure as an image whose content is part of the HTML.

    Args:
        figure: the figure, which keeps its width.
        description: for readers who cannot see it.
    """
    style = f"width:{figure.get_figwidth():.2f}in;max-width:100%;background:white"
    source = f"data:image/png;base64,{b64encode(figure._repr_png_()).decode('ascii')}"
    return f'<img alt="{html_text(description)}" style="{style}" src="{source}">'


def _row(kind: str, cells: Iterable[str]) -> str:
    inner = "".join(f'<{kind} style="{CELL}">{cell}</{kind}>' for cell in cells)
    return f"<tr>{inner}</tr>"


def page_templates(package: str) -> Environment:
    """Return the templates of a package, and those that all pages share; all text is escaped.

    Args:
        package: its folder `templates` has the templates, and the scripts of its pages.
    """
    # imported here: notebooks need no jinja2, and matplotlib takes half a second
    from jinja2 import ChoiceLoader, Environment, PackageLoader, StrictUndefined

    from vitkit.plots.figure import inline_svg

    templates = Environment(
        loader=ChoiceLoader([PackageLoader(package), PackageLoader("vitkit.plots")]),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )

    def percent(share: float) -> str:
        """Format a share in [0, 1], with a space where no line ends."""
        return f"{100 * share:.1f}\N{NO-BREAK SPACE}%"

    templates.filters |= {"printable": printable, "percent": percent, "svg": inline_svg}
    return templates


def render_page(templates: Environment, name: str, *, generator: str, **values: Any) -> str:
    """Return a page of HTML with its style and its scripts inside.

    Args:
        templates: as `page_templates` returns them.
        name: of a template that extends `base.html`.
        generator: the command that writes the page.
        **values: of the template.
    """
    from markupsafe import Markup

    def text(file: str) -> str:
        assert templates.loader
        return templates.loader.get_source(templates, file)[0]

    script = "".join(map(text, templates.list_templates(extensions=["js"])))
    return templates.get_template(name).render(
        generator=generator,
        style=Markup(text("style.css")),
        script=Markup(script),
        # the browser runs this script and no other
        script_hash=b64encode(hashlib.sha256(script.encode()).digest()).decode(),
        **values,
    )
