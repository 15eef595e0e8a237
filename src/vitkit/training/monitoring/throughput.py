"""Speed, waiting time and memory of a run, measured around every step."""

from __future__ import annotations

import dataclasses
import os
import resource
import sys
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from vitkit.data.loading.batch import Batch

MEGABYTE = 1e6


@dataclass
class TimingSnapshot:
    """Totals of a `StepTimer` at one moment, or the difference of two of them; times in seconds.

    Attributes:
        moment: the time, on a clock that never goes back; in a difference, the duration.
        steps: optimizer steps.
        images: images in these steps.
        waiting: time spent waiting for batches of the loader.
    """

    moment: float = 0.0
    steps: int = 0
    images: int = 0
    waiting: float = 0.0

    def __sub__(self, earlier: TimingSnapshot) -> TimingSnapshot:
        return TimingSnapshot(
            self.moment - earlier.moment,
            self.steps - earlier.steps,
            self.images - earlier.images,
            self.waiting - earlier.waiting,
        )

    @property
    def images_per_s(self) -> float:
        """The images per second."""
        return self.images / max(self.moment, 1e-9)

    @property
    def data_wait(self) -> float:
        """The share of the time spent waiting for images, [0, 1]."""
        return self.waiting / max(self.moment, 1e-9)


class StepTimer:
    """A timer of a loop over `watched` batches that calls `step_done` after each of them."""

    def __init__(self) -> None:
        self._totals = TimingSnapshot()

    def watched(self, batches: Iterable[Batch]) -> Iterator[Batch]:
        """Yield the batches, and count the time spent waiting for each."""
        iterator = iter(batches)
        while True:
            start = time.perf_counter()
            batch = next(iterator, None)
            if batch is None:
                return
            self._totals.waiting += time.perf_counter() - start
            yield batch

    def step_done(self, images: int) -> None:
        """Count the step of the last batch; `images` is its size over all processes."""
        self._totals.steps += 1
        self._totals.images += images

    @property
    def steps(self) -> int:
        """The number of steps so far."""
        return self._totals.steps

    def read(self) -> TimingSnapshot:
        """Return the totals at this moment."""
        # a copy: the totals change with the next step
        return dataclasses.replace(self._totals, moment=time.perf_counter())


def memory(device: torch.device) -> dict[str, float]:
    """Return the memory of this process in MB: `memory` (resident), and `cuda_memory` (peak)."""
    megabytes = {"memory": _resident() / MEGABYTE}
    if device.type == "cuda":
        megabytes["cuda_memory"] = torch.cuda.max_memory_allocated(device) / MEGABYTE
    return megabytes


def _resident() -> float:
    """Return the bytes of resident memory, or their peak on a system without /proc."""
    try:
        # The second number of statm is the resident set.
        pages = int(Path("/proc/self/statm").read_bytes().split()[1])
    except OSError:
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        if sys.platform == "darwin":  # it counts bytes, other systems count kilobytes
            return float(peak)
        return float(peak * 1024)
    return float(pages * os.sysconf("SC_PAGE_SIZE"))
