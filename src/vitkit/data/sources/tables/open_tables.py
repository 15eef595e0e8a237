"""Open images in tables: Parquet files, and the Arrow files that `datasets` keeps.

A table has one column of images, {bytes, path} or plain bytes, and one of labels, numbers or
text. Class names come from the features that `datasets` writes into a table's schema, where it did.
Each file is read through once, for labels and hashes, and its index kept.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from vitkit.data.datasets.build import NamedImages, assemble
from vitkit.data.datasets.dataset import Dataset, StoredSplit
from vitkit.data.sources.tables.columns import Columns, common_columns
from vitkit.data.sources.tables.table_store import (
    MOST_CACHED,
    TableKind,
    TableStore,
    groups_of,
    image_bytes,
)
from vitkit.errors import DataError, MissingExtraError
from vitkit.io.index_cache import Index, cached_index, file_stamp
from vitkit.messages import escape

if TYPE_CHECKING:
    import pyarrow as pa


def open_tables(
    name: str,
    where: str,
    files: Mapping[str, Sequence[Path]],
    kind: TableKind,
    *,
    roots: Sequence[Path] = (),
    ignore_extra_classes: bool = False,
    notes: Sequence[str] = (),
) -> Dataset:
    """Open the dataset in tables that have the same columns.

    Args:
        name: the dataset's name.
        where: the file, folder or address, for messages.
        files: split -> its files, in order.
        kind: "parquet", or "arrow" as `datasets` caches it.
        roots: folders whose files rows may name by their path, instead of holding their bytes.
        ignore_extra_classes: leave out classes of val and test that train lacks.
        notes: lines for the user that there are already.

    Raises:
        DataError: files that are damaged or differ in their columns; no column of images or of
            labels; labels that are missing or out of range, by row; and the errors of `assemble`.
        MissingExtraError: pyarrow is not installed.
    """
    _require_pyarrow(where)
    columns = common_columns([*itertools.chain(*files.values())], kind)
    indexer = _Indexer(columns, kind, roots)
    notes = list(notes)
    parts = {}
    size = 0
    for split, group in files.items():
        indexes = [cached_index(file, f"{kind} {columns} {roots}", indexer) for file in group]
        # Uncompressed bytes of all images: if they exceed the cache, random access is slow.
        for index in indexes:
            size += int(index.arrays["groups"][:, 1].sum())
        # Competitions publish their test images without labels, as None or -1.
        if split == "test" and not any(any(index.texts["labels"]) for index in indexes):
            notes.append("test has no labels and is left out")
            continue
        _refuse_unlabelled(group, indexes)
        parts[split] = _part(_store(group, indexes, columns, kind, roots), indexes)
    if kind == "parquet" and size > MOST_CACHED:
        notes.append(
            "images are read a row group at a time, which is slow in random order; try --cache"
        )
    return assemble(
        name,
        where,
        parts,
        classes=columns.classes,
        ignore_extra_classes=ignore_extra_classes,
        notes=notes,
    )


class _Indexer:
    """Reads a table through: labels by name ("" where there is none), SHA-256 of every image."""

    def __init__(self, columns: Columns, kind: TableKind, roots: Sequence[Path]) -> None:
        self.columns = columns
        self.kind = kind
        self.roots = roots

    def __call__(self, path: Path) -> Index:
        groups = groups_of(path, self.kind)
        labels: list[str] = []
        digests: list[bytes] = []
        sizes: list[tuple[int, int]] = []
        for number in range(len(groups)):
            # One group at a time: a whole file may not fit into memory.
            table = groups.read(number, [self.columns.image, self.columns.label])
            labels += self._labels(path, table.column(self.columns.label), len(labels))
            images = table.column(self.columns.image)
            sizes.append((len(images), images.nbytes))
            for scalar in images:
                # A missing image gets the digest of zero bytes, and is reported when it is decoded.
                content = image_bytes(scalar.as_py(), self.roots) or b""
                digests.append(hashlib.sha256(content).digest())
        arrays: dict[str, np.ndarray] = {
            "groups": np.array(sizes, np.int64).reshape(-1, 2),
            "digests": np.frombuffer(b"".join(digests), np.uint8).reshape(-1, 32),
        }
        return Index(arrays, {"labels": labels})

    def _labels(self, path: Path, column: pa.ChunkedArray, first_row: int) -> list[str]:
        classes = self.columns.classes
        names: list[str] = []
        for row, label in enumerate(column.to_pylist(), first_row):
            if label in (None, -1, ""):
                names.append("")
            # True is an int, too; without class names it becomes the class 'True'.
            elif isinstance(label, int) and not 0 <= label < (len(classes) or label + 1):
                expected = f"below {len(classes)}" if classes else "of 0 or more"
                raise DataError(
                    f"{escape(path)}: expected labels {expected}, got {label} in row {row}"
                )
            else:
                names.append(classes[label] if classes else str(label))
        return names


def _refuse_unlabelled(files: Sequence[Path], indexes: Sequence[Index]) -> None:
    for file, index in zip(files, indexes, strict=True):
        missing = [row for row, label in enumerate(index.texts["labels"]) if not label]
        if missing:
            raise DataError(
                f"{escape(file)}: row {missing[0]} has no label (None, -1 or empty), "
                f"{len(missing):,} rows in all; label or remove them"
            )


def _part(store: TableStore, indexes: Sequence[Index]) -> NamedImages:
    labels: list[str] = []
    digests: list[bytes] = []
    for index in indexes:
        labels += index.texts["labels"]
        digests += map(bytes, index.arrays["digests"])
    # `assemble` gives the labels their numbers, for all splits at once.
    images = StoredSplit(store, np.zeros(len(labels), np.int64), np.arange(len(labels)))
    return NamedImages(images, labels, digests)


def _store(
    files: Sequence[Path],
    indexes: Sequence[Index],
    columns: Columns,
    kind: TableKind,
    roots: Sequence[Path],
) -> TableStore:
    file_of_group: list[np.ndarray] = []
    number_in_file: list[np.ndarray] = []
    images_in_group: list[np.ndarray] = []
    for number, index in enumerate(indexes):
        # The columns of "groups" are images and bytes.
        counts = index.arrays["groups"][:, 0]
        file_of_group.append(np.full(len(counts), number))
        number_in_file.append(np.arange(len(counts)))
        images_in_group.append(counts)
    images_in_file = np.array([counts.sum() for counts in images_in_group])
    return TableStore(
        files=tuple(files),
        stamps=tuple(map(file_stamp, files)),
        kind=kind,
        column=columns.image,
        file=np.concatenate(file_of_group),
        group=np.concatenate(number_in_file),
        starts=_starts(np.concatenate(images_in_group)),
        file_starts=_starts(images_in_file),
        roots=tuple(roots),
    )


def _starts(counts: np.ndarray) -> np.ndarray:
    """Return the first image of each group of these sizes, and the number of all images."""
    return np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)


def _require_pyarrow(where: str) -> None:
    try:
        import pyarrow  # noqa: F401 - only to see if it is there
    except ImportError:
        raise MissingExtraError(
            f"{where} needs pyarrow; install it: pip install 'vitkit[hub]'"
        ) from None
