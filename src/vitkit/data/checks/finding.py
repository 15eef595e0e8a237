"""A finding of a check, and the images that findings are about."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

import numpy as np
from jaxtyping import Int64

from vitkit.data.checks.copy_search import same_pixels
from vitkit.data.datasets.scan import ScanResult
from vitkit.data.datasets.split import Split

Severity = Literal["error", "warning", "note"]

MOST_NAMED = 100
"""Images that a note names; errors and warnings name all."""

FINDING_KINDS: dict[str, Severity] = {
    "unreadable": "error",
    "leak": "warning",
    "near leak": "warning",
    "two labels": "warning",
    "near two labels": "warning",
    "empty class": "warning",
    "single image": "warning",
    "missing class": "warning",
    "class names": "warning",
    "class shift": "warning",
    "layout": "warning",
    "blank": "warning",
    "rare class": "note",
    "duplicate": "note",
    "near duplicate": "note",
    "size": "note",
    "mode": "note",
}
"""All kinds of findings, in the order of a report."""


@dataclass(frozen=True)
class Finding:
    """One problem or peculiarity of a dataset.

    An error keeps training from starting, a warning makes its figures doubtful, a note is good to
    know.
    """

    kind: str
    """One of `FINDING_KINDS`, for counting."""
    severity: Severity
    message: str
    """The message, in one line."""
    count: int
    """Number of images or classes it is about."""
    images: tuple[tuple[str, ...], ...] = ()
    """Their names; alone, or together with the images they are duplicates of."""
    split: str = ""
    """Their split, if they are in one."""


def new_finding(
    kind: str, message: str, images: Iterable[tuple[str, ...]], count: int, split: str = ""
) -> Finding:
    """Return a finding with the severity of its kind; a note names the first images only."""
    severity = FINDING_KINDS[kind]
    # `images` may be a generator over millions of names, each of which takes time.
    most = MOST_NAMED if severity == "note" else None
    return Finding(kind, severity, message, count, tuple(itertools.islice(images, most)), split)


class ScannedImages:
    """The readable images of all splits in one list, training first.

    Attributes:
        names: names of the splits.
        split: the index in `names` of each image's split (N,).
        indices: each image's index in its split (N,).
        groups: numbers of images with the same pixels, for each set of copies.
    """

    def __init__(self, splits: Mapping[str, Split], scans: Mapping[str, ScanResult]) -> None:
        self._splits = splits
        self._scans = scans
        self.names = tuple(splits)
        readable = []
        for name, split in splits.items():
            unreadable = [problem.index for problem in scans[name].problems]
            readable.append(np.setdiff1d(np.arange(len(split)), unreadable))
        counts = [*map(len, readable)]
        # All splits are concatenated; these are the offsets of the splits.
        self._edges = np.cumsum(counts)[:-1]
        self.indices = np.concatenate(readable)
        self.split = np.repeat(np.arange(len(counts), dtype=np.uint8), counts)
        self.groups = same_pixels(self.column("pixels"))

    def column(self, field: str) -> np.ndarray:
        """Return one field of all rows (N, ...)."""
        return self._of_readable(scan.rows[field] for scan in self._scans.values())

    def labels(self) -> Int64[np.ndarray, " N"]:
        """Return the class numbers (N,)."""
        return self._of_readable(split.labels for split in self._splits.values())

    def name(self, number: int) -> str:
        """Return the name of an image."""
        split = self._splits[self.names[self.split[number]]]
        return split.name(int(self.indices[number]))

    def names_of(self, numbers: Int64[np.ndarray, " M"]) -> tuple[str, ...]:
        """Return the names of some images."""
        return tuple(map(self.name, numbers.tolist()))

    def _of_readable(self, columns: Iterable[np.ndarray]) -> np.ndarray:
        by_split = np.split(self.indices, self._edges)
        parts = [column[rows] for column, rows in zip(columns, by_split, strict=True)]
        return np.concatenate(parts)
