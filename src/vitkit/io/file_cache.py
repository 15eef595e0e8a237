"""Persistent results about many files, so that unchanged files are not read again.

A `FileCache` holds rows of one size, each under a 64-bit key. The key of a file is a hash of its
inode, size, mtime and ctime, so a row is found while its file is unchanged and never after. All
rows lie in one file of the user's cache. A file that is missing, damaged or of another version
counts as empty, and a cache that cannot be written only costs time.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import stat
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import BinaryIO

import numpy as np
from jaxtyping import Bool, UInt64

from vitkit.io.atomic import replacing_in_cache
from vitkit.io.cache_folder import cache_folder
from vitkit.randomness import hash64

ROWS_VERSION = 2
CHECKSUM_SIZE = 16
BLOCK_ROWS = 1 << 12
"""Rows that are read or written at once."""
UNKNOWN = np.uint64(0)
"""The key of a file whose changes cannot be detected; its row is never stored."""


def file_keys(paths: Iterable[str | os.PathLike[str]]) -> UInt64[np.ndarray, " N"]:
    """Return a key for each file (N,).

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
    """Rows of results that persist from one run to the next.

    Args:
        kind: the kind of results; each kind has a file of its own.
        subject: the folder or the dataset that the rows are about.
        row: the dtype of one row, of a fixed size.
    """

    def __init__(self, kind: str, subject: str, row: np.dtype[np.void]) -> None:
        name = subject.encode("utf-8", "surrogateescape")
        self.path = cache_folder() / kind / f"{hashlib.sha256(name).hexdigest()[:32]}.rows"
        self._dtype = np.dtype([("key", np.uint64), ("row", row)])
        self._header = f"vitkit {kind} {ROWS_VERSION} {self._dtype}\n".encode()
        self._lookups: list[_Lookup] = []
        self._stored = 0
        """Rows of the lookups that the file holds."""

    def get_many(self, keys: UInt64[np.ndarray, " N"]) -> tuple[np.ndarray, Bool[np.ndarray, " N"]]:
        """Look up the rows of these keys.

        Returns:
            Rows (N,), zeros where unknown, and which of them are known (N,). Both arrays are
            shared with the cache: the caller fills in a missing row and marks it as known, and
            `save` stores it. So there is no second copy of the rows.
        """
        rows = np.zeros(len(keys), self._dtype["row"])
        known = np.zeros(len(keys), bool)
        order = np.argsort(keys)
        # block by block, so that memory holds only the rows that are looked up
        for block in self._read():
            # the keys that can be in this block, which is sorted too
            low = np.searchsorted(keys, block["key"][0], "left", sorter=order)
            high = np.searchsorted(keys, block["key"][-1], "right", sorter=order)
            candidates = order[low:high]
            positions = np.searchsorted(block["key"], keys[candidates])
            match = block["key"][positions] == keys[candidates]
            rows[candidates[match]] = block["row"][positions[match]]
            known[candidates[match]] = True
        self._lookups.append(_Lookup(keys, rows, known))
        self._stored += int(known.sum())
        return rows, known

    def save(self, *, finished: bool = True) -> None:
        """Write all rows atomically.

        Once every lookup is made, stored rows without a lookup belong to files that are gone, or to
        another selection of files; they are kept while they are fewer than the rows in use.

        Args:
            finished: True if no further lookup will follow.
        """
        keys = np.concatenate(
            [np.zeros(0, np.uint64), *(lookup.known_keys() for lookup in self._lookups)]
        )
        known_count = int((keys != UNKNOWN).sum())
        keys.sort()
        used = 0
        unused_blocks = []
        for block in self._read():
            positions = np.searchsorted(keys, block["key"], "left")
            in_use = positions < np.searchsorted(keys, block["key"], "right")
            used += int(in_use.sum())
            unused_blocks.append(block[~in_use])
        unused = np.concatenate([np.zeros(0, self._dtype), *unused_blocks])
        if finished and len(unused) > used:
            unused = unused[:0]
        elif known_count == self._stored:
            return  # the file holds exactly these rows already
        rest = _Lookup(unused["key"], unused["row"], np.ones(len(unused), bool))
        with contextlib.suppress(OSError):
            self._write([*self._lookups, rest])
        self._stored = known_count

    def _read(self) -> Iterator[np.ndarray]:
        """Yield the stored rows in blocks, by ascending keys; nothing if the file is damaged."""
        with contextlib.suppress(OSError), self.path.open("rb") as file:
            if not self._is_whole(file):
                return
            file.seek(len(self._header) + CHECKSUM_SIZE)
            while content := file.read(BLOCK_ROWS * self._dtype.itemsize):
                yield np.frombuffer(content, self._dtype)

    def _is_whole(self, file: BinaryIO) -> bool:
        if file.read(len(self._header)) != self._header:
            return False
        stored = file.read(CHECKSUM_SIZE)
        checksum = _checksum()
        size = 0
        while content := file.read(BLOCK_ROWS * self._dtype.itemsize):
            checksum.update(content)
            size += len(content)
        return stored == checksum.digest() and size % self._dtype.itemsize == 0

    def _blocks(self, lookups: Sequence[_Lookup]) -> Iterator[bytes]:
        """Yield all known rows by ascending keys."""
        keys = np.concatenate([lookup.known_keys() for lookup in lookups])
        order = np.argsort(keys)
        # UNKNOWN is 0, so rows that are not known come first and are skipped
        for start in range(int((keys == UNKNOWN).sum()), len(keys), BLOCK_ROWS):
            chosen = order[start : start + BLOCK_ROWS]
            block = np.empty(len(chosen), self._dtype)
            block["key"] = keys[chosen]
            first = 0
            for lookup in lookups:
                own = (chosen >= first) & (chosen < first + len(lookup.rows))
                block["row"][own] = lookup.rows[chosen[own] - first]
                first += len(lookup.rows)
            yield block.tobytes()

    def _write(self, lookups: Sequence[_Lookup]) -> None:
        with replacing_in_cache(self.path) as file:
            file.write(self._header + bytes(CHECKSUM_SIZE))  # filled in at the end
            checksum = _checksum()
            for content in self._blocks(lookups):
                checksum.update(content)
                file.write(content)
            file.seek(len(self._header))
            file.write(checksum.digest())


@dataclass(frozen=True, eq=False)
class _Lookup:
    """Keys that were looked up, with the rows that are known by now."""

    keys: UInt64[np.ndarray, " N"]
    rows: np.ndarray
    known: Bool[np.ndarray, " N"]

    def known_keys(self) -> UInt64[np.ndarray, " N"]:
        """Return the keys (N,), `UNKNOWN` where the row is not known."""
        return np.where(self.known, self.keys, UNKNOWN)


def _checksum() -> hashlib.blake2b:
    return hashlib.blake2b(digest_size=CHECKSUM_SIZE)
