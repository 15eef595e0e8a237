"""Output of the verbs: columns, predictions, and commands to continue with."""

from __future__ import annotations

import json
import math
import os
import shlex
import shutil
import sys
import textwrap
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from rich.cells import cell_len, set_cell_size

from vitkit.messages import discard_stdout, escape, percent

if TYPE_CHECKING:
    from vitkit.prediction.image_list import ImageList
    from vitkit.prediction.images import FoundImage
    from vitkit.prediction.predictor import Prediction


# Text that fits the terminal: columns and long lines, folded where they are too wide, never cut.
#
# Where the output is no terminal, rows and sentences stay on one line each, for `grep` and
# programs.

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


# The last lines of a verb: where its results are, and a command to continue with.

Words = Sequence[str | Path]
"""The words of a command, without `vitkit`."""


def print_results(*lines: str, then: Sequence[Words] = ()) -> None:
    """Print where the results are and what to do next, for verbs that print no data.

    Args:
        lines: where the results are.
        then: commands to continue with.
    """
    sys.stdout.writelines(f"{escape(line)}\n" for line in lines)
    sys.stdout.writelines(f"{line}\n" for line in _lines(then))


def suggest(*commands: Words) -> None:
    """Print commands to continue with on stderr, for verbs that print data.

    Where standard output is no terminal, a program or a file gets the data, so nothing is printed.
    """
    if not sys.stdout.isatty():
        return
    sys.stdout.flush()  # the data come first
    with suppress(OSError):  # a closed stderr
        sys.stderr.writelines(f"{line}\n" for line in _lines(commands))


def flags(**values: object) -> list[str]:
    """Return the flags that were given, for a command to continue with.

    >>> flags(data_root="/data", follow_links=True, split=None)
    ['--data-root', '/data', '--follow-links']
    """
    words = []
    for name, value in values.items():
        if value is None or value is False:
            continue
        words.append(f"--{name.replace('_', '-')}")
        if value is not True:
            words.append(str(value))
    return words


def _lines(commands: Sequence[Words]) -> list[str]:
    lines: list[str] = []
    for command in commands:
        begin = "next: " if not lines else "      "
        lines.append(f"{begin}vitkit {escape(shlex.join(map(str, command)))}")
    return lines


# The table of predictions on a terminal: image, class, probability and a bar, as they come.

GAP = "  "
NUMBER = len("100.0 %")
"""Characters of a probability."""
EIGHTHS = ("", *"▏▎▍▌▋▊▉")
"""The last character of a bar, which is filled by so many eighths."""


class PredictionTable:
    """Formats predictions as rows of a table, whose columns are known before the first image.

    A name that is wider than its column has a line of its own, so that nothing is cut.

    Args:
        names: names of the images, as far as they are known.
        classes: classes that can be predicted.
        width: columns of the terminal.
    """

    def __init__(self, names: Iterable[str], classes: Iterable[str], width: int) -> None:
        self._bar = width // 5
        room = width - self._bar - NUMBER - 3 * len(GAP)
        name = max((cell_len(escape(name)) for name in names), default=room)
        label = max((cell_len(escape(label)) for label in classes), default=room)
        # the other column gets the space that a short column leaves
        self._label = max(len("class"), min(label, max(room // 2, room - name)))
        self._name = max(len("image"), min(name, room - self._label))

    def header(self) -> str:
        """Return the line of titles."""
        cells = ("image".ljust(self._name), "class".ljust(self._label), "prob.".rjust(NUMBER))
        return GAP.join(cells) + "\n"

    def rows(self, name: str, top: Sequence[tuple[str, float]]) -> str:
        """Return the lines of one image.

        Args:
            name: name of the image.
            top: its most probable classes with their probabilities [0, 1]; after the first, those
                that round to 0.0 % are left out.
        """
        lines = []
        name = escape(name)
        if cell_len(name) > self._name:
            lines.append(name)
            name = ""
        for rank, (label, probability) in enumerate(top):
            number = percent(probability)
            if rank and number == percent(0.0):
                break
            first, second = set_cell_size(name, self._name), escape(label)
            if cell_len(second) > self._label:
                lines.append(f"{first}{GAP}{second}")
                first, second = " " * self._name, ""
            second = set_cell_size(second, self._label)
            cells = (first, second, number.rjust(NUMBER), self._filled(probability))
            lines.append(GAP.join(cells).rstrip())
            name = ""
        return "".join(f"{line}\n" for line in lines)

    def _filled(self, probability: float) -> str:
        """Return a bar as long as the probability is high."""
        if not math.isfinite(probability):
            return ""
        whole, eighths = divmod(round(probability * self._bar * 8), 8)
        return "█" * whole + EIGHTHS[eighths]


Write: TypeAlias = "Callable[[FoundImage, Prediction], object]"
NAMES_MEASURED = 1_000
"""Most images whose names decide the width of the column; with more, it is the widest."""


def print_now(text: str, *, keeps_running: bool) -> None:
    """Print at once.

    Args:
        text: text to print.
        keeps_running: print no more when the reader has left (`| head`), instead of raising
            `BrokenPipeError`.
    """
    try:
        sys.stdout.write(text)
        sys.stdout.flush()
    except BrokenPipeError:
        if not keeps_running:
            raise
        discard_stdout()


@contextmanager
def print_table(
    images: ImageList, classes: Iterable[str], *, keeps_running: bool
) -> Iterator[Write]:
    """Print a row for each class of an image, with bars, or a line per image for programs.

    Args:
        images: images that will be predicted.
        classes: classes that can be predicted.
        keeps_running: as for `print_now`.
    """
    width = terminal_width()
    if width is None:
        yield partial(_print_line, keeps_running=keeps_running)
        return
    # for more images the longest name is not searched: the first row must appear at once
    few = images.total is not None and images.total <= NAMES_MEASURED
    table = PredictionTable([image.name for image in images] if few else (), classes, width)
    print_now(table.header(), keeps_running=keeps_running)

    def write(image: FoundImage, prediction: Prediction) -> None:
        print_now(table.rows(image.name, prediction.top), keeps_running=keeps_running)

    yield write


def _print_line(image: FoundImage, prediction: Prediction, *, keeps_running: bool) -> None:
    classes = ", ".join(f"{escape(label)} {p:.3f}" for label, p in prediction.top)
    print_now(f"{escape(image.name)}: {classes}\n", keeps_running=keeps_running)


@contextmanager
def print_json(*, keeps_running: bool) -> Iterator[Write]:
    """Print a JSON list, an entry at a time; `keeps_running` as for `print_now`.

    Names of files are exact: a byte that is not UTF-8 is a lone surrogate, as for `os.fsencode`.
    """
    # the list is closed after the last image, as entries are printed one by one
    separator = "[\n  "

    def write(image: FoundImage, prediction: Prediction) -> None:
        nonlocal separator
        row: dict[str, Any] = {
            "image": image.name,
            "label": prediction.label,
            "probability": prediction.probability,
            "top": [{"label": label, "probability": p} for label, p in prediction.top],
        }
        if image.label:
            row["true_label"] = image.label
        entry = json.dumps(row, indent=2).replace("\n", "\n  ")
        print_now(separator + entry, keeps_running=keeps_running)
        separator = ",\n  "

    yield write
    print_now("\n]\n", keeps_running=keeps_running)
