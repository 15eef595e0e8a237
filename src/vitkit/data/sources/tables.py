"""Images in the columns of tables: Parquet files, and the Arrow files of `datasets`."""

from __future__ import annotations

import hashlib
import itertools
import json
import threading
from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from jaxtyping import Int64

from vitkit.data.datasets.build import NamedImages, assemble
from vitkit.data.datasets.dataset import Dataset, Store, StoredSplit
from vitkit.errors import DataError, ImageError, MissingExtraError
from vitkit.io.caches import Index, cached_index, file_stamp
from vitkit.messages import escape, quote_list

if TYPE_CHECKING:
    import pyarrow as pa
    from pyarrow.parquet import ParquetFile


# Images in tables, read a group of rows at a time; the last groups are kept in memory.

TableKind = Literal["parquet", "arrow"]

MOST_CACHED = 256 << 20
"""Bytes of row groups that one process keeps."""


class RowGroups(ABC):
    """An open table: groups of rows, each of which can be read by itself."""

    schema: pa.Schema

    @abstractmethod
    def __len__(self) -> int:
        """Return the number of groups."""

    @abstractmethod
    def read(self, number: int, columns: list[str]) -> pa.Table:
        """Return some columns of a group.

        Raises:
            DataError: the file is damaged.
        """


def _groups_of(path: Path, kind: TableKind) -> RowGroups:
    """Open a table."""
    return _ParquetGroups(path) if kind == "parquet" else _ArrowGroups(path)


class _ParquetGroups(RowGroups):
    """The row groups of a Parquet file."""

    def __init__(self, path: Path) -> None:
        import pyarrow as pa
        from pyarrow.parquet import ParquetFile

        self._path = path
        self._errors = (pa.ArrowException, OSError)
        try:
            # Threads of a library do not survive a fork into a worker.
            self._file: ParquetFile = ParquetFile(path, pre_buffer=False)
            self.schema: pa.Schema = self._file.schema_arrow
        except self._errors as error:
            raise _refused(path, "Parquet", error) from error

    def __len__(self) -> int:
        return int(self._file.num_row_groups)

    def read(self, number: int, columns: list[str]) -> pa.Table:
        try:
            return self._file.read_row_group(number, columns=columns, use_threads=False)
        except self._errors as error:
            raise _refused(self._path, "Parquet", error) from error


class _ArrowGroups(RowGroups):
    """An Arrow stream, mapped into memory: one group, of which nothing is read yet."""

    def __init__(self, path: Path) -> None:
        import pyarrow as pa

        try:
            self._table: pa.Table = pa.ipc.open_stream(pa.memory_map(str(path))).read_all()
        except (pa.ArrowException, OSError) as error:
            raise _refused(path, "Arrow", error) from error
        self.schema: pa.Schema = self._table.schema

    def __len__(self) -> int:
        return 1

    def read(self, number: int, columns: list[str]) -> pa.Table:
        return self._table.select(columns)


def _refused(path: Path, kind: str, error: BaseException) -> DataError:
    return DataError(f"{escape(path)}: cannot be read as a {kind} file: {error}")


def image_bytes(value: object, roots: Sequence[Path]) -> bytes | None:
    """Return the encoded image of a row; None where it holds none.

    Args:
        value: bytes, or {"bytes": ..., "path": ...}.
        roots: folders whose files may be read where a row holds a path and no bytes.
    """
    if isinstance(value, bytes) or value is None:
        return value
    row: dict[str, Any] = value if isinstance(value, dict) else {}
    if isinstance(row.get("bytes"), bytes):
        return bytes(row["bytes"])
    path = row.get("path")
    # The path is untrusted: only files in the caches of `datasets` are read.
    if isinstance(path, str) and any(_is_file_below(Path(path), root) for root in roots):
        try:
            return Path(path).read_bytes()
        except OSError:
            return None
    return None


def _is_file_below(path: Path, root: Path) -> bool:
    try:
        return path.resolve().is_relative_to(root.resolve()) and path.is_file()
    except (OSError, ValueError):
        return False


@dataclass(frozen=True, eq=False)
class TableStore(Store):
    """Images in tables.

    Every process opens the files for itself and keeps the row groups that it read last.
    """

    files: tuple[Path, ...]
    stamps: tuple[tuple[int, int], ...]
    """Each file's size and time of change when it was indexed."""
    kind: TableKind
    column: str
    file: Int64[np.ndarray, " G"]
    """Each group's file (G,)."""
    group: Int64[np.ndarray, " G"]
    """Each group's number in its file (G,)."""
    starts: Int64[np.ndarray, " S"]
    """Each group's first image, and the number of images (G + 1,)."""
    file_starts: Int64[np.ndarray, " T"]
    """Each file's first image, and the number of images (F + 1,)."""
    roots: tuple[Path, ...] = ()
    _cache: _GroupCache = field(default_factory=lambda: _GroupCache(), repr=False)

    def name(self, number: int) -> str:
        file = int(np.searchsorted(self.file_starts, number, "right")) - 1
        return f"{self.files[file].name} row {number - self.file_starts[file]}"

    def encoded(self, number: int) -> bytes:
        group = int(np.searchsorted(self.starts, number, "right")) - 1
        try:
            # Threads share the cache: one reads a group while the others wait for it.
            with self._cache.lock:
                column = self._cache.get(group)
                if column is None:
                    column = self._read(group, number)
                    is_mapped = self.kind == "arrow"  # memory-mapped, so not process memory
                    self._cache.add(group, column, 0 if is_mapped else column.nbytes)
            content = image_bytes(column[int(number - self.starts[group])].as_py(), self.roots)
        except (DataError, OSError) as error:
            raise ImageError(self.name(number), "damaged", str(error)) from error
        if not content:
            raise ImageError(self.name(number), "empty", "expected an image, the row has no bytes")
        return content

    def _read(self, group: int, number: int) -> pa.ChunkedArray:
        file = int(self.file[group])
        if file_stamp(self.files[file]) != self.stamps[file]:
            raise ImageError(
                self.name(number), "missing", "the file was changed after it was opened"
            )
        table = _groups_of(self.files[file], self.kind).read(int(self.group[group]), [self.column])
        return table.column(self.column)


class _GroupCache:
    """An LRU cache of row groups; it is empty again after pickling."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self._columns: OrderedDict[int, pa.ChunkedArray] = OrderedDict()
        self._sizes: dict[int, int] = {}

    def __reduce__(self) -> tuple[type[_GroupCache], tuple[()]]:
        # The lock and the cached images are not pickled.
        return (_GroupCache, ())

    def get(self, group: int) -> pa.ChunkedArray | None:
        """Return a group that is in memory, and mark it as most recently used."""
        if group in self._columns:
            self._columns.move_to_end(group)
        return self._columns.get(group)

    def add(self, group: int, column: pa.ChunkedArray, size: int) -> None:
        """Keep a group of `size` bytes; drop the least recently used ones beyond the limit."""
        self._columns[group] = column
        self._sizes[group] = size
        # The newest group stays, even if it alone is above the limit.
        while len(self._columns) > 1 and sum(self._sizes.values()) > MOST_CACHED:
            oldest, _ = self._columns.popitem(last=False)
            del self._sizes[oldest]


# The columns of a table that hold images and labels, and the class names in its schema.

IMAGE_NAMES = ("image", "img", "picture", "jpg", "png")
LABEL_NAMES = ("label", "labels", "fine_label", "class", "class_name", "target", "cls", "y")
"""Column names in order of preference, if several columns could be meant."""
TYPE_SHOWN = 40
"""Characters of a column's type in a message."""


@dataclass(frozen=True)
class Columns:
    """The columns of images and labels of a table."""

    image: str
    label: str
    classes: tuple[str, ...]
    """The names of the numbers in `label`; empty where the table has none."""


def find_columns(schema: pa.Schema, where: str) -> Columns:
    """Find the columns of images and labels, by their types, then by their names.

    Args:
        schema: schema of the table.
        where: the file's name for messages.

    Raises:
        DataError: none, or several and no usual name among them.
    """
    features = _features(schema)
    images: list[str] = []
    labels: list[str] = []
    for column in schema:
        feature = features.get(column.name, {}).get("_type")
        if feature == "Image" or _holds_bytes(column.type):
            images.append(column.name)
        if feature == "ClassLabel":
            labels.append(column.name)
    # Only tables of `datasets` have a ClassLabel; in others the column name decides.
    if not labels:
        labels = [f.name for f in schema if f.name in LABEL_NAMES and _holds_labels(f.type)]
    shown = ", ".join(f"{escape(f.name)}: {str(f.type)[:TYPE_SHOWN]}" for f in schema)
    image = _choose(images, IMAGE_NAMES, f"{where}: expected one column of images", shown)
    known = ", ".join(LABEL_NAMES)
    usual = f"labels are whole numbers, text, or true and false in a column called {known}"
    label = _choose(
        labels, LABEL_NAMES, f"{where}: expected one column of labels", f"{shown}; {usual}"
    )
    return Columns(image, label, _class_names(features.get(label, {}), label, where))


def _common_columns(files: Sequence[Path], kind: TableKind) -> Columns:
    """Return the columns of the first file, which all others must have, too."""
    columns_of = [find_columns(_groups_of(file, kind).schema, escape(file)) for file in files]
    for file, columns in zip(files, columns_of, strict=True):
        if columns != columns_of[0]:
            raise DataError(
                f"{escape(file)}: its columns or class names differ from those of {files[0].name}"
            )
    return columns_of[0]


def _class_names(feature: dict[str, Any], label: str, where: str) -> tuple[str, ...]:
    """Return the class names that `datasets` wrote for the label column; none for another type."""
    if feature.get("_type") != "ClassLabel":
        return ()
    names = feature.get("names")
    if not isinstance(names, list | tuple) or not all(isinstance(name, str) for name in names):
        raise DataError(f"{where}: the names of {label!r} are not a list of class names")
    # a label is an index into the names
    if len({*names}) < len(names):
        raise DataError(f"{where}: {label!r} has the same class name twice")
    return tuple(names)


def _features(schema: pa.Schema) -> dict[str, dict[str, Any]]:
    """Return the features that `datasets` wrote into a schema, by column; none for other tables."""
    try:
        features = json.loads((schema.metadata or {})[b"huggingface"])["info"]["features"]
        return {name: feature for name, feature in features.items() if isinstance(feature, dict)}
    except (KeyError, ValueError, TypeError, AttributeError, RecursionError):
        return {}


def _holds_bytes(kind: pa.DataType) -> bool:
    import pyarrow as pa

    if pa.types.is_struct(kind):
        index = kind.get_field_index("bytes")
        return index >= 0 and _holds_bytes(kind.field(index).type)
    return bool(pa.types.is_binary(kind) or pa.types.is_large_binary(kind))


def _holds_labels(kind: pa.DataType) -> bool:
    import pyarrow as pa

    if pa.types.is_dictionary(kind):
        kind = kind.value_type
    is_text = pa.types.is_string(kind) or pa.types.is_large_string(kind)
    return bool(pa.types.is_integer(kind) or pa.types.is_boolean(kind) or is_text)


def _choose(candidates: Sequence[str], usual: Sequence[str], expected: str, shown: str) -> str:
    """Return the one column that is meant.

    Args:
        candidates: all that it could be.
        usual: names that decide between several.
        expected: the beginning of the message if there is none, or more than one.
        shown: the columns of the table, and hints, for the end of that message.
    """
    if len(candidates) == 1:
        return candidates[0]
    # Of several columns, the first name in this list wins, not the first in the table.
    for name in usual:
        if name in candidates:
            return name
    found = quote_list(candidates) if candidates else "none"
    raise DataError(f"{expected}, found {found}; the columns are {shown}")


# Open images in tables: Parquet files, and the Arrow files that `datasets` keeps.
#
# A table has one column of images, {bytes, path} or plain bytes, and one of labels, numbers or
# text. Class names come from the features that `datasets` writes into a table's schema, where it
# did. Each file is read through once, for labels and hashes, and its index kept.


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
    columns = _common_columns([*itertools.chain(*files.values())], kind)
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
        groups = _groups_of(path, self.kind)
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
