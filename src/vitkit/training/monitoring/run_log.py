"""The log of a run: terminal, train.log, metrics files, TensorBoard and experiment trackers."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable
from datetime import datetime, timedelta
from functools import wraps
from textwrap import TextWrapper
from types import TracebackType
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec

import numpy as np
from jaxtyping import UInt8
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
from rich.table import Column
from torch import nn

from vitkit.errors import Interrupted
from vitkit.io.atomic import output_error
from vitkit.training.config.meaning import TrackerName
from vitkit.training.monitoring.trackers import Numbers, Tracker, add_line, add_row, open_trackers
from vitkit.training.run_folder import RunFolder

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter

P = ParamSpec("P")


TAGS = {
    "images_per_s": "perf/images_per_s",
    "data_wait": "perf/data_wait",
    "memory": "system/memory",
    "cuda_memory": "system/cuda_memory",
    "lr": "lr",
}
"""TensorBoard tags of the columns that do not belong to a split; `val_top1` is `val/top1` there."""
SAMPLED = 10_000
"""Weights of a parameter in its histogram, evenly spaced."""


def _first_process_only(
    method: Callable[Concatenate[RunLog, P], None],
) -> Callable[Concatenate[RunLog, P], None]:
    """Decorate a method of `RunLog` that does nothing except in the first process of a run."""

    @wraps(method)
    def filtered(self: RunLog, /, *args: P.args, **kwargs: P.kwargs) -> None:
        if not self.writes:
            return
        try:
            method(self, *args, **kwargs)
        except OSError as error:
            raise output_error(self._run.root, error) from error

    return filtered


class RunLog:
    """Context manager: terminal, files and trackers of a run. Its methods raise `OutputError`.

    TensorBoard gets curves, histograms and images where the extra `tensorboard` is installed.

    Args:
        run: folder of the files.
        total: steps of the whole run, for the progress bar.
        done: steps done before, on resume.
        quiet: print nothing on the terminal; the files are still written.
        writes: False in every process but the first: nothing is opened, printed or written.
    """

    def __init__(
        self,
        run: RunFolder,
        *,
        total: int,
        done: int = 0,
        quiet: bool = False,
        writes: bool = True,
    ) -> None:
        self.writes = writes
        self.display = Display(total=total, done=done, quiet=quiet or not writes)
        self._run = run
        self._trackers: list[Tracker] = []
        self._tensorboard: SummaryWriter | None = None
        if not writes:  # its methods do nothing, and no file is opened
            return
        self._done = done
        try:
            self._log = run.log.open("a", encoding="utf-8")
        except OSError as error:
            raise output_error(run.root, error) from error

    def __enter__(self) -> RunLog:
        self._hook, threading.excepthook = threading.excepthook, self._report
        if self.writes:
            self.display.start()
        return self

    def _report(self, failed: threading.ExceptHookArgs) -> None:
        # the thread of TensorBoard, which raises the same error again where the run writes
        is_of_it = type(failed.thread).__module__.startswith("tensorboard")
        if not (is_of_it and isinstance(failed.exc_value, OSError)):
            self._hook(failed)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        threading.excepthook = self._hook
        if not self.writes:
            return
        self.display.stop()
        # A copy of the list: a tracker that fails is removed from it.
        for tracker in list(self._trackers):
            try:
                tracker.close(failed=error is not None)
            except Exception as failure:  # noqa: BLE001 - whatever a service raises
                self._drop_tracker(tracker, failure)
        try:
            if self._tensorboard is not None:
                self._tensorboard.close()
            self._log.close()
        except OSError as failure:
            if error is None:  # an error of the run itself is more important
                raise output_error(self._run.root, failure) from failure

    @_first_process_only
    def open_curves(self) -> None:
        """Open TensorBoard's file, once it is certain that the run uses this folder."""
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError:
            return
        # on resume, TensorBoard ignores what an earlier session drew after this step
        purge_step = self._done + 1 if self._done else None
        self._tensorboard = SummaryWriter(str(self._run.tensorboard), purge_step=purge_step)

    @_first_process_only
    def set_total(self, total: int) -> None:
        """Set the number of steps of the run."""
        self.display.set_total(total)

    @_first_process_only
    def track(self, names: tuple[TrackerName, ...], settings: dict[str, Any]) -> None:
        """Log to these services, too. Raises `SettingError` if one cannot start."""
        self._trackers = open_trackers(names, self._run, settings)

    @_first_process_only
    def info(self, line: str, *, on_terminal: bool = True) -> None:
        """Print a line on the terminal and, with the time, to train.log."""
        if on_terminal:
            self.display.print(line)
        self._log.write(f"{datetime.now().isoformat(timespec='seconds')} {line}\n")
        self._log.flush()

    @_first_process_only
    def step(self, position: Numbers, values: Numbers) -> None:
        """Log the values of a step; `position` is its epoch and step."""
        add_line(self._run, "step", {**position, **values})
        self._add_scalars(values, int(position["step"]))

    @_first_process_only
    def epoch(self, position: Numbers, values: Numbers) -> None:
        """Log the values of an epoch; curves get those of validation, which steps do not have."""
        add_row(self._run, {**position, **values})
        add_line(self._run, "epoch", {**position, **values})
        validation = {name: v for name, v in values.items() if name.startswith("val_")}
        self._add_scalars(validation, int(position["step"]))

    @_first_process_only
    def scored(self, split: str, step: int, values: Numbers) -> None:
        """Log the scores of a split that is evaluated once: test, or any split of a probe."""
        named = {f"{split}_{name}": value for name, value in values.items()}
        add_line(self._run, split, {"step": step, **named})
        self._add_scalars(named, step)

    @_first_process_only
    def weights(self, model: nn.Module, step: int) -> None:
        """Log a histogram of every matrix of the model, from a sample of its weights."""
        for name, parameter in model.named_parameters():
            # biases and norms are too small for a histogram
            if self._tensorboard is not None and parameter.ndim >= 2:
                weights = parameter.detach().flatten()
                sample = weights[:: max(1, weights.numel() // SAMPLED)].float()
                self._tensorboard.add_histogram(f"weights/{name}", sample, step)

    @_first_process_only
    def image(self, tag: str, pixels: UInt8[np.ndarray, "H W 3"], step: int) -> None:
        """Log an image to TensorBoard."""
        if self._tensorboard is not None:
            self._tensorboard.add_image(tag, pixels, step, dataformats="HWC")

    @_first_process_only
    def flush(self) -> None:
        """Write the values that TensorBoard has buffered.

        Steps that a state counts as done are not done again, so their values must be written before
        the state.
        """
        if self._tensorboard is not None:
            self._tensorboard.flush()

    def _add_scalars(self, values: Numbers, step: int) -> None:
        """Add values to curves of TensorBoard and of the trackers."""
        # TensorBoard groups by the first part of a name: `val_top1` becomes `val/top1`
        by_tag = {TAGS.get(name, name.replace("_", "/", 1)): v for name, v in values.items()}
        if self._tensorboard is not None:
            for tag, value in by_tag.items():
                self._tensorboard.add_scalar(tag, value, step)
        # The services refuse numbers that are not finite.
        finite = {tag: value for tag, value in by_tag.items() if math.isfinite(value)}
        for tracker in list(self._trackers):
            try:
                tracker.log(finite, step)
            except Exception as failure:  # noqa: BLE001 - whatever a service raises
                self._drop_tracker(tracker, failure)

    def _drop_tracker(self, tracker: Tracker, failure: Exception) -> None:
        if isinstance(failure, Interrupted):  # a signal, not the service
            raise failure
        # a service that failed once may delay every step
        self._trackers.remove(tracker)
        self.info(f"{tracker.name} failed: {failure}; the run continues without it")


# Output to the terminal: a progress bar, or lines of text where there is no terminal.

REFRESH = 0.5
"""Seconds between two updates of the bar. No thread draws it, because that would slow the steps."""
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
    """A console that becomes quiet if its reader has left, so that the run continues."""

    def on_broken_pipe(self) -> None:
        """Print nothing any more; all lines are in train.log."""
        self.quiet = True


class Display:
    """A progress bar, or lines of text if there is no terminal.

    Args:
        total: steps of the whole run.
        done: steps done before, on resume.
        quiet: print nothing.
    """

    def __init__(self, *, total: int, done: int, quiet: bool) -> None:
        self._console = _Console(quiet=quiet, highlight=False, emoji=False, soft_wrap=True)
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
            wrapper = TextWrapper(
                max(self._console.width, MIN_BAR),  # COLUMNS=0 in some editors
                subsequent_indent="  ",
                break_long_words=False,
                break_on_hyphens=False,
            )
            line = wrapper.fill(line)
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
