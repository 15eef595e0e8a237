"""The terminal: a progress bar where there is one, a line of text now and then elsewhere."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
from rich.table import Column

REFRESH = 0.5
"""Seconds between two looks of the bar. No thread draws it: that would take time from the steps."""
LEAST_BAR = 8
"""Characters of the shortest bar, and of what separates the columns."""
PLAIN = 30.0
"""Seconds between two lines where there is no bar."""


class _Console(Console):
    """A console that falls silent when nothing can be written to it; the run goes on.

    Its reader may leave (`| head`), the terminal may be closed, or the disk may be full to which it
    is redirected. What it would have said stands in train.log.
    """

    def on_broken_pipe(self) -> None:
        self.quiet = True
        nowhere = os.open(os.devnull, os.O_WRONLY)
        with suppress(OSError):  # a file that is none of the system's has no number
            os.dup2(nowhere, self.file.fileno())  # for what it could not write yet, and others will
        os.close(nowhere)


class Display:
    """What is seen of a run while it lasts.

    Args:
        total: steps of the whole run.
        done: steps done before, on resume.
        quiet: nothing at all.
    """

    def __init__(self, *, total: int, done: int, quiet: bool) -> None:
        self._console = _Console(quiet=quiet, highlight=False, soft_wrap=True)
        self._bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(table_column=Column(no_wrap=True)),
            TextColumn("{task.fields[status]}"),
            console=self._console,
            transient=True,
            auto_refresh=False,
            disable=quiet or not self._console.is_terminal,
        )
        self._total = total
        self._task = self._bar.add_task("", total=total, completed=done, status="")
        self._every = PLAIN if self._bar.disable else REFRESH
        self._shown = time.monotonic()

    def lasts(self, total: int) -> None:
        """How many steps the run has, as it is known now."""
        self._total = total
        self._bar.update(self._task, total=total)

    def start(self) -> None:
        """Show the bar."""
        self._draw(self._bar.start)

    def stop(self) -> None:
        """Take the bar away."""
        self._draw(self._bar.stop)

    def say(self, line: str) -> None:
        """One line that stays."""
        self._draw(lambda: self._console.print(line, markup=False))

    def is_due(self) -> bool:
        """Whether it is time to `show` again."""
        return time.monotonic() - self._shown >= self._every

    def show(self, step: int, epoch: str, status: str, left: float) -> None:
        """Where the run is; `left` is in seconds."""
        self._shown = time.monotonic()
        time_left = f"{timedelta(seconds=round(left))} left"
        if self._bar.disable:
            self.say(f"{epoch}  step {step}/{self._total}  {status}  {time_left}")
            return
        # rich would shorten every column of a narrow terminal, the numbers of steps too
        room = self._console.width - len(epoch) - 2 * len(str(self._total)) - LEAST_BAR
        status = f"{time_left}  {status}"[: max(room, 0)].rstrip()
        self._bar.update(self._task, completed=step, description=epoch, status=status)
        self._draw(self._bar.refresh)

    def _draw(self, draw: Callable[[], object]) -> None:
        """Write to the terminal, as long as it is there."""
        try:
            draw()
        except OSError:
            self._console.on_broken_pipe()
