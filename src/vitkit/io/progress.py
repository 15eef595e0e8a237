"""A progress bar on standard error, and what to do when nobody reads standard output."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def bar(total: int) -> Iterator[Callable[[int], object]]:
    """Show a bar on stderr where that is a terminal; yields what is told how many more are done."""
    if not sys.stderr.isatty():
        yield lambda count: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeRemainingColumn

    columns = (BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    console = Console(stderr=True)
    # Lines for a file or a pipe must not be sent to the terminal.
    redirect = sys.stdout.isatty()
    with Progress(*columns, console=console, transient=True, redirect_stdout=redirect) as bars:
        task = bars.add_task("", total=total)
        yield lambda count: bars.advance(task, count)


def let_stdout_go() -> None:
    """Send what is printed from now on to nowhere, as its reader has left or its disk is full."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
