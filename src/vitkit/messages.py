"""Text for messages: numbers, quoted lists, escaped names, and hints for typing errors."""

import difflib
import os
import shutil
import sys
import textwrap
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

ENTRIES_SHOWN = 8
"""Names of a list that a message shows."""
SHORTEST_BEGINNING = 3
"""Letters of a word that may be the beginning of a name."""
SHORTEST_MISTYPED = 5
"""Letters of a mistyped word that may be the beginning of a name."""
SIMILAR_SHOWN = 3
"""Entries of a folder that a message suggests in the place of a missing one."""

TRUST = (
    "add --trust-pickle (trust_pickle=True); for a command without that flag, convert it first: "
    "vitkit convert FILE OUT --to vitkit --trust-pickle"
)
"""The end of a message that refuses a pickle: how to trust it."""


def plural(number: int, noun: str) -> str:
    """Return a count with its noun.

    >>> plural(1, "epoch"), plural(1000, "epoch"), plural(2, "class")
    ('1 epoch', '1,000 epochs', '2 classes')
    """
    if number == 1:
        return f"{number:,} {noun}"
    ending = "es" if noun.endswith("s") else "s"
    return f"{number:,} {noun}{ending}"


def percent(share: float) -> str:
    """Return a fraction, such as a probability, in per cent.

    >>> percent(0.9731), percent(1.0)
    ('97.3 %', '100.0 %')
    """
    return f"{100 * share:.1f} %"


def short_number(value: float) -> str:
    """Return three significant digits or all whole ones.

    >>> short_number(1234.5), short_number(8.9), short_number(97.31), short_number(99.97)
    ('1,234', '8.90', '97.3', '100')
    """
    if value >= 99.95:
        return f"{value:,.0f}"
    return f"{value:#.3g}"


def flag_name(setting: str) -> str:
    """Return the flag of a setting.

    >>> flag_name("batch_size")
    '--batch-size'
    """
    return f"--{setting.replace('_', '-')}"


def escape(name: str | os.PathLike[str]) -> str:
    """Escape line breaks, control characters and invalid bytes of a file name.

    >>> escape("two\\nlines")
    'two\\\\nlines'
    """
    text = os.fspath(name)
    if text.isprintable():
        return text
    return "".join(
        c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in text
    )


def quote_list(names: Iterable[str], most: int = ENTRIES_SHOWN) -> str:
    """Quote names, the first `most` of them, for one line of a message.

    >>> quote_list(["a", "b", "c"], most=2)
    "'a', 'b' and 1 more"
    """
    names = list(names)
    more = len(names) - most
    return ", ".join(map(repr, names[:most])) + (f" and {more} more" if more > 0 else "")


def did_you_mean(
    word: str, choices: Iterable[str], count: int = 1, *, contained: bool = False
) -> str:
    """Suggest the nearest choices, or return an empty string if none is near.

    Upper and lower case do not matter. With `contained`, names that contain the word are near, too.

    >>> did_you_mean("wdith", ["width", "depth"])
    " (did you mean 'width'?)"
    >>> did_you_mean("vit_tny", ["vit_tiny_patch16_224", "vit_tiny_patch14_224"])
    " (did you mean 'vit_tiny_patch16_224'?)"
    """
    choices = list(choices)
    matches = _nearest(word, choices, count)
    if contained and word and not matches:
        matches = [choice for choice in choices if word.lower() in choice.lower()][:count]
    if not matches:
        return ""
    return f" (did you mean {' or '.join(map(repr, matches))}?)"


def _nearest(word: str, choices: Iterable[str], count: int) -> list[str]:
    # compared in lower case, suggested as written
    by_lower = {choice.lower(): choice for choice in choices}
    wanted = word.lower()
    matches = difflib.get_close_matches(wanted, list(by_lower), n=count, cutoff=0.6)
    if not matches and len(wanted) >= SHORTEST_BEGINNING:
        matches = [choice for choice in by_lower if choice.startswith(wanted)][:count]
    if not matches and len(wanted) >= SHORTEST_MISTYPED:
        matches = [choice for choice in by_lower if _begins_nearly(choice, wanted)][:count]
    return [by_lower[match] for match in matches]


def _begins_nearly(choice: str, word: str) -> bool:
    """Return True for a longer name with the mistyped word as its beginning."""
    # a letter may be missing, or one too many
    beginnings = {choice[: len(word) + extra] for extra in (-1, 0, 1)}
    return bool(difflib.get_close_matches(word, beginnings, n=1, cutoff=0.85))


def nearest_parent(path: Path) -> str:
    """Describe the nearest existing folder above a missing path.

    Such as `the nearest folder that exists is /a/b, with: c, d`: the names in it that are similar
    to the missing one, but no hidden files.
    """
    parent = next((p for p in path.absolute().parents if _is_folder(p)), Path("/"))
    try:
        entries = [p.name + ("/" if p.is_dir() else "") for p in parent.iterdir()]
    except PermissionError:
        return f"the nearest folder that exists is {escape(parent)}, which cannot be listed"
    missing = path.absolute().relative_to(parent).parts[0]
    shown = [entry for entry in sorted(entries) if not entry.startswith(".")]
    near = _nearest(missing, shown, SIMILAR_SHOWN)
    similar = ""
    if near:
        similar = f", with: {', '.join(map(escape, near))}"
    return f"the nearest folder that exists is {escape(parent)}{similar}"


def _is_folder(path: Path) -> bool:
    try:
        return path.is_dir()
    except OSError:  # a folder above it may not be entered, or the name is too long
        return False


# Text that fits the terminal: tables and long lines are folded where they are too wide, never cut.
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


def format_table(
    rows: Sequence[Sequence[str]], width: int | None = None, *, right: Collection[int] = ()
) -> str:
    """Format rows as lines, their columns two spaces apart; all rows have as many cells.

    >>> print(format_table([["split", "images"], ["train", "60"]], right=[1]), end="")
    split  images
    train      60

    Args:
        rows: rows of cells.
        width: columns of the terminal; in wider tables the first cell of a row has its own line,
            and the others follow below, folded. None: a row is one line.
        right: numbers of the columns that are aligned on the right.
    """
    from rich.cells import cell_len  # Chinese characters, among others, take two columns

    widths = [max(map(cell_len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for row in rows:
        cells = []
        for number, (cell, column) in enumerate(zip(row, widths, strict=True)):
            space = " " * (column - cell_len(cell))
            cells.append(space + cell if number in right else cell + space)
        lines.append("  ".join(cells).rstrip())  # no trailing spaces, for diff and grep
    if width is not None and max(map(cell_len, lines), default=0) > width:
        others = format_table([row[1:] for row in rows], right={number - 1 for number in right})
        lines = [
            f"{row[0]}\n{fold(f'  {line}', width)}"
            for row, line in zip(rows, others.splitlines(), strict=True)
        ]
    return "".join(f"{line}\n" for line in lines)


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


# Progress bars on standard error (training has its own, in `training/monitoring/run_log.py`).


@contextmanager
def progress_bar(
    total: int | None, description: str = "", *, done: int = 0, in_bytes: bool = False
) -> Iterator[Callable[[int], object]]:
    """Show a bar on stderr while the block runs; nothing where stderr is not a terminal.

    Args:
        total: how many there are; None if unknown.
        description: text before the bar.
        done: how many are done before the block begins.
        in_bytes: show amounts as kB, MB and GB instead of a plain count.

    Yields:
        A function that advances the bar by the number it is given.
    """
    if not sys.stderr.isatty():
        yield lambda count: None
        return
    # imported here: most processes show no bar
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        DownloadColumn,
        MofNCompleteColumn,
        Progress,
        TimeRemainingColumn,
    )

    amount = DownloadColumn() if in_bytes else MofNCompleteColumn()
    columns = ("{task.description}", BarColumn(), amount, TimeRemainingColumn())
    console = Console(stderr=True)
    # Lines for a file or a pipe must not be sent to the terminal.
    redirect = sys.stdout.isatty()
    with Progress(
        *columns[0 if description else 1 :],
        console=console,
        transient=True,
        redirect_stdout=redirect,
    ) as progress:
        task = progress.add_task(description, total=total, completed=done)
        yield lambda count: progress.advance(task, count)


def discard_stdout() -> None:
    """Send further output to the null device, after EPIPE or ENOSPC."""
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, sys.stdout.fileno())
    os.close(null)


def few(names: Sequence[object], most: int = 5) -> str:
    """Return the first names of a list as text, each cut off, with the number of the others."""
    text = ", ".join(str(name)[:120] for name in names[:most])
    if len(names) > most:
        text += f" and {len(names) - most} more"
    return text
