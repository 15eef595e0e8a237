"""The interface of a split: N labelled images in a fixed order."""

from __future__ import annotations

import csv
import hashlib
import io
import json
import os
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from jaxtyping import Int, Int64, UInt8, UInt64

from vitkit import errors, messages
from vitkit.data.images.decode import ChooseFactor, Decoded


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
        """Return one image as `read` does, with its full size.

        The default reads it whole.

        Args:
            index: the image's index.
            reduction: lets a JPEG be decoded smaller (`decode_file`).

        Raises:
            ImageError: it cannot be read or decoded.
        """
        pixels = self.read(index)
        return Decoded(pixels, (pixels.shape[0], pixels.shape[1]), None)

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
UTF_16 = (b"\xff\xfe", b"\xfe\xff")
"""First bytes of a file in UTF-16, such as Excel's "Unicode text"."""
SEPARATORS = ",;\t"


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
    where = f"--relabel {messages.escape(path)}"
    names: list[str] = []
    changes: dict[str, LabelChange] = {}
    for line, row in csv_rows(file, where):
        if not names:
            names = [name.strip().casefold() for name in row]
            if not {"path", "new_class"} <= {*names}:
                raise errors.DataError(
                    f"{where}: expected the columns {','.join(RELABEL_HEADER)} in the first line, "
                    f"got {messages.escape(','.join(row))[:100]!r}; old_class may be absent"
                )
            continue
        cells = dict.fromkeys(RELABEL_HEADER, "") | dict(zip(names, row, strict=False))
        change = LabelChange(cells["path"], cells["old_class"], cells["new_class"], line)
        first = changes.setdefault(change.path, change)
        if not change.path or not change.new or first.new != change.new:
            problem = f"expected a path and a new class, got {messages.escape(','.join(row))!r}"
            if change.path and change.new:
                problem = (
                    f"{messages.escape(change.path)!r} is {messages.escape(change.new)!r} here and "
                    f"{messages.escape(first.new)!r} in line {first.line}; keep one of the lines"
                )
            raise errors.DataError(f"{where}, line {line}: {problem}")
    if not changes:
        raise errors.DataError(f"{where} lists no image; leave it out")
    return LabelChanges(file.name, tuple(changes.values()))


def csv_rows(path: Path, where: str) -> Iterator[tuple[int, list[str]]]:
    """Generate the last line and the cells of each row of a CSV file, its header first.

    In UTF-8, or UTF-16 with its mark; separated by what the header has most of: commas, semicolons
    or tabs. Empty rows are left out.

    Raises:
        DataError: not such a file.
    """
    line = 0
    try:
        with path.open("rb") as raw:
            # "utf-8-sig" reads files with and without the byte order mark that Excel writes
            encoding = "utf-8-sig"
            if raw.read(2) in UTF_16:
                encoding = "utf-16"
        with path.open(encoding=encoding, newline="") as file:
            separator = max(SEPARATORS, key=file.readline().count)
            file.seek(0)
            reader = csv.reader(file, delimiter=separator, strict=True)
            for row in reader:
                line = reader.line_num
                if any(map(str.strip, row)):
                    yield line, row
    except (OSError, ValueError, csv.Error) as error:
        problem = f"not a CSV file in UTF-8 or UTF-16 from line {line + 1} on: {error}"
        if isinstance(error, OSError):
            problem = f"{str(error.strerror).lower()}; {messages.nearest_parent(path)}"
        raise errors.DataError(f"{where}: {problem}") from None
