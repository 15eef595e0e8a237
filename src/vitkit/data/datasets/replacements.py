"""Images that can no longer be read while a run is on, and those that take their places."""

from __future__ import annotations

import dataclasses
import time
from dataclasses import dataclass, field

import numpy as np
from jaxtyping import Int, Int64, UInt8

from vitkit.data.datasets.dataset import Dataset, FileSplit, Split, SplitOver, StoredSplit
from vitkit.data.sources.remote_shards import RemoteTars
from vitkit.errors import ImageError

MOST_TRIED = 100
"""Images that are tried in the place of one; if none can be read, the disk is gone."""
LONGEST = 5.0
"""Seconds after which no other one is tried."""


@dataclass(frozen=True, eq=False)
class StandIns(SplitOver):
    """A split that reads another image of the same class where one cannot be read.

    It is the next one of its class in the split's order, so labels and their counts stay as they
    are, and which image it is depends on nothing but which ones can be read.
    """

    _failed: list[str] = field(default_factory=list, repr=False)

    def read(self, index: int) -> UInt8[np.ndarray, "H W C"]:
        try:
            return self.split.read(index)
        except ImageError as error:
            self._failed.append(f"{error.name}: {error.reason}: {error.detail}")
            return self._another(index, error)

    def _another(self, index: int, error: ImageError) -> UInt8[np.ndarray, "H W C"]:
        alike = np.flatnonzero(self.labels == self.labels[index])
        after = np.roll(alike, -1 - int(np.searchsorted(alike, index)))[:-1]
        began = time.monotonic()
        for other in after[:MOST_TRIED].tolist():
            try:
                return self.split.read(other)
            except ImageError:
                if time.monotonic() - began > LONGEST:
                    break
        raise error

    def failed(self) -> tuple[str, ...]:
        """What could not be read since this was last asked, a line each."""
        said = tuple(self._failed)
        self._failed.clear()
        return said

    def subset(self, indices: Int[np.ndarray, " M"]) -> StandIns:
        return StandIns(self.split.subset(indices))

    def relabelled(self, labels: Int64[np.ndarray, " N"]) -> StandIns:
        return StandIns(self.split.relabelled(labels))


def with_stand_ins(dataset: Dataset) -> Dataset:
    """The data set, other images read in the place of those that can no longer be.

    Images in memory or in a cache cannot go missing, and those of remote shards only together.
    """
    splits = {
        name: StandIns(split) if _may_go_missing(split) else split
        for name, split in dataset.splits.items()
    }
    return dataclasses.replace(dataset, splits=splits)


def failures(split: Split) -> tuple[str, ...]:
    """What of a split could not be read since this was last asked, a line each."""
    return split.failed() if isinstance(split, StandIns) else ()


def _may_go_missing(split: Split) -> bool:
    if isinstance(split, StoredSplit):
        return not isinstance(split.store, RemoteTars)
    return isinstance(split, FileSplit)
