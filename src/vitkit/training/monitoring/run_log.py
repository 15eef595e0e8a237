"""The log of a run: terminal, train.log, metrics files, TensorBoard and experiment trackers."""

from __future__ import annotations

import math
from collections.abc import Callable
from datetime import datetime
from functools import wraps
from types import TracebackType
from typing import Any, Concatenate, ParamSpec

import numpy as np
from jaxtyping import UInt8
from torch import nn
from torch.utils.tensorboard import SummaryWriter

from vitkit.io.atomic import output_error
from vitkit.training.config.field_types import TrackerName
from vitkit.training.monitoring.histograms import histograms
from vitkit.training.monitoring.metric_files import Numbers, add_line, add_row, step_line
from vitkit.training.monitoring.terminal import Display
from vitkit.training.monitoring.trackers import Tracker, open_trackers
from vitkit.training.run_folder import RunFolder

TAGS = {
    "images_per_s": "perf/images_per_s",
    "data_wait": "perf/data_wait",
    "memory": "system/memory",
    "cuda_memory": "system/cuda_memory",
    "lr": "lr",
}
"""TensorBoard tags of the columns that do not belong to a split; `val_top1` is `val/top1` there."""

END = ".end"
"""Suffix of the TensorBoard file for values from the end of a run."""

P = ParamSpec("P")


def _first_process_only(
    method: Callable[Concatenate[RunLog, P], None],
) -> Callable[Concatenate[RunLog, P], None]:
    """Decorate a method of `RunLog` that must do nothing in the other processes of a run."""

    @wraps(method)
    def filtered(self: RunLog, /, *args: P.args, **kwargs: P.kwargs) -> None:
        if self.writes:
            method(self, *args, **kwargs)

    return filtered


class RunLog:
    """The log of a run, which is open while the run lasts. Its methods raise `OutputError`.

    Args:
        run: folder of the files.
        total: steps of the whole run, for the progress bar.
        done: steps done before, on resume.
        unvalidated: the epoch that ends with step `done` is validated again.
        quiet: print nothing on the terminal; the files are written all the same.
        writes: False in every process but the first: nothing is opened, printed or written.
    """

    def __init__(
        self,
        run: RunFolder,
        *,
        total: int,
        done: int = 0,
        unvalidated: bool = False,
        quiet: bool = False,
        writes: bool = True,
    ) -> None:
        self.writes = writes
        self.display = Display(total=total, done=done, quiet=quiet or not writes)
        self._run = run
        self._trackers: list[Tracker] = []
        if not writes:  # its methods do nothing, and no file is opened
            return
        self._done = done
        self._unvalidated = unvalidated
        self._curves: SummaryWriter
        self._end: SummaryWriter | None = None
        self._writers: list[SummaryWriter] = []
        """TensorBoard's open files: `_curves` and `_end`."""
        try:
            self._log = run.log.open("a", encoding="utf-8")
        except OSError as error:
            raise output_error(run.root, error) from error

    def __enter__(self) -> RunLog:
        if self.writes:
            self.display.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if not self.writes:
            return
        self.display.stop()
        # A copy of the list: a tracker that fails is removed from it.
        for tracker in list(self._trackers):
            try:
                tracker.close(failed=error is not None)
            except tracker.failures() as failure:
                self._drop_tracker(tracker, failure)
        try:
            for writer in self._writers:
                writer.close()
            self._log.close()
        except OSError as failure:
            if error is None:  # an error of the run itself is more important
                raise output_error(self._run.root, failure) from failure

    @_first_process_only
    def open_curves(self) -> None:
        """Open TensorBoard's file, once it is certain that the run goes on in its folder.

        Raises:
            OutputError: it cannot be written.
        """
        run, done = self._run, self._done
        # on resume, TensorBoard ignores what an earlier session drew from this step on
        purge_step = None
        if done:
            purge_step = done if self._unvalidated else done + 1
        try:
            self._curves = SummaryWriter(str(run.tensorboard), purge_step=purge_step)
        except OSError as error:
            raise output_error(run.tensorboard, error) from error
        self._writers.append(self._curves)
        # the values of the step itself were dropped with those of its validation
        if self._unvalidated:
            self._curve(step_line(run, done), done, self._curves)

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
        try:
            self._log.write(f"{datetime.now().isoformat(timespec='seconds')} {line}\n")
            self._log.flush()
        except OSError as error:
            raise output_error(self._run.log, error) from error

    @_first_process_only
    def step(self, position: Numbers, values: Numbers) -> None:
        """Log the values of a step; `position` is its epoch and step."""
        add_line(self._run, "step", {**position, **values})
        self._curve(values, int(position["step"]), self._curves)

    @_first_process_only
    def epoch(self, position: Numbers, values: Numbers) -> None:
        """Log the values of an epoch; curves get those of validation, which steps do not have."""
        add_row(self._run, {**position, **values})
        add_line(self._run, "epoch", {**position, **values})
        validation = {name: v for name, v in values.items() if name.startswith("val_")}
        self._curve(validation, int(position["step"]), self._curves)

    @_first_process_only
    def scored(self, split: str, step: int, values: Numbers) -> None:
        """Log the scores of a split that is evaluated once: test, or any split by a probe."""
        named = {f"{split}_{name}": value for name, value in values.items()}
        add_line(self._run, split, {"step": step, **named})
        self._curve(named, step, self._end_curves())

    @_first_process_only
    def weights(self, model: nn.Module, step: int) -> None:
        """Log a histogram of every matrix of the model."""
        try:
            for name, histogram in histograms(model):
                self._curves.add_histogram_raw(
                    f"weights/{name}",
                    min=histogram.sample.min().item(),
                    max=histogram.sample.max().item(),
                    num=histogram.sample.numel(),
                    sum=histogram.sample.sum().item(),
                    sum_squares=histogram.sample.square().sum().item(),
                    bucket_limits=histogram.edges,
                    bucket_counts=histogram.counts,
                    global_step=step,
                )
        except OSError as error:
            raise output_error(self._run.tensorboard, error) from error

    @_first_process_only
    def image(
        self, tag: str, pixels: UInt8[np.ndarray, "H W 3"], step: int, *, at_end: bool = False
    ) -> None:
        """Log an image to TensorBoard; `at_end` if it is made at the end of the run."""
        curves = self._end_curves() if at_end else self._curves
        try:
            curves.add_image(tag, pixels, step, dataformats="HWC")
        except OSError as error:
            raise output_error(self._run.tensorboard, error) from error

    @_first_process_only
    def flush(self) -> None:
        """Write the values that TensorBoard has buffered.

        Steps that a state counts as done are not done again, so their values must be written before
        the state.
        """
        try:
            self._curves.flush()
        except OSError as error:
            raise output_error(self._run.tensorboard, error) from error

    def _end_curves(self) -> SummaryWriter:
        """Open TensorBoard's file for the end of a run; it replaces that of an earlier end."""
        if self._end is None:
            try:
                for earlier in self._run.tensorboard.glob(f"*{END}"):
                    earlier.unlink()
                self._end = SummaryWriter(str(self._run.tensorboard), filename_suffix=END)
                self._writers.append(self._end)
            except OSError as error:
                raise output_error(self._run.tensorboard, error) from error
        return self._end

    def _curve(self, values: Numbers, step: int, curves: SummaryWriter) -> None:
        """Add values to curves of TensorBoard and of the trackers."""
        # `val_top1` becomes `val/top1`: TensorBoard groups by the first part
        tagged = {TAGS.get(name, name.replace("_", "/", 1)): v for name, v in values.items()}
        try:
            for tag, value in tagged.items():
                curves.add_scalar(tag, value, step)
        except OSError as error:
            raise output_error(self._run.tensorboard, error) from error
        # The services refuse numbers that are not finite.
        finite = {tag: value for tag, value in tagged.items() if math.isfinite(value)}
        for tracker in list(self._trackers):
            try:
                tracker.log(finite, step)
            except tracker.failures() as failure:
                self._drop_tracker(tracker, failure)

    def _drop_tracker(self, tracker: Tracker, failure: Exception) -> None:
        # a service that has failed once may hold up every step
        self._trackers.remove(tracker)
        self.info(f"{tracker.name} failed: {failure}; the run continues without it")
