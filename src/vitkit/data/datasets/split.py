"""The interface of a split: N labelled images in a fixed order."""

from __future__ import annotations

import csv
import hashlib
import io
import json
import os
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from jaxtyping import Int, Int64, UInt8, UInt64

from vitkit.data.images.decode import ChooseFactor, Decoded
from vitkit.errors import DataError
from vitkit.messages import csv_encoding, csv_separator, escape, nearest_parent


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

    def decode(self, index: int, reduction: ChooseFactor | None = None) -> Decoded:
        """Return one image as `read` does, with its size and the properties of its file.

        The default reads it whole.

        Args:
            index: the image's index.
            reduction: lets a JPEG be decoded smaller (`decode_file`).

        Raises:
            ImageError: it cannot be read or decoded.
        """
        pixels = self.read(index)
        return Decoded(pixels, (pixels.shape[0], pixels.shape[1]), None, frozenset())

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

    def cache_keys(self) -> UInt64[np.ndarray, " N"]:
        """Return a key of each image's content for a `FileCache` (N,); 0 where there is none."""
        return np.zeros(len(self), np.uint64)

    def original(self) -> Split:
        """Return the split that this one wraps, if any, else the split itself."""
        return self

    def folder(self) -> Path | None:
        """Return the folder of the image files; None for images that are not single files."""
        return None

    def files(self) -> Sequence[str] | None:
        """Return the N paths that `read` opens; None if images are not read from single files."""
        return None


# `LabelChanges`: corrected labels of single images, as a `relabel.csv` lists them.

RELABEL_HEADER = ("path", "old_class", "new_class")
"""Columns of a list: the image as `Split.path` names it, its class now, and its right class."""
LARGEST_CELL = 2**20
"""Characters of a name at most, instead of the 131,072 of the module `csv`."""


@dataclass(frozen=True)
class LabelChange:
    """The corrected label of one image.

    Attributes:
        path: the image, as `Split.path` names it.
        old: the class that it has in the data; empty where the list does not say.
        new: its right class.
        line: line of the list, for messages.
    """

    path: str
    old: str
    new: str
    line: int = 0


@dataclass(frozen=True)
class LabelChanges:
    """The corrected labels of a list, in which each image occurs once.

    Attributes:
        name: name of the file, for messages.
        changes: in the order of the file.
    """

    name: str
    changes: tuple[LabelChange, ...]

    @property
    def digest(self) -> str:
        """SHA-256 (hex) of paths and new classes; the order of the lines does not matter."""
        # Without the old classes: two lists with the same result are equal.
        pairs = sorted([change.path, change.new] for change in self.changes)
        return hashlib.sha256(json.dumps(pairs).encode()).hexdigest()

    def to_csv(self) -> bytes:
        """Return the list as a CSV file in UTF-8."""
        text = io.StringIO()
        writer = csv.writer(text)
        writer.writerow(RELABEL_HEADER)
        writer.writerows((change.path, change.old, change.new) for change in self.changes)
        return text.getvalue().encode("utf-8", "replace")


def read_label_changes(path: str | os.PathLike[str]) -> LabelChanges:
    """Read a list of corrected labels.

    Args:
        path: a CSV file with the columns `path`, `new_class` and perhaps `old_class`, as the page
            of `vitkit report` exports it, or as a spreadsheet saves it: in UTF-8, or in UTF-16 with
            a byte order mark; separated by commas, semicolons or tabs.

    Raises:
        DataError: no such file, other columns, or a line that is not complete or contradicts
            another one.
    """
    file = Path(os.path.expanduser(path))
    where = escape(path)
    try:
        content = file.read_bytes()  # as text, line breaks within a cell would be changed
        text = content.decode(csv_encoding(content))
    except FileNotFoundError:
        raise DataError(f"--relabel {where}: no such file; {nearest_parent(file)}") from None
    except UnicodeDecodeError:
        raise DataError(f"--relabel {where}: expected a CSV file in UTF-8 or UTF-16") from None
    except OSError as error:
        raise DataError(f"--relabel {where} cannot be read: {error.strerror}") from None
    # The limit is the module's, for the whole process: it is restored below.
    before = csv.field_size_limit(LARGEST_CELL)
    try:
        separator = csv_separator(text.partition("\n")[0])
        reader = csv.reader(io.StringIO(text, newline=""), delimiter=separator, strict=True)
        header = next(reader, [])
        # Of a cell over several lines, the number of the last one.
        rows = [(reader.line_num, row) for row in reader if any(map(str.strip, row))]
    except csv.Error as error:
        raise DataError(f"--relabel {where} is not a CSV file: {error}") from None
    finally:
        csv.field_size_limit(before)
    return LabelChanges(file.name, _changes(where, header, rows))


def _changes(
    where: str, header: Sequence[str], rows: Sequence[tuple[int, list[str]]]
) -> tuple[LabelChange, ...]:
    """Return the changes of the rows, each with its line."""
    names = [name.strip().casefold() for name in header]
    missing = [name for name in ("path", "new_class") if name not in names]
    if missing:
        raise DataError(
            f"--relabel {where}: no column {missing[0]!r}; expected the first line "
            f"{','.join(RELABEL_HEADER)}, got {escape(','.join(header))[:100]!r}"
        )
    changes: dict[str, LabelChange] = {}
    for line, row in rows:
        cells = dict(zip(names, row, strict=False))
        change = LabelChange(
            cells.get("path", ""), cells.get("old_class", ""), cells.get("new_class", ""), line
        )
        if not change.path or not change.new:
            raise DataError(
                f"--relabel {where}, line {line}: expected a path and a new class, got "
                f"{escape(','.join(row))!r}"
            )
        first = changes.setdefault(change.path, change)
        if first.new != change.new:
            raise DataError(
                f"--relabel {where}: {escape(change.path)!r} is {first.new!r} in line {first.line} "
                f"and {change.new!r} in line {line}; keep one of the lines"
            )
    if not changes:
        raise DataError(f"--relabel {where} lists no image; leave it out")
    return tuple(changes.values())
