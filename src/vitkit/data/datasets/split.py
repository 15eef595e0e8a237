"""The interface of a split: N labelled images in a fixed order."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from jaxtyping import Int, Int64, UInt8, UInt64

Reduction = Callable[[tuple[int, int]], int]
"""Called with the full size (H, W) of an image; returns 1, 2, 4 or 8, the factor by which it may be
decoded smaller."""


@dataclass(frozen=True)
class ReducedImage:
    """A decoded image that may be smaller than its file."""

    pixels: UInt8[np.ndarray, "h w C"]
    """(ceil(H / factor), ceil(W / factor), C)."""
    size: tuple[int, int] | None = None
    """The full size (H, W); None where it is that of the pixels."""
    factor: int | None = None
    """1, 2, 4 or 8; None where the image has one size only."""

    def serves(self, reduction: Reduction) -> bool:
        """Return True if decoding with another `reduction` would give the same pixels."""
        if self.factor is None or self.size is None:
            return True
        return reduction(self.size) == self.factor


class Split(ABC):
    """One part of a dataset: N labelled images in a fixed order.

    A new source implements the abstract methods. The others have defaults that are right for
    images that are held in memory or generated: no file, no server, nothing to cache.
    """

    labels: Int64[np.ndarray, " N"]
    """Class numbers (N,)."""

    @abstractmethod
    def __len__(self) -> int:
        """Return the number of images N."""

    @abstractmethod
    def name(self, index: int) -> str:
        """Return the name of an image for a message."""

    def path(self, index: int) -> str:
        """Return the name of an image in lists such as relabel.csv, the same in every run.

        That of a file is its path below the folder of the data; that of an image in an array is
        its part and number, such as `train/12`; any other image has the name of messages.
        """
        return self.name(index)

    @abstractmethod
    def read(self, index: int) -> UInt8[np.ndarray, "H W C"]:
        """Return one image, (H, W, 3) RGB or (H, W, 1) grey, uint8 [0, 255].

        Raises:
            ImageError: it cannot be read or decoded.
        """

    def read_reduced(self, index: int, reduction: Reduction) -> ReducedImage:
        """Return one image as `read` does, a JPEG decoded smaller where `reduction` allows it.

        The default reads it whole.

        Raises:
            ImageError: it cannot be read or decoded.
        """
        return ReducedImage(self.read(index))

    @abstractmethod
    def subset(self, indices: Int[np.ndarray, " M"]) -> Split:
        """Return the images at `indices`, in that order, under their old names."""

    @abstractmethod
    def relabelled(self, labels: Int64[np.ndarray, " N"]) -> Split:
        """Return the same images under other class numbers (N,)."""

    @property
    def in_memory(self) -> bool:
        """True if the decoded images are in memory: workers and caches make them no faster."""
        return False

    @property
    def is_remote(self) -> bool:
        """True if the images come over the network, many of them in one file."""
        return False

    def examine(self, index: int) -> tuple[UInt8[np.ndarray, "H W C"], Iterable[str]]:
        """Return one image as `read` does, and of `FILE_PROPERTIES` those that decoding changed.

        Raises:
            ImageError: it cannot be read or decoded.
        """
        return self.read(index), ()

    def cache_keys(self) -> UInt64[np.ndarray, " N"]:
        """Return a key of each image's content for a `FileCache` (N,); 0 where there is none."""
        return np.zeros(len(self), np.uint64)

    def shards(self) -> Int64[np.ndarray, " N"] | None:
        """Return the number of the remote file that each image is in (N,); None for local images.

        An epoch reads all images of one such file before those of the next.
        """
        return None

    def prefetch(self, indices: Int64[np.ndarray, " M"]) -> None:  # noqa: B027 - optional
        """Start to fetch the files that the images at `indices` need after the first of them.

        Returns at once. The default does nothing.
        """

    def original(self) -> Split:
        """Return the split that this one wraps, if any, else the split itself."""
        return self

    def folder(self) -> Path | None:
        """Return the folder of the image files; None for images that are not single files."""
        return None

    def files(self) -> Sequence[str] | None:
        """Return the N paths that `read` opens; None if images are not read from single files."""
        return None
