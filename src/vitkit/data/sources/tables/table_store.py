"""Images in tables, read a group of rows at a time; the last groups are kept in memory."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from jaxtyping import Int64

from vitkit.data.datasets.dataset import Store
from vitkit.errors import DataError, ImageError
from vitkit.io.index_cache import file_stamp
from vitkit.messages import escape

if TYPE_CHECKING:
    import pyarrow as pa
    from pyarrow.parquet import ParquetFile

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


def groups_of(path: Path, kind: TableKind) -> RowGroups:
    """Open a table.

    Raises:
        DataError: it cannot be read, or is none.
    """
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
        table = groups_of(self.files[file], self.kind).read(int(self.group[group]), [self.column])
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
