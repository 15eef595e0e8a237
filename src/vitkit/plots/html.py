"""HTML for notebooks: small tables that load nothing and are legible on light and dark pages."""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Iterable, Sequence
from html import escape

from vitkit.messages import escape as printable

# colours of text and page are the notebook's own; grey lines show on both
CELL = "text-align:left;padding:2px 8px;border-bottom:1px solid rgba(128,128,128,.35)"
BAR = "background:rgba(0,114,178,.45);height:.8em;display:inline-block"


def html_text(text: object) -> str:
    """Escape a text for HTML; characters that cannot be printed are written as `\\n` is.

    >>> html_text("<b> & 'c'")
    '&lt;b&gt; &amp; &#x27;c&#x27;'
    """
    return escape(printable(str(text)))


def html_table(header: Sequence[str], rows: Iterable[Sequence[object]], title: str = "") -> str:
    """Return a table; every cell is escaped.

    Args:
        header: titles of the columns; no line of them where all are empty.
        rows: cells of each row.
        title: a line above the table.
    """
    parts = []
    if title:
        parts.append(f"<div><b>{html_text(title)}</b></div>")
    parts.append('<table style="border-collapse:collapse;background:transparent">')
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


def html_image(png: bytes, description: str, width: float) -> str:
    """Return an image whose content is part of the HTML.

    Args:
        png: content of a PNG file.
        description: for readers who cannot see it.
        width: inches on the page.
    """
    data = b64encode(png).decode("ascii")
    style = f"width:{width:.2f}in;max-width:100%;background:white"
    return (
        f'<img alt="{html_text(description)}" style="{style}" src="data:image/png;base64,{data}">'
    )


def _row(kind: str, cells: Iterable[str]) -> str:
    inner = "".join(f'<{kind} style="{CELL}">{cell}</{kind}>' for cell in cells)
    return f"<tr>{inner}</tr>"
