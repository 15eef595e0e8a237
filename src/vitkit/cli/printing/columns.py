"""Text that fits the terminal: columns and long lines, folded where they are too wide, never cut.

Where the output is no terminal, rows and sentences stay on one line each, for `grep` and programs.
"""

from __future__ import annotations

import os
import shutil
import sys
import textwrap
from collections.abc import Sequence

from rich.cells import cell_len

FEWEST_COLUMNS = 40
"""Columns that text is written for, however narrow the terminal is; it breaks longer lines."""


def terminal_width() -> int | None:
    """Return the columns of the terminal that standard output goes to; None if it is none.

    `TTY_COMPATIBLE=1` counts as one, as the library rich has it.
    """
    if sys.stdout.isatty() or os.environ.get("TTY_COMPATIBLE") == "1":
        return max(shutil.get_terminal_size().columns, FEWEST_COLUMNS)
    return None


def align(rows: Sequence[Sequence[str]], width: int | None = None) -> str:
    """Format rows as lines, their columns two spaces apart; all rows have as many cells.

    Args:
        rows: rows of cells.
        width: columns of the terminal; in wider tables the first cell of a row has its own line,
            and the others follow below, as many on a line as fit. None: a row is one line.
    """
    table = _aligned(rows)
    if width is None or _widest(table) <= width:
        return "".join(f"{line}\n" for line in table)
    rest = [f"  {line}" for line in _aligned([row[1:] for row in rows])]
    if _widest(rest) > width:  # one long cell must not widen the column in all rows
        rest = ["\n".join(_packed(row[1:], width)) for row in rows]
    return "".join(f"{row[0]}\n{line}\n" for row, line in zip(rows, rest, strict=True))


def _packed(cells: Sequence[str], width: int) -> list[str]:
    """Return cells in as few lines as have room for them; a longer cell has its own line."""
    lines = [" "]
    for cell in filter(None, map(str.strip, cells)):
        if cell_len(lines[-1]) + 2 + cell_len(cell) > width and lines[-1].strip():
            lines.append(" ")
        # the first cell of a line is indented by two, as the others are apart
        lines[-1] += f"  {cell}" if lines[-1].strip() else f" {cell}"
    return lines


def fold(text: str, width: int | None) -> str:
    """Break lines between words where they are wider than the terminal, with deeper indent.

    Args:
        text: one or more lines.
        width: columns of the terminal; None leaves the text as it is.
    """
    if width is None:
        return text
    lines = []
    for line in text.split("\n"):
        if len(line) <= width:
            lines.append(line)
            continue
        indent = " " * (len(line) - len(line.lstrip()) + 4)
        lines += textwrap.wrap(
            line, width, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False
        )
    return "\n".join(lines)


def _aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    # Chinese and Japanese characters, among others, take two columns of a terminal
    widths = [max(map(cell_len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for row in rows:
        cells = [
            cell + " " * (width - cell_len(cell)) for cell, width in zip(row, widths, strict=True)
        ]
        # no trailing spaces, for diff and grep
        lines.append("  ".join(cells).rstrip())
    return lines


def _widest(lines: Sequence[str]) -> int:
    return max(map(cell_len, lines), default=0)
