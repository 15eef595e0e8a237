"""What an opened data set is: a `Dataset` of `Split`s."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, runtime_checkable

import numpy as np
from jaxtyping import Int, Int64, UInt8, UInt64

from vitkit.data.datasets.path_list import Paths
from vitkit.data.images.decode import decode, escape
from vitkit.data.images.rereading import NO_FILE, file_stamps, patiently
from vitkit.errors import ImageError

SPLIT_WORDS = {
    "train": "train",
    "training": "train",
    "val": "val",
    "valid": "val",
    "validation": "val",
    "dev": "val",
    "eval": "val",
    "test": "test",
    "testing": "test",
}
"""What folders, files and columns call the splits, in lower case."""


@runtime_checkable
class Split(Protocol):
    """One part of a data set: N labelled images in a fixed order."""

    @property
    def labels(self) -> Int64[np.ndarray, " N"]:
        """Class numbers (N,)."""

    def __len__(self) -> int:
        """N."""

    def name(self, index: int) -> str:
        """What to call an image in a message."""

    def read(self, index: int) -> UInt8[np.ndarray, "H W C"]:
        """One image, (H, W, 3) RGB or (H, W, 1) grey, uint8 [0, 255].

        Raises:
            ImageError: it cannot be read or decoded.
        """

    def subset(self, indices: Int[np.ndarray, " M"]) -> Split:
        """The images at `indices`, in that order, under their old names."""

    def relabelled(self, labels: Int64[np.ndarray, " N"]) -> Split:
        """The same images under other class numbers (N,)."""


@dataclass(frozen=True, eq=False)
class ArraySplit:
    """Images in memory, all of one size."""

    images: UInt8[np.ndarray, "N H W C"]
    """(N, H, W, C) uint8, C 3 for RGB or 1 for grey."""
    labels: Int64[np.ndarray, " N"]
    """Class numbers (N,)."""
    origin: str
    """Where they come from, such as "digits/train"."""
    numbers: Int64[np.ndarray, " N"] | None = None
    """Each image's number at the origin; its place here where absent."""

    def __len__(self) -> int:
        return len(self.images)

    def name(self, index: int) -> str:
        return f"{self.origin}[{index if self.numbers is None else self.numbers[index]}]"

    def read(self, index: int) -> UInt8[np.ndarray, "H W C"]:
        return self.images[index]

    def subset(self, indices: Int[np.ndarray, " M"]) -> ArraySplit:
        numbers = np.arange(len(self)) if self.numbers is None else self.numbers
        return ArraySplit(self.images[indices], self.labels[indices], self.origin, numbers[indices])

    def relabelled(self, labels: Int64[np.ndarray, " N"]) -> ArraySplit:
        return dataclasses.replace(self, labels=labels)


@dataclass(frozen=True, eq=False)
class FileSplit:
    """Images in files, decoded when they are read."""

    paths: Paths
    labels: Int64[np.ndarray, " N"]
    """Class numbers (N,)."""
    root: Path
    """The folder that names are told from."""
    lines: Int64[np.ndarray, " N"] | None = None
    """Each image's line in the list that names it, where there is one."""
    stamps: UInt64[np.ndarray, " N"] | None = None
    """What tells each file from another one under its name: `rereading.file_stamps`, by default
    as they are now. A file that has another one when it is read is refused; one that could not be
    seen at first has none, and is read as it is."""

    def __post_init__(self) -> None:
        if self.stamps is None:
            object.__setattr__(self, "stamps", file_stamps(self.paths.texts()))

    def __len__(self) -> int:
        return len(self.paths)

    def name(self, index: int) -> str:
        name = escape(self.paths[index].relative_to(self.root).as_posix())
        return name if self.lines is None else f"{name} (line {self.lines[index]})"

    def read(self, index: int) -> UInt8[np.ndarray, "H W 3"]:
        return patiently(lambda: self._read(index))

    def _read(self, index: int) -> UInt8[np.ndarray, "H W 3"]:
        path, name = self.paths[index], self.name(index)
        (now,) = file_stamps([path])
        opened = now if self.stamps is None else self.stamps[index]
        if NO_FILE not in (now, opened) and now != opened:
            raise ImageError(name, "missing", "the file was changed after it was opened")
        return decode(path, name=name)

    def subset(self, indices: Int[np.ndarray, " M"]) -> FileSplit:
        lines = None if self.lines is None else self.lines[indices]
        stamps = None if self.stamps is None else self.stamps[indices]
        return FileSplit(self.paths.take(indices), self.labels[indices], self.root, lines, stamps)

    def relabelled(self, labels: Int64[np.ndarray, " N"]) -> FileSplit:
        return dataclasses.replace(self, labels=labels)


@runtime_checkable
class Store(Protocol):
    """Encoded images inside larger files, told by their number.

    It can be pickled, and used by several threads and by forked processes at once.
    """

    def name(self, number: int) -> str:
        """What to call an image in a message."""

    def encoded(self, number: int) -> bytes:
        """The image's file, as it was stored.

        Raises:
            ImageError: it is not there, or cannot be read.
        """


@dataclass(frozen=True, eq=False)
class SplitOver:
    """The labels and names of another split, whose images a subclass reads in its own way."""

    split: Split
    """The other one."""

    @property
    def labels(self) -> Int64[np.ndarray, " N"]:
        """Class numbers (N,)."""
        return self.split.labels

    def __len__(self) -> int:
        return len(self.split)

    def name(self, index: int) -> str:
        return self.split.name(index)


@dataclass(frozen=True, eq=False)
class StoredSplit:
    """Images in a `Store`, decoded when they are read."""

    store: Store
    labels: Int64[np.ndarray, " N"]
    """Class numbers (N,)."""
    numbers: Int64[np.ndarray, " N"]
    """Each image's number in the store."""

    def __len__(self) -> int:
        return len(self.numbers)

    def name(self, index: int) -> str:
        return escape(self.store.name(int(self.numbers[index])))

    def read(self, index: int) -> UInt8[np.ndarray, "H W 3"]:
        number, name = int(self.numbers[index]), self.name(index)
        return patiently(lambda: decode(self.store.encoded(number), name=name))

    def subset(self, indices: Int[np.ndarray, " M"]) -> StoredSplit:
        return StoredSplit(self.store, self.labels[indices], self.numbers[indices])

    def relabelled(self, labels: Int64[np.ndarray, " N"]) -> StoredSplit:
        return dataclasses.replace(self, labels=labels)


@dataclass(frozen=True, eq=False)
class Dataset:
    """An opened data set."""

    name: str
    """Its name, or its folder's."""
    classes: tuple[str, ...]
    """Class names; a label is a place in this tuple, in every split."""
    splits: dict[str, Split]
    """"train", "val" and "test", those that are there."""
    fingerprint: str
    """SHA-256 (hex) of classes, labels and images as they were found; cutting and skipping
    afterwards do not change it."""
    notes: tuple[str, ...] = ()
    """What the user should know, a line each."""
    cut: bool = False
    """Whether test was cut from one pool of images here, and not set apart by the user."""
    warnings: tuple[str, ...] = ()
    """What was found when the files were listed and is probably a mistake, a line each."""
    first_copies: Int64[np.ndarray, " N"] | None = None
    """For each image of train the place of the first file with the same content (N,); None where
    no two files are the same, or nobody looked."""
    as_before: Dataset | None = None
    """The same data cut by the earlier rule, which separated copies, where that is another cut; a
    checkpoint of then is evaluated on it."""

    def difference(self, fingerprint: str) -> str:
        """Say what is not as in the data set of this fingerprint; empty where it is the same."""
        if fingerprint == self.fingerprint:
            return ""
        if self.as_before is not None and fingerprint == self.as_before.fingerprint:
            return "splits, which an earlier vitkit cut otherwise,"
        return "images, labels or classes"


def fingerprint(
    classes: Sequence[str], parts: Mapping[str, tuple[Int64[np.ndarray, " N"], Iterable[bytes]]]
) -> str:
    """SHA-256 (hex) over class names and each part's labels and images' digests, in order."""
    total = hashlib.sha256(json.dumps([*classes]).encode())
    for part, (labels, digests) in sorted(parts.items()):
        total.update(json.dumps([part, len(labels)]).encode())
        total.update(labels.astype("<i8").tobytes())
        for digest in digests:
            total.update(digest)
    return total.hexdigest()
