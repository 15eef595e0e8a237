"""Files that can be made again, in the user's cache folder: each is checked when it is opened.

Every file of the cache has its size and its SHA-256 beside it, in `NAME.sha256`. A file that is
missing, damaged or half-written counts as none and is made anew; a cache that cannot be written
only costs time. All caches are used alike:

    path = cache_folder() / "kind" / "file"
    if not is_whole(path):
        with contextlib.suppress(OSError), caching(path.parent) as folder:
            (folder / path.name).write_bytes(content)

`FileCache` (rows about files) and `cached_index` (columns about one file) are built on these two.
"""

import contextlib
import hashlib
import json
import os
import shutil
import stat
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from io import BufferedReader, FileIO
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Bool, UInt64

from vitkit.randomness import hash64

UNFINISHED = ".unfinished-"
"""Start of the names of folders in which files are written."""
LONGEST_WRITE = 24 * 3600
"""Seconds after which such a folder is one of a process that was killed."""


def cache_folder() -> Path:
    """Return `$VITKIT_CACHE`, else `$XDG_CACHE_HOME/vitkit`, else `~/.cache/vitkit`.

    The environment is read at each call.
    """
    # an empty variable counts as none, as the XDG specification has it
    if own := os.environ.get("VITKIT_CACHE"):
        return Path(own).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "vitkit"


def is_whole(path: Path, *, rehash: bool = True, sha256: str = "") -> bool:
    """Return True for a file of a cache that has the size and the SHA-256 noted beside it.

    Args:
        path: the file.
        rehash: compare the SHA-256, too; without, files of many gigabytes are opened at once.
        sha256: leading hex digits that the noted SHA-256 must have.
    """
    try:
        size, digest = _note(path).read_text().split()
        if path.stat().st_size != int(size) or not digest.startswith(sha256.lower()):
            return False
        return not rehash or file_sha256(path) == digest
    except (OSError, ValueError):
        return False


@contextlib.contextmanager
def caching(folder: Path, *, unhashed: Sequence[str] = ()) -> Iterator[Path]:
    """Yield an empty temporary folder; when the block succeeds, its files move to `folder`.

    Each file replaces one of the same name and gets its size and SHA-256 beside it. Several
    processes may write the same files at once: each file is that of one of them.

    Args:
        folder: created if it does not exist.
        unhashed: names of files whose parts are checked when they are read, as they are too large
            to be read whole each time.

    Raises:
        OSError: it cannot be written; `folder` has no new file that counts as whole.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for left in folder.glob(f"{UNFINISHED}*"):  # by a process that was killed
        if time.time() - left.stat().st_mtime > LONGEST_WRITE:
            shutil.rmtree(left, ignore_errors=True)
    # deleted after Ctrl-C, too
    with tempfile.TemporaryDirectory(dir=folder, prefix=UNFINISHED) as name:
        yield Path(name)
        for file in sorted(Path(name).iterdir()):
            if file.name not in unhashed:
                note = f"{file.stat().st_size} {file_sha256(file)}"
                _note(folder / file.name).write_text(note)
            os.replace(file, folder / file.name)


def _note(path: Path) -> Path:
    return path.with_name(f"{path.name}.sha256")


# Rows about files, which persist from one run to the next.

UNKNOWN = np.uint64(0)
"""The key of a file whose changes cannot be detected; its row is never stored."""


def file_keys(paths: Iterable[str | os.PathLike[str]]) -> UInt64[np.ndarray, " N"]:
    """Return a key for each file (N,): a hash of its inode, size, mtime and ctime.

    `UNKNOWN` for a path that is not a file, cannot be read, or has no inode.
    """
    status = np.fromiter(map(_status, paths), np.dtype((np.int64, 4)))
    return np.where(status[:, 0] == 0, UNKNOWN, hash64(*status.T))


def _status(path: str | os.PathLike[str]) -> tuple[int, int, int, int]:
    """Return inode, size in bytes, mtime and ctime in nanoseconds; zeros if it is not a file."""
    try:
        status = os.stat(path)
    except (OSError, ValueError):
        return 0, 0, 0, 0
    if not stat.S_ISREG(status.st_mode):
        return 0, 0, 0, 0
    inode = status.st_ino
    if inode >= 1 << 63:  # an unsigned number of 64 bits, shifted into the range of int64
        inode -= 1 << 64
    return inode, status.st_size, status.st_mtime_ns, status.st_ctime_ns


class FileCache:
    """Rows of results, each under a 64-bit key, such as those of `file_keys`.

    All rows of a subject lie in one file, sorted by their keys.

    Args:
        kind: the kind of results; each kind has a file of its own.
        subject: the folder or the dataset that the rows are about.
        row: the dtype of one row, of a fixed size.
    """

    def __init__(self, kind: str, subject: str, row: np.dtype[np.void]) -> None:
        name = subject.encode("utf-8", "surrogateescape")
        self.path = cache_folder() / kind / f"{hashlib.sha256(name).hexdigest()[:32]}.npy"
        self._dtype = np.dtype([("key", np.uint64), ("row", row)])
        # keys, rows and what is known of each lookup
        self._lookups: list[tuple[np.ndarray, np.ndarray, np.ndarray]] = []
        self._stored = 0
        """Rows of the lookups that the file holds."""

    def get_many(self, keys: UInt64[np.ndarray, " N"]) -> tuple[np.ndarray, Bool[np.ndarray, " N"]]:
        """Look up the rows of these keys.

        Returns:
            Rows (N,), zeros where unknown, and which of them are known (N,). Both arrays are
            shared with the cache: the caller fills in a missing row and marks it as known, and
            `save` stores it.
        """
        stored = self._read()
        rows = np.zeros(len(keys), self._dtype["row"])
        known = np.isin(keys, stored["key"])
        rows[known] = stored["row"][np.searchsorted(stored["key"], keys[known])]
        self._lookups.append((keys, rows, known))
        self._stored += int(known.sum())
        return rows, known

    def save(self) -> None:
        """Write all rows atomically.

        Stored rows without a lookup belong to files that are gone, or to another selection of
        files; they are kept while they are fewer than the rows in use.
        """
        if not self._lookups:
            return
        parts = []
        for keys, rows, known in self._lookups:
            kept = known & (keys != UNKNOWN)
            parts.append((keys[kept], rows[kept]))
        count = sum(len(keys) for keys, _ in parts)
        stored = self._read()
        unused = stored[~np.isin(stored["key"], np.concatenate([keys for keys, _ in parts]))]
        if 2 * len(unused) > len(stored):
            unused = unused[:0]
        elif count == self._stored:
            return  # the file holds exactly these rows already
        with contextlib.suppress(OSError):
            self._write([*parts, (unused["key"], unused["row"])])
        self._stored = count

    def _read(self) -> np.ndarray:
        """Return the stored rows by ascending keys, mapped from the file; none if it is damaged."""
        if is_whole(self.path):
            with contextlib.suppress(OSError, ValueError):
                stored = np.load(self.path, mmap_mode="r")
                if stored.dtype == self._dtype:
                    return np.asarray(stored)
        return np.zeros(0, self._dtype)

    def _write(self, parts: Sequence[tuple[np.ndarray, np.ndarray]]) -> None:
        order = np.argsort(np.concatenate([keys for keys, _ in parts]))
        places = np.empty_like(order)
        places[order] = np.arange(len(order))
        with caching(self.path.parent) as folder:
            # mapped, so that memory holds no sorted copy
            file = folder / self.path.name
            table = np.lib.format.open_memmap(file, "w+", self._dtype, (len(order),))
            for keys, rows in parts:
                table["key"][places[: len(keys)]] = keys
                table["row"][places[: len(keys)]] = rows
                places = places[len(keys) :]
            table.flush()


# SHA-256 digests of files and of tensors, the same on every machine.


def file_sha256(file: Path | BufferedReader | FileIO) -> str:
    """Return the SHA-256 of a file, or of what is left of an open one, in 64 hex digits.

    Raises:
        OSError: it cannot be read.
    """
    if not isinstance(file, Path):
        return hashlib.file_digest(file, "sha256").hexdigest()
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


# Indexes of large files, so that each file is parsed once.

INDEX_VERSION = 3
TEXT_PREFIX = "text:"
STAMP_KEY = "stamp"


@dataclass(frozen=True)
class Index:
    """Columns about one file: numbers and texts, by name."""

    arrays: dict[str, np.ndarray] = field(default_factory=dict)
    texts: dict[str, list[str]] = field(default_factory=dict)


def file_stamp(file: Path | int) -> tuple[int, int]:
    """Return (size in bytes, time of change in nanoseconds) of a path or an open file."""
    status = os.stat(file)
    return status.st_size, status.st_mtime_ns


def cached_index(path: Path, kind: str, build: Callable[[Path], Index]) -> Index:
    """Return the index of a file, from the cache or built now.

    Args:
        path: the file.
        kind: the index's kind; one file may have indexes of several kinds.
        build: makes it; its errors are passed on.

    Raises:
        OSError: the file does not exist.
    """
    stamp = file_stamp(path)
    # one file by several paths has one index
    name = f"{INDEX_VERSION} {kind} {path.resolve()}".encode("utf-8", "surrogateescape")
    kept = cache_folder() / "indexes" / f"{hashlib.sha256(name).hexdigest()[:32]}.npz"
    index = _read_index(kept, stamp) if is_whole(kept) else None
    if index is None:
        index = build(path)
        # a file that changed meanwhile is indexed again next time
        if file_stamp(path) == stamp:
            with contextlib.suppress(OSError):
                _write_index(kept, index, stamp)
    return index


def _read_index(path: Path, stamp: tuple[int, int]) -> Index | None:
    """Return the stored index of a file, or None where that is of another stamp."""
    index = Index()
    with np.load(path) as stored:
        if tuple(stored[STAMP_KEY].tolist()) != stamp:
            return None
        for name in stored.files:
            if name.startswith(TEXT_PREFIX):
                index.texts[name.removeprefix(TEXT_PREFIX)] = json.loads(stored[name].tobytes())
            elif name != STAMP_KEY:
                index.arrays[name] = stored[name]
    return index


def _write_index(path: Path, index: Index, stamp: tuple[int, int]) -> None:
    columns: dict[str, Any] = {STAMP_KEY: np.array(stamp, np.int64), **index.arrays}
    # texts as JSON bytes: arrays of strings would be as wide as the longest
    for name, lines in index.texts.items():
        columns[TEXT_PREFIX + name] = np.frombuffer(json.dumps(lines).encode(), np.uint8)
    with caching(path.parent) as folder:
        np.savez(folder / path.name, **columns)
