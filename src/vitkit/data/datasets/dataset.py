"""Opened datasets: `Dataset`, and its splits in memory, in files and in archives."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from jaxtyping import Int, Int64, UInt8, UInt64

from vitkit import errors, messages
from vitkit.data.datasets.split import LabelChanges, Split
from vitkit.data.images.decode import ChooseFactor, Decoded, decode_file
from vitkit.io.caches import UNKNOWN, file_keys

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
"""Names that folders, files and columns give to splits, in lower case."""


@dataclass(frozen=True, eq=False)
class ArraySplit(Split):
    """Images in memory, all of one size."""

    images: UInt8[np.ndarray, "N H W C"]
    """(N, H, W, C) uint8, C 3 for RGB or 1 for grey."""
    labels: Int64[np.ndarray, " N"]
    """Class numbers (N,)."""
    origin: str
    """Name of the source, such as "digits/train"."""
    numbers: Int64[np.ndarray, " N"] | None = None
    """Each image's number at the source; its index here where absent."""

    def __len__(self) -> int:
        return len(self.images)

    @property
    def in_memory(self) -> bool:
        return True

    def _number(self, index: int) -> int:
        if self.numbers is None:
            return index
        return int(self.numbers[index])

    def name(self, index: int) -> str:
        return f"{self.origin}[{self._number(index)}]"

    def path(self, index: int) -> str:
        return numbered_path(self.origin, self._number(index))

    def read(self, index: int) -> UInt8[np.ndarray, "H W C"]:
        return self.images[index]

    def subset(self, indices: Int[np.ndarray, " M"]) -> ArraySplit:
        numbers = np.arange(len(self)) if self.numbers is None else self.numbers
        return ArraySplit(self.images[indices], self.labels[indices], self.origin, numbers[indices])

    def relabelled(self, labels: Int64[np.ndarray, " N"]) -> ArraySplit:
        return dataclasses.replace(self, labels=labels)


@dataclass(frozen=True, eq=False)
class FileSplit(Split):
    """Images in files, decoded when they are read."""

    paths: Sequence[str]
    labels: Int64[np.ndarray, " N"]
    """Class numbers (N,)."""
    root: Path
    """The folder that names are relative to."""
    lines: Int64[np.ndarray, " N"] | None = None
    """Each image's line in the list that names it, for messages."""

    def __len__(self) -> int:
        return len(self.paths)

    def name(self, index: int) -> str:
        # Names in messages are the same on every operating system: "/" separates.
        name = self.path(index)
        if self.lines is None:
            return name
        return f"{name} (line {self.lines[index]})"

    def path(self, index: int) -> str:
        return messages.escape(Path(self.paths[index]).relative_to(self.root).as_posix())

    def read(self, index: int) -> UInt8[np.ndarray, "H W 3"]:
        return self.decode(index).pixels

    def decode(self, index: int, reduction: ChooseFactor | None = None) -> Decoded:
        try:
            return decode_file(self.paths[index], reduction=reduction)
        except errors.ImageError as error:
            # Only now: the name below the folder takes longer than opening the file.
            raise errors.ImageError(self.name(index), error.reason, error.detail) from error

    def cache_keys(self) -> UInt64[np.ndarray, " N"]:
        return file_keys(self.paths)

    def folder(self) -> Path:
        return self.root

    def files(self) -> Sequence[str]:
        return self.paths

    def subset(self, indices: Int[np.ndarray, " M"]) -> FileSplit:
        paths = [self.paths[index] for index in indices]
        lines = None if self.lines is None else self.lines[indices]
        return FileSplit(paths, self.labels[indices], self.root, lines)

    def relabelled(self, labels: Int64[np.ndarray, " N"]) -> FileSplit:
        return dataclasses.replace(self, labels=labels)


class Store(ABC):
    """Encoded images inside larger files, found by their number.

    It can be pickled, and used by several threads and by forked processes at once.
    """

    @abstractmethod
    def name(self, number: int) -> str:
        """Return the name of an image for a message."""

    @abstractmethod
    def encoded(self, number: int) -> bytes:
        """Return the bytes of the image's file, as they were stored.

        Raises:
            ImageError: it is not there, or cannot be read.
        """

    def cache_keys(self, numbers: Int64[np.ndarray, " M"]) -> UInt64[np.ndarray, " M"]:
        """Return a 64-bit hash of each image's bytes (M,); `UNKNOWN` if it cannot be read."""
        keys = np.full(len(numbers), UNKNOWN)
        for row, number in enumerate(numbers.tolist()):
            try:
                content = self.encoded(number)
            except errors.ImageError:
                continue
            keys[row] = int.from_bytes(hashlib.blake2b(content, digest_size=8).digest())
        return keys


@dataclass(frozen=True, eq=False)
class StoredSplit(Split):
    """Images in a `Store`, decoded when they are read."""

    store: Store
    labels: Int64[np.ndarray, " N"]
    """Class numbers (N,)."""
    numbers: Int64[np.ndarray, " N"]
    """Each image's number in the store."""

    def __len__(self) -> int:
        return len(self.numbers)

    def name(self, index: int) -> str:
        return messages.escape(self.store.name(int(self.numbers[index])))

    def read(self, index: int) -> UInt8[np.ndarray, "H W 3"]:
        return self.decode(index).pixels

    def decode(self, index: int, reduction: ChooseFactor | None = None) -> Decoded:
        content = self.store.encoded(int(self.numbers[index]))
        return decode_file(content, name=self.name(index), reduction=reduction)

    def cache_keys(self) -> UInt64[np.ndarray, " N"]:
        return self.store.cache_keys(self.numbers)

    def subset(self, indices: Int[np.ndarray, " M"]) -> StoredSplit:
        return StoredSplit(self.store, self.labels[indices], self.numbers[indices])

    def relabelled(self, labels: Int64[np.ndarray, " N"]) -> StoredSplit:
        return dataclasses.replace(self, labels=labels)


@dataclass(frozen=True, eq=False)
class Dataset:
    """An opened dataset: its class names and its splits."""

    name: str
    """Its name, or its folder's."""
    classes: tuple[str, ...]
    """Class names; a label is an index in this tuple, in every split."""
    splits: dict[str, Split]
    """"train", "val" and "test", those that are there."""
    fingerprint: str
    """SHA-256 (hex) of classes, labels and images as they were opened; cutting and skipping
    afterwards do not change it."""
    notes: tuple[str, ...] = ()
    """Notes for the user, a line each."""
    cut: bool = False
    """True if test was cut from one pool of images here, and not set apart by the user."""
    warnings: tuple[str, ...] = ()
    """Probable mistakes that were seen when the files were listed, a line each."""
    first_copies: Int64[np.ndarray, " N"] | None = None
    """For each image of train the index of the first file with the same content (N,); None where
    no two files are the same, or where this was not looked up."""
    relabelled: LabelChanges | None = None
    """The labels that were corrected after opening; None where none were."""

    @property
    def identity(self) -> str:
        """The fingerprint, and what was corrected since: SHA-256 (hex)."""
        if self.relabelled is None:
            return self.fingerprint
        text = f"{self.fingerprint}, relabelled {self.relabelled.digest}"
        return hashlib.sha256(text.encode()).hexdigest()


def numbered_path(origin: str, number: int) -> str:
    """Return the name of an image in lists, of its source and its number there.

    >>> numbered_path("fashion-mnist/train", 12), numbered_path("digits", 5)
    ('train/12', 'digits/5')
    """
    return f"{origin.rpartition('/')[2]}/{number}"


def dataset_fingerprint(
    classes: Sequence[str], parts: Mapping[str, tuple[Int64[np.ndarray, " N"], Iterable[bytes]]]
) -> str:
    """Return the SHA-256 (hex) of class names and of each part's labels and images' digests.

    Args:
        classes: the class names, in order.
        parts: by split its labels (N,) and the SHA-256 of each image, in order.
    """
    # JSON marks where a name ends, so ["ab", "c"] and ["a", "bc"] have different fingerprints.
    total = hashlib.sha256(json.dumps([*classes]).encode())
    for part, (labels, digests) in sorted(parts.items()):
        total.update(json.dumps([part, len(labels)]).encode())
        total.update(labels.astype("<i8").tobytes())  # the same on machines of any byte order
        for digest in digests:
            total.update(digest)
    return total.hexdigest()


def array_digests(images: UInt8[np.ndarray, "N ..."]) -> list[bytes]:
    """Return the SHA-256 of each image's pixels."""
    return [hashlib.sha256(image.tobytes()).digest() for image in images]
