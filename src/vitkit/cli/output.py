"""Aligned columns of text, never cut, whatever the terminal's width: for reading and for `grep`."""

from __future__ import annotations

from collections.abc import Sequence


def align(rows: Sequence[Sequence[str]]) -> str:
    """Format rows as lines, their columns two spaces apart; all rows have as many cells."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    text = ""
    for row in rows:
        cells = [cell.ljust(width) for cell, width in zip(row, widths, strict=True)]
        # no trailing spaces, for diff and grep
        text += "  ".join(cells).rstrip() + "\n"
    return text
