"""How fast a run goes, what it waits for and what it holds: read around every step."""

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

from vitkit.data.loading.loader import Batch

MEGABYTE = 1e6


@dataclass
class TimingSnapshot:
    """What a meter shows, or the difference of two such readings. Times are in seconds.

    Attributes:
        moment: on a clock that only goes forward.
        steps: optimizer steps.
        images: handed over for them.
        waiting: for the loader to hand over a batch.
        working: from having a batch to the end of its step.
        cores: core-seconds that this process used in `working`.
    """

    moment: float = 0.0
    steps: int = 0
    images: int = 0
    waiting: float = 0.0
    working: float = 0.0
    cores: float = 0.0

    def __sub__(self, earlier: TimingSnapshot) -> TimingSnapshot:
        mine, before = dataclasses.astuple(self), dataclasses.astuple(earlier)
        return TimingSnapshot(*(now - then for now, then in zip(mine, before, strict=True)))

    @property
    def images_per_s(self) -> float:
        """Images a second."""
        return self.images / max(self.moment, 1e-9)

    @property
    def data_wait(self) -> float:
        """Part of the time that went into waiting for images, [0, 1]."""
        return self.waiting / max(self.moment, 1e-9)


class StepTimer:
    """Counts while a loop goes over `watched` batches and calls `step_done` after each."""

    def __init__(self) -> None:
        self._count = TimingSnapshot()
        self._handed = (0.0, 0.0)

    def watched(self, batches: Iterable[Batch]) -> Iterator[Batch]:
        """The same batches; how long each let us wait is counted."""
        arriving = iter(batches)
        while True:
            asked = time.perf_counter()
            batch = next(arriving, None)
            if batch is None:
                return
            self._handed = time.perf_counter(), time.process_time()
            self._count.waiting += self._handed[0] - asked
            yield batch

    def step_done(self, images: int) -> None:
        """The step of the batch handed over last has ended; it had so many images in all."""
        moment, cores = self._handed
        self._count.steps += 1
        self._count.images += images
        self._count.working += time.perf_counter() - moment
        self._count.cores += time.process_time() - cores

    @property
    def steps(self) -> int:
        """Steps counted so far."""
        return self._count.steps

    def read(self) -> TimingSnapshot:
        """What has been counted so far, now."""
        return dataclasses.replace(self._count, moment=time.perf_counter())


def memory(device: torch.device) -> dict[str, float]:
    """What this process holds, in MB: `memory` (resident), and on CUDA `cuda_memory` (the most)."""
    held = {"memory": _resident() / MEGABYTE}
    if device.type == "cuda":
        held["cuda_memory"] = torch.cuda.max_memory_allocated(device) / MEGABYTE
    return held


def _resident() -> float:
    """Bytes of resident memory: now, or, where the system does not tell, at most so far."""
    try:
        pages = int(Path("/proc/self/statm").read_bytes().split()[1])
    except OSError:
        most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return float(most if sys.platform == "darwin" else most * 1024)
    return float(pages * os.sysconf("SC_PAGE_SIZE"))
