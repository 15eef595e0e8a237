"""Last lines of the verbs: where their results are, and commands to continue with."""

import shlex
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from vitkit.messages import discard_stdout, escape

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
