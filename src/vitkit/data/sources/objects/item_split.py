"""A split of a map-style dataset: every item is read once when it is opened, for its digest."""

from __future__ import annotations

import dataclasses
import hashlib
import threading
from dataclasses import dataclass

import numpy as np
from jaxtyping import Int, Int64, UInt8

from vitkit.data.datasets.dataset import numbered_path
from vitkit.data.datasets.split import Split
from vitkit.data.images.pixels import FILE_BYTES, PATH, as_pixels, kind_of
from vitkit.data.sources.objects.items import Label, MapStyle, as_label, image_and_label
from vitkit.errors import DataError
from vitkit.io.progress import progress_bar

ONE_AT_A_TIME = threading.Lock()
"""Held while an item is read: torch's datasets are never called by two threads at once."""


@dataclass(frozen=True, eq=False)
class ItemSplit(Split):
    """Images of a map-style dataset, one item each."""

    items: MapStyle
    labels: Int64[np.ndarray, " N"]
    """Class numbers (N,)."""
    origin: str
    """Name of the dataset, for messages."""
    numbers: Int64[np.ndarray, " N"]
    """Each image's index in `items`."""
    digests: UInt8[np.ndarray, "M 32"]
    """SHA-256 of each item's pixels (M items), as it was when the dataset was opened."""

    def __len__(self) -> int:
        return len(self.numbers)

    @property
    def in_memory(self) -> bool:
        if not isinstance(self.items, list | tuple):
            return False
        # A list of paths or of files' bytes is decoded at every reading.
        image, _ = image_and_label(self.items, 0, self.origin)
        return kind_of(image) not in (PATH, FILE_BYTES)

    def name(self, index: int) -> str:
        return f"{self.origin}[{self.numbers[index]}]"

    def path(self, index: int) -> str:
        return numbered_path(self.origin, int(self.numbers[index]))

    def read(self, index: int) -> UInt8[np.ndarray, "H W C"]:
        number = int(self.numbers[index])
        name = self.name(index)
        with ONE_AT_A_TIME:
            image, _ = image_and_label(self.items, number, name)
        pixels = as_pixels(image, name)
        # A run must read the images that were fingerprinted, or it could not be repeated.
        if pixels_digest(pixels) != self.digests[number].tobytes():
            raise DataError(
                f"{name} is another image than when the data were opened; leave random changes "
                "out of the dataset: training makes its own (flip, crop_scale, aa ...), and "
                "transform=FUNCTION adds yours"
            )
        return pixels

    def subset(self, indices: Int[np.ndarray, " M"]) -> ItemSplit:
        return dataclasses.replace(self, labels=self.labels[indices], numbers=self.numbers[indices])

    def relabelled(self, labels: Int64[np.ndarray, " N"]) -> ItemSplit:
        return dataclasses.replace(self, labels=labels)


def pixels_digest(pixels: UInt8[np.ndarray, "H W C"]) -> bytes:
    """Return the SHA-256 of an image's shape and pixels."""
    # 2 x 3 and 3 x 2 pixels may have the same bytes
    digest = hashlib.sha256(repr(pixels.shape).encode())
    digest.update(np.ascontiguousarray(pixels).data)
    return digest.digest()


def read_items(items: MapStyle, origin: str) -> tuple[ItemSplit, list[Label], list[str]]:
    """Read every item once: its label, and the digest of its pixels.

    Args:
        items: the dataset.
        origin: its name, for messages.

    Returns:
        The split, its class numbers all 0; the labels; and notes, a line each.

    Raises:
        DataError: no items; one that raises, has no image or no label, or is of another kind than
            the first; the message has its index.
    """
    count = len(items)
    if count == 0:
        raise DataError(f"{origin} is empty: its length is 0")
    digests = np.zeros((count, 32), np.uint8)
    labels: list[Label] = []
    first_kind = ""
    with progress_bar(count, f"reading {origin}") as advance:
        for index in range(count):
            name = f"{origin}[{index}]"
            image, label = image_and_label(items, index, name)
            # Mixed kinds of images are a mistake: one of the two conventions would be misread.
            kind = kind_of(image)
            first_kind = first_kind or kind
            if kind != first_kind:
                raise DataError(
                    f"{name} is {kind}, and {origin}[0] is {first_kind}; all items must be of one "
                    "kind"
                )
            digests[index] = np.frombuffer(pixels_digest(as_pixels(image, name)), np.uint8)
            labels.append(as_label(label, name))
            advance(1)
    notes = []
    if " float" in first_kind:
        notes.append(f"{origin}: float images in [0, 1] are rounded to 8 bits")
    zeros = np.zeros(count, np.int64)
    return ItemSplit(items, zeros, origin, np.arange(count), digests), labels, notes
