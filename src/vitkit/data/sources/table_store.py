"""Reading images out of tables: a group of rows at a time, the last ones kept."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol, runtime_checkable

import numpy as np
from jaxtyping import Int64

from vitkit.data.images.decode import escape
from vitkit.errors import DataError, ImageError
from vitkit.io.index_cache import stamp

if TYPE_CHECKING:
    import pyarrow as pa
    from pyarrow.parquet import ParquetFile

Kind = Literal["parquet", "arrow"]

MOST_KEPT = 256 << 20
"""Bytes of row groups that one process keeps."""


@runtime_checkable
class Groups(Protocol):
    """An open table: groups of rows, each of which can be read by itself."""

    schema: pa.Schema

    def __len__(self) -> int:
        """How many groups."""

    def read(self, number: int, columns: list[str]) -> pa.Table:
        """Some columns of a group; raises `DataError` where it is damaged."""


def groups_of(path: Path, kind: Kind) -> Groups:
    """Open a table.

    Raises:
        DataError: it cannot be read, or is none.
    """
    return _ParquetGroups(path) if kind == "parquet" else _ArrowGroups(path)


class _ParquetGroups:
    """The row groups of a Parquet file."""

    def __init__(self, path: Path) -> None:
        import pyarrow as pa
        from pyarrow.parquet import ParquetFile

        self._path, self._errors = path, (pa.ArrowException, OSError)
        try:
            # Threads of a library would not live on in a forked worker.
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


class _ArrowGroups:
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


def _refused(path: Path, what: str, error: BaseException) -> DataError:
    return DataError(f"{escape(path)}: cannot be read as a {what} file: {error}")


def image_bytes(value: object, roots: Sequence[Path]) -> bytes | None:
    """The encoded image of a row; None where it holds none.

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
    if isinstance(path, str) and any(_below(Path(path), root) for root in roots):
        try:
            return Path(path).read_bytes()
        except OSError:
            return None
    return None


def _below(path: Path, root: Path) -> bool:
    try:
        return path.resolve().is_relative_to(root.resolve()) and path.is_file()
    except (OSError, ValueError):
        return False


@dataclass(frozen=True, eq=False)
class TableStore:
    """Images in tables. Every process opens the files for itself and keeps the groups it read
    last."""

    files: tuple[Path, ...]
    stamps: tuple[tuple[int, int], ...]
    """Each file's size and time of change when it was indexed."""
    kind: Kind
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
    _kept: _Kept = field(default_factory=lambda: _Kept(), repr=False)

    def name(self, number: int) -> str:
        file = int(np.searchsorted(self.file_starts, number, "right")) - 1
        return f"{self.files[file].name} row {number - self.file_starts[file]}"

    def encoded(self, number: int) -> bytes:
        place = int(np.searchsorted(self.starts, number, "right")) - 1
        try:
            with self._kept.lock:
                column = self._kept.get(place)
                if column is None:
                    column = self._read(place, number)
                    mapped = self.kind == "arrow"  # the system's memory, not ours
                    self._kept.add(place, column, 0 if mapped else column.nbytes)
            content = image_bytes(column[int(number - self.starts[place])].as_py(), self.roots)
        except (DataError, OSError) as error:
            raise ImageError(self.name(number), "damaged", str(error)) from error
        if not content:
            raise ImageError(self.name(number), "empty", "expected an image, the row has no bytes")
        return content

    def _read(self, place: int, number: int) -> pa.ChunkedArray:
        file = int(self.file[place])
        if stamp(self.files[file]) != self.stamps[file]:
            raise ImageError(
                self.name(number), "missing", "the file was changed after it was opened"
            )
        table = groups_of(self.files[file], self.kind).read(int(self.group[place]), [self.column])
        return table.column(self.column)


class _Kept:
    """The groups that were read last; empty again in a process it is sent to."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self._columns: OrderedDict[int, pa.ChunkedArray] = OrderedDict()
        self._sizes: dict[int, int] = {}

    def __reduce__(self) -> tuple[type[_Kept], tuple[()]]:
        return (_Kept, ())

    def get(self, place: int) -> pa.ChunkedArray | None:
        """A group that is kept, from now on the one used last."""
        if place in self._columns:
            self._columns.move_to_end(place)
        return self._columns.get(place)

    def add(self, place: int, column: pa.ChunkedArray, size: int) -> None:
        """Keep a group of `size` bytes; the ones used longest ago make room."""
        self._columns[place], self._sizes[place] = column, size
        while len(self._columns) > 1 and sum(self._sizes.values()) > MOST_KEPT:
            oldest, _ = self._columns.popitem(last=False)
            del self._sizes[oldest]
