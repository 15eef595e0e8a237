"""Progress bars on standard error (training has its own, in `training/monitoring/terminal.py`)."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager


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
