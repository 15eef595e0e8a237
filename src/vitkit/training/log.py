"""Where a run says what it does: the terminal, train.log, metrics.csv and TensorBoard."""

from __future__ import annotations

import csv
import os
import sys
from collections.abc import Mapping
from datetime import datetime
from types import TracebackType

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeRemainingColumn,
)
from torch.utils.tensorboard import SummaryWriter

from vitkit.training.run_folder import RunFolder
from vitkit.weights.files import output_error, write_bytes


class _Terminal(Console):
    """A console that falls silent when its reader leaves (`| head`); the run goes on."""

    def on_broken_pipe(self) -> None:
        self.quiet = True
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115 - kept to the end of the process


class RunLog:
    """Open while a run lasts.

    Args:
        run: where the files go.
        total: steps of the whole run, for the progress bar.
        done: steps done before, on resume.
        quiet: nothing on the terminal; the files are written all the same.
    """

    def __init__(self, run: RunFolder, *, total: int, done: int = 0, quiet: bool = False) -> None:
        self._run = run
        self._console = _Terminal(quiet=quiet, highlight=False, soft_wrap=True)
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[status]}"),
            TimeRemainingColumn(),
            console=self._console,
            transient=True,
            disable=quiet or not self._console.is_terminal,
        )
        self._task: TaskID = self._progress.add_task("", total=total, completed=done, status="")
        try:
            self._log = run.log.open("a", encoding="utf-8")
            self._curves = SummaryWriter(
                str(run.tensorboard), purge_step=done + 1 if done else None
            )
        except OSError as error:
            raise output_error(run.root, error) from error

    def __enter__(self) -> RunLog:
        self._progress.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._progress.stop()
        try:
            self._curves.close()
            self._log.close()
        except OSError as failure:
            if error is None:
                raise output_error(self._run.root, failure) from failure

    def say(self, line: str) -> None:
        """One line for the terminal and, with the time, for train.log."""
        self._console.print(line, markup=False)
        try:
            self._log.write(f"{datetime.now().isoformat(timespec='seconds')} {line}\n")
            self._log.flush()
        except OSError as error:
            raise output_error(self._run.log, error) from error

    def advance(self, epoch: str, status: str) -> None:
        """One step further on the progress bar."""
        self._progress.update(self._task, advance=1, description=epoch, status=status)

    def curve(self, values: Mapping[str, float], step: int) -> None:
        """Points for TensorBoard; tags such as `train/loss`."""
        try:
            for tag, value in values.items():
                self._curves.add_scalar(tag, value, step)
        except OSError as error:
            raise output_error(self._run.tensorboard, error) from error

    def row(self, values: Mapping[str, float | int]) -> None:
        """One row of metrics.csv; the first row writes the header."""
        new = not self._run.metrics.exists()
        try:
            with self._run.metrics.open("a", newline="", encoding="utf-8") as file:
                writer = csv.writer(file, lineterminator="\n")
                if new:
                    writer.writerow(values)
                writer.writerow(f"{v:.6g}" if isinstance(v, float) else v for v in values.values())
        except OSError as error:
            raise output_error(self._run.metrics, error) from error


def drop_rows_after(run: RunFolder, step: int) -> None:
    """Forget the rows of metrics.csv that lie beyond `step`: a resumed run writes them again."""
    if not run.metrics.exists():
        return
    header, *rows = run.metrics.read_text(encoding="utf-8").splitlines()
    place = header.split(",").index("step")
    kept = [row for row in rows if int(row.split(",")[place]) <= step]
    write_bytes(run.metrics, "\n".join([header, *kept, ""]).encode())
