"""Output to the terminal: a progress bar, or lines of text where there is no terminal."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from textwrap import wrap

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
from rich.table import Column

REFRESH = 0.5
"""Seconds between two updates of the bar. No thread draws it, because that would slow the steps."""
USUAL_WIDTH = 80
"""Columns of a terminal that does not tell its width."""
MIN_BAR = 8
"""Characters of the shortest bar and of the column separators."""
PLAIN = 30.0
"""Seconds between two lines if there is no bar."""
MOST_LINES = 50
"""Epochs of which each has a line; of more, the best ones and every n-th."""


def epochs_per_line(epochs: int) -> int:
    """Return n, where every n-th epoch has a line.

    >>> epochs_per_line(50), epochs_per_line(120)
    (1, 3)
    """
    return -(-epochs // MOST_LINES)  # rounded up


class _Console(Console):
    """A console that becomes quiet if writing fails, so that the run continues.

    Its reader may have ended (`| head`), the terminal may be closed, or the output may go to a full
    disk. All lines are in train.log.
    """

    def on_broken_pipe(self) -> None:
        """Write to the null device from now on."""
        self.quiet = True
        null = os.open(os.devnull, os.O_WRONLY)
        with suppress(OSError):  # a Python object in place of a file has no descriptor
            # Buffered output of any library would fail again at exit.
            os.dup2(null, self.file.fileno())
        os.close(null)


class Display:
    """A progress bar, or lines of text if there is no terminal.

    Args:
        total: steps of the whole run.
        done: steps done before, on resume.
        quiet: print nothing.
    """

    def __init__(self, *, total: int, done: int, quiet: bool) -> None:
        self._console = _Console(quiet=quiet, highlight=False, emoji=False, soft_wrap=True)
        if self._console.width < 1:  # COLUMNS=0, as some terminals of editors have it
            self._console.width = USUAL_WIDTH
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
        self._quiet = quiet
        self._total = total
        self._task = self._bar.add_task("", total=total, completed=done, status="")
        self._every = PLAIN if self._bar.disable else REFRESH
        self._shown = time.monotonic()

    def set_total(self, total: int) -> None:
        """Set the number of steps of the run."""
        self._total = total
        self._bar.update(self._task, total=total)

    def start(self) -> None:
        """Show the bar."""
        self._draw(self._bar.start)

    def stop(self) -> None:
        """Remove the bar."""
        self._draw(self._bar.stop)

    def print(self, line: str) -> None:
        """Print a line that stays; on a terminal it is wrapped between words."""
        if self._console.is_terminal:
            width = self._console.width
            line = "\n".join(
                wrap(
                    line,
                    width,
                    subsequent_indent="  ",
                    break_long_words=False,
                    break_on_hyphens=False,
                )
            )
        self._draw(lambda: self._console.print(line, markup=False))

    def is_due(self) -> bool:
        """Return whether it is time to `show` again; never if it is quiet."""
        return not self._quiet and time.monotonic() - self._shown >= self._every

    def show(self, step: int, epoch: str, status: str, left: float) -> None:
        """Show the progress.

        Args:
            step: number of the step.
            epoch: text for the epoch.
            status: text for loss, speed and memory, two spaces between its parts.
            left: remaining time in seconds.
        """
        self._shown = time.monotonic()
        time_left = f"{timedelta(seconds=round(left))} left"
        if self._bar.disable:
            self.print(f"{epoch}  step {step}/{self._total}  {status}  {time_left}")
            return
        # In a narrow terminal rich would shorten every column, even the step numbers. So parts of
        # the status are left out here, whole ones.
        width = self._console.width - len(epoch) - 2 * len(str(self._total)) - MIN_BAR
        shown = time_left
        for part in status.split("  "):
            if len(shown) + 2 + len(part) > width:
                break
            shown += f"  {part}"
        self._bar.update(self._task, completed=step, description=epoch, status=shown)
        self._draw(self._bar.refresh)

    def _draw(self, draw: Callable[[], object]) -> None:
        """Write to the terminal; become quiet if that fails."""
        try:
            draw()
        except OSError:
            self._console.on_broken_pipe()
