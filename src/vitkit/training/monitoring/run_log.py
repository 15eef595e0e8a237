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

from vitkit.io.atomic import output_error
from vitkit.training.config.field_types import TrackerName
from vitkit.training.monitoring.metric_files import Numbers, add_line, add_row
from vitkit.training.monitoring.tensorboard import TensorBoardFiles, tagged
from vitkit.training.monitoring.terminal import Display
from vitkit.training.monitoring.trackers import Tracker, open_trackers
from vitkit.training.run_folder import RunFolder

P = ParamSpec("P")


def _first_process_only(
    method: Callable[Concatenate[RunLog, P], None],
) -> Callable[Concatenate[RunLog, P], None]:
    """Decorate a method of `RunLog` that does nothing except in the first process of a run."""

    @wraps(method)
    def filtered(self: RunLog, /, *args: P.args, **kwargs: P.kwargs) -> None:
        if self.writes:
            method(self, *args, **kwargs)

    return filtered


class RunLog:
    """Context manager: terminal, files and trackers of a run. Its methods raise `OutputError`.

    Args:
        run: folder of the files.
        total: steps of the whole run, for the progress bar.
        done: steps done before, on resume.
        unvalidated: the epoch that ends with step `done` is validated again.
        quiet: print nothing on the terminal; the files are still written.
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
        self._tensorboard = TensorBoardFiles(run)
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
            self._tensorboard.close()
            self._log.close()
        except OSError as failure:
            if error is None:  # an error of the run itself is more important
                raise output_error(self._run.root, failure) from failure

    @_first_process_only
    def open_curves(self) -> None:
        """Open TensorBoard's file, once it is certain that the run uses this folder.

        Raises:
            OutputError: it cannot be written.
        """
        self._tensorboard.open(self._done, unvalidated=self._unvalidated)

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
        self._add_scalars(named, step, at_end=True)

    @_first_process_only
    def weights(self, model: nn.Module, step: int) -> None:
        """Log a histogram of every matrix of the model."""
        self._tensorboard.add_histograms(model, step)

    @_first_process_only
    def image(
        self, tag: str, pixels: UInt8[np.ndarray, "H W 3"], step: int, *, at_end: bool = False
    ) -> None:
        """Log an image to TensorBoard; `at_end` if it is made at the end of the run."""
        self._tensorboard.add_image(tag, pixels, step, at_end=at_end)

    @_first_process_only
    def flush(self) -> None:
        """Write the values that TensorBoard has buffered.

        Steps that a state counts as done are not done again, so their values must be written before
        the state.
        """
        self._tensorboard.flush()

    def _add_scalars(self, values: Numbers, step: int, *, at_end: bool = False) -> None:
        """Add values to curves of TensorBoard and of the trackers."""
        by_tag = tagged(values)
        self._tensorboard.add_scalars(by_tag, step, at_end=at_end)
        # The services refuse numbers that are not finite.
        finite = {tag: value for tag, value in by_tag.items() if math.isfinite(value)}
        for tracker in list(self._trackers):
            try:
                tracker.log(finite, step)
            except tracker.failures() as failure:
                self._drop_tracker(tracker, failure)

    def _drop_tracker(self, tracker: Tracker, failure: Exception) -> None:
        # a service that failed once may delay every step
        self._trackers.remove(tracker)
        self.info(f"{tracker.name} failed: {failure}; the run continues without it")
