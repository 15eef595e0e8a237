"""The TensorBoard files of a run: curves, histograms of weights, and images."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import numpy as np
from jaxtyping import UInt8
from torch import nn
from torch.utils.tensorboard import SummaryWriter

from vitkit.io.atomic import output_error
from vitkit.training.monitoring.histograms import histograms
from vitkit.training.monitoring.metric_files import Numbers, step_line
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


def tagged(values: Numbers) -> dict[str, float]:
    """Return values by their tags: `val_top1` becomes `val/top1`."""
    # TensorBoard groups by the first part
    return {TAGS.get(name, name.replace("_", "/", 1)): value for name, value in values.items()}


class TensorBoardFiles:
    """The files of a run for TensorBoard: one for its curves, and one for the values of its end.

    All methods but `close` raise `OutputError` where a file cannot be written.

    Args:
        run: its folder.
    """

    def __init__(self, run: RunFolder) -> None:
        self._run = run
        # Set by `open`, once it is certain that the run uses this folder.
        self._curves: SummaryWriter
        self._end: SummaryWriter | None = None
        self._open: list[SummaryWriter] = []

    def open(self, done: int, *, unvalidated: bool) -> None:
        """Open the file of the curves; the other one is opened at its first value.

        Args:
            done: steps done before, on resume.
            unvalidated: the epoch that ends with step `done` is validated again.
        """
        # on resume, TensorBoard ignores what an earlier session drew from this step on
        purge_step = None
        if done:
            purge_step = done if unvalidated else done + 1
        with self._errors():
            self._curves = SummaryWriter(str(self._run.tensorboard), purge_step=purge_step)
        self._open.append(self._curves)
        # the values of the step itself were dropped with its validation
        if unvalidated:
            self.add_scalars(tagged(step_line(self._run, done)), done)

    def add_scalars(self, values: Mapping[str, float], step: int, *, at_end: bool = False) -> None:
        """Add a point to the curve of each tag; `at_end` for values of the end of the run."""
        with self._errors():
            writer = self._writer(at_end)
            for tag, value in values.items():
                writer.add_scalar(tag, value, step)

    def add_histograms(self, model: nn.Module, step: int) -> None:
        """Add a histogram of every matrix of the model."""
        with self._errors():
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

    def add_image(
        self, tag: str, pixels: UInt8[np.ndarray, "H W 3"], step: int, *, at_end: bool = False
    ) -> None:
        """Add an image, (H, W, 3) uint8 RGB; `at_end` if it is made at the end of the run."""
        with self._errors():
            self._writer(at_end).add_image(tag, pixels, step, dataformats="HWC")

    def flush(self) -> None:
        """Write the values that TensorBoard has buffered."""
        with self._errors():
            self._curves.flush()

    def close(self) -> None:
        """Write and close the files. Raises `OSError` where that fails."""
        for writer in self._open:
            writer.close()

    def _writer(self, at_end: bool) -> SummaryWriter:
        """Return the writer of the curves, or the writer for the end of a run."""
        if not at_end:
            return self._curves
        # The file of an earlier end of the run is replaced, or its values would be shown twice.
        if self._end is None:
            for earlier in self._run.tensorboard.glob(f"events.out.tfevents.*{END}"):
                earlier.unlink()
            self._end = SummaryWriter(str(self._run.tensorboard), filename_suffix=END)
            self._open.append(self._end)
        return self._end

    @contextmanager
    def _errors(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise output_error(self._run.tensorboard, error) from error
