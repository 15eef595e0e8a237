"""A table of a chapter: HTML on a page and in Jupyter, columns of text in a terminal."""

from __future__ import annotations

import itertools
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape


@dataclass(frozen=True)
class Link:
    """A cell that leads to another page."""

    text: str
    address: str

    def __str__(self) -> str:
        return self.text


Entry = str | Link


@dataclass(frozen=True)
class Table:
    """Rows below a header; numbers are aligned to the right in the columns of `right`.

    >>> Table(("bug", "cost"), [("a", "1.0"), ("a long one", "12.0")], right=(1,))
    bug         cost
    a            1.0
    a long one  12.0
    """

    header: Sequence[str]
    rows: Sequence[Sequence[Entry]]
    right: Sequence[int] = ()

    def __repr__(self) -> str:
        lines = [[str(entry) for entry in row] for row in (self.header, *self.rows)]
        widths = [
            max(len(entry) for entry in column) for column in zip(*lines, strict=True)
        ]
        while sum(widths) + 2 * (len(widths) - 1) > 88:  # the widest column is wrapped
            widths[max(range(len(widths)), key=widths.__getitem__)] -= 1
        return "\n".join(self._line(line, widths) for line in lines)

    def _line(self, entries: Sequence[str], widths: Sequence[int]) -> str:
        """Lay out one row, over several lines where an entry is longer than its column."""
        parts = [textwrap.wrap(e, w) for e, w in zip(entries, widths, strict=True)]
        return "\n".join(
            "  ".join(
                f"{part:>{width}}" if column in self.right else f"{part:<{width}}"
                for column, (part, width) in enumerate(zip(line, widths, strict=True))
            ).rstrip()
            for line in itertools.zip_longest(*parts, fillvalue="")
        )

    def _repr_html_(self) -> str:
        head = "".join(f'<th scope="col">{escape(name)}</th>' for name in self.header)
        body = "".join(
            f"<tr>{''.join(self._html(column, e) for column, e in enumerate(row))}</tr>"
            for row in self.rows
        )
        table = f"<thead><tr>{head}</tr></thead><tbody>{body}</tbody>"
        # On a narrow screen the table scrolls within the page.
        return (
            f'<div class="table-wrapper"><table class="docutils">{table}</table></div>'
        )

    def _html(self, column: int, entry: Entry) -> str:
        text = escape(str(entry))
        if isinstance(entry, Link):
            text = f'<a href="{escape(entry.address)}">{text}</a>'
        style = ' style="text-align: right"' if column in self.right else ""
        return f"<td{style}>{text}</td>"
