"""Where a run says what it does: the terminal, train.log, metrics files, TensorBoard, services."""

from __future__ import annotations

import math
from datetime import datetime
from types import TracebackType
from typing import Any

import numpy as np
from jaxtyping import UInt8
from torch import nn
from torch.utils.tensorboard import SummaryWriter

from vitkit.io.atomic import output_error
from vitkit.training.config.train_config import TrackerName
from vitkit.training.monitoring.image_grids import histograms
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
"""What TensorBoard calls the columns that are of no split; `val_top1` is `val/top1` there."""

END = ".end"
"""Ends the name of TensorBoard's file with what the end of a run draws."""


class RunLog:
    """Open while a run lasts.

    Args:
        run: where the files go.
        total: steps of the whole run, for the progress bar.
        done: steps done before, on resume.
        unvalidated: the epoch that ends with step `done` is validated again.
        quiet: nothing on the terminal; the files are written all the same.
    """

    def __init__(
        self,
        run: RunFolder,
        *,
        total: int,
        done: int = 0,
        unvalidated: bool = False,
        quiet: bool = False,
    ) -> None:
        self._run = run
        self.display = Display(total=total, done=done, quiet=quiet)
        self._trackers: list[Tracker] = []
        try:
            self._log = run.log.open("a", encoding="utf-8")
            self._curves = SummaryWriter(
                str(run.tensorboard), purge_step=done + (not unvalidated) if done else None
            )
            self._end: SummaryWriter | None = None
        except OSError as error:
            raise output_error(run.root, error) from error
        if unvalidated:  # the points of the step itself went with those of its validation
            self._curve(step_line(run, done), done, self._curves)

    def __enter__(self) -> RunLog:
        self.display.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.display.stop()
        for tracker in [*self._trackers]:
            try:
                tracker.close(failed=error is not None)
            except tracker.failures() as failure:
                self._lose(tracker, failure)
        try:
            self._curves.close()
            if self._end is not None:
                self._end.close()
            self._log.close()
        except OSError as failure:
            if error is None:
                raise output_error(self._run.root, failure) from failure

    def lasts(self, total: int) -> None:
        """How many steps the run has, as it is known now."""
        self.display.lasts(total)

    def track(self, names: tuple[TrackerName, ...], settings: dict[str, Any]) -> None:
        """Tell these services, too. Raises `SettingError` where one cannot start."""
        self._trackers = open_trackers(names, self._run, settings)

    def say(self, line: str) -> None:
        """One line for the terminal and, with the time, for train.log."""
        self.display.say(line)
        try:
            self._log.write(f"{datetime.now().isoformat(timespec='seconds')} {line}\n")
            self._log.flush()
        except OSError as error:
            raise output_error(self._run.log, error) from error

    def step(self, place: Numbers, values: Numbers) -> None:
        """What a step came to; `place` is its epoch and step."""
        add_line(self._run, "step", {**place, **values})
        self._curve(values, int(place["step"]), self._curves)

    def epoch(self, place: Numbers, values: Numbers) -> None:
        """A row of metrics.csv. Curves are drawn of what the steps did not draw already."""
        add_row(self._run, {**place, **values})
        add_line(self._run, "epoch", {**place, **values})
        drawn = {name: v for name, v in values.items() if name.startswith("val_")}
        self._curve(drawn, int(place["step"]), self._curves)

    def scored(self, split: str, step: int, values: Numbers) -> None:
        """The scores of a split that is looked at once: the test split, or any by a probe."""
        named = {f"{split}_{name}": value for name, value in values.items()}
        add_line(self._run, split, {"step": step, **named})
        self._curve(named, step, self._end_curves())

    def weights(self, model: nn.Module, step: int) -> None:
        """A histogram of every matrix of the model."""
        try:
            for name, found in histograms(model):
                self._curves.add_histogram_raw(
                    f"weights/{name}",
                    min=found.sample.min().item(),
                    max=found.sample.max().item(),
                    num=found.sample.numel(),
                    sum=found.sample.sum().item(),
                    sum_squares=found.sample.square().sum().item(),
                    bucket_limits=found.edges,
                    bucket_counts=found.counts,
                    global_step=step,
                )
        except OSError as error:
            raise output_error(self._run.tensorboard, error) from error

    def image(
        self, tag: str, pixels: UInt8[np.ndarray, "H W 3"], step: int, *, at_end: bool = False
    ) -> None:
        """An image for TensorBoard; `at_end` where the end of the run makes it."""
        curves = self._end_curves() if at_end else self._curves
        try:
            curves.add_image(tag, pixels, step, dataformats="HWC")
        except OSError as error:
            raise output_error(self._run.tensorboard, error) from error

    def flush(self) -> None:
        """Hand TensorBoard's points to the file system; a thread of its own writes them in time.

        What a state counts as done is not done again, so its points must be there before it.
        """
        try:
            self._curves.flush()
        except OSError as error:
            raise output_error(self._run.tensorboard, error) from error

    def _end_curves(self) -> SummaryWriter:
        """TensorBoard's file of what the end of a run draws; it replaces that of an earlier end."""
        if self._end is None:
            try:
                for earlier in self._run.tensorboard.glob(f"*{END}"):
                    earlier.unlink()
                self._end = SummaryWriter(str(self._run.tensorboard), filename_suffix=END)
            except OSError as error:
                raise output_error(self._run.tensorboard, error) from error
        return self._end

    def _curve(self, values: Numbers, step: int, curves: SummaryWriter) -> None:
        tagged = {TAGS.get(name, name.replace("_", "/", 1)): v for name, v in values.items()}
        try:
            for tag, value in tagged.items():
                curves.add_scalar(tag, value, step)
        except OSError as error:
            raise output_error(self._run.tensorboard, error) from error
        finite = {tag: value for tag, value in tagged.items() if math.isfinite(value)}
        for tracker in [*self._trackers]:
            try:
                tracker.log(finite, step)
            except tracker.failures() as failure:
                self._lose(tracker, failure)

    def _lose(self, tracker: Tracker, failure: Exception) -> None:
        self._trackers.remove(tracker)
        self.say(f"{tracker.name} failed: {failure}; the run goes on without it")


class Silence(RunLog):
    """Takes whatever a log takes and does nothing: for the processes that are not the first."""

    def __init__(self) -> None:
        """Open nothing."""

    def __getattribute__(self, name: str) -> Any:
        if name.startswith("__"):
            return object.__getattribute__(self, name)
        return None if name == "state_dict" else self

    def __call__(self, *args: object, **settings: object) -> None:
        """Nothing."""

    def __enter__(self) -> RunLog:
        return self

    def __exit__(self, *error: object) -> None:
        """Nothing."""
