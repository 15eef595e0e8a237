"""Replacement of images that become unreadable during a run by others of the same class."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeVar

import numpy as np
from jaxtyping import Int, Int64, UInt8

from vitkit.data.datasets.dataset import Dataset
from vitkit.data.datasets.split import ImageFiles, ReducedImage, Reduction, Split, WrappedSplit
from vitkit.errors import ImageError

MOST_TRIED = 100
"""Replacements that are tried for one image; if none can be read, the disk is gone."""
LONGEST_SEARCH = 5.0
"""Seconds after which no other replacement is tried."""
Image = TypeVar("Image")


@dataclass(frozen=True, eq=False)
class ReplacingSplit(WrappedSplit):
    """A split that reads another image of the same class where one cannot be read.

    The replacement is the next image of the class in the split's order. Labels and their counts
    stay as they are, and the choice depends only on which images can be read.
    """

    _failures: list[str] = field(default_factory=list, repr=False)

    def read(self, index: int) -> UInt8[np.ndarray, "H W C"]:
        return self._readable(index, self.split.read)

    def read_reduced(self, index: int, reduction: Reduction) -> ReducedImage:
        return self._readable(
            index, lambda any_index: self.split.read_reduced(any_index, reduction)
        )

    def _readable(self, index: int, read: Callable[[int], Image]) -> Image:
        try:
            return read(index)
        except ImageError as error:
            self._failures.append(f"{error.name}: {error.reason}: {error.detail}")
            return self._replacement(index, read, error)

    def _replacement(self, index: int, read: Callable[[int], Image], error: ImageError) -> Image:
        same_class = np.flatnonzero(self.labels == self.labels[index])
        # Images of the class in the order of the split, starting after this image.
        following = np.roll(same_class, -1 - int(np.searchsorted(same_class, index)))[:-1]
        # Where the disk is gone every attempt fails slowly, and the run must not seem to hang.
        start = time.monotonic()
        for candidate in following[:MOST_TRIED].tolist():
            try:
                return read(candidate)
            except ImageError:
                if time.monotonic() - start > LONGEST_SEARCH:
                    break
        raise error

    def files(self) -> ImageFiles | None:
        return self.split.files()

    def failures(self) -> tuple[str, ...]:
        lines = tuple(self._failures)
        self._failures.clear()
        return lines

    def subset(self, indices: Int[np.ndarray, " M"]) -> ReplacingSplit:
        return ReplacingSplit(self.split.subset(indices))

    def relabelled(self, labels: Int64[np.ndarray, " N"]) -> ReplacingSplit:
        return ReplacingSplit(self.split.relabelled(labels))


def with_replacements(dataset: Dataset) -> Dataset:
    """Return the dataset with splits that replace images which become unreadable.

    Images in memory or in a cache cannot go missing, and those of remote shards only together;
    such splits stay as they are.
    """
    splits: dict[str, Split] = {}
    for name, split in dataset.splits.items():
        splits[name] = ReplacingSplit(split) if split.reads_single_files else split
    return dataclasses.replace(dataset, splits=splits)
