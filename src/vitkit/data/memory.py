"""What was found out about each of many files, kept so that unchanged files are not read again.

A `Memory` is rows of one size, each under a 64-bit key. The key of a file is made of its inode,
size, and times of change, so a row is found as long as its file is the same and never after. All
rows lie in one file of the user's cache. A memory that is missing, damaged or of an older make is
an empty one, and a cache that cannot be written only costs time.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import stat
import tempfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from jaxtyping import Bool, UInt64

from vitkit.data.randomness import hash64
from vitkit.places import cache_folder

VERSION = 1
CHECKSUM_SIZE = 16
UNKNOWN = np.uint64(0)
"""The key of what cannot be told from its earlier self; never kept."""


def file_keys(paths: Sequence[Path]) -> UInt64[np.ndarray, " N"]:
    """A key for each file; `UNKNOWN` for what is no file, cannot be seen, or has no inode."""
    facts = np.zeros((4, len(paths)), np.int64)
    for place, path in enumerate(paths):
        try:
            found = os.stat(path)
        except (OSError, ValueError):
            continue
        if stat.S_ISREG(found.st_mode):
            # a number of the file system's, which may have all 64 bits
            inode = found.st_ino if found.st_ino < 1 << 63 else found.st_ino - (1 << 64)
            facts[:, place] = inode, found.st_size, found.st_mtime_ns, found.st_ctime_ns
    return np.where(facts[0] == 0, UNKNOWN, hash64(*facts))


class Memory:
    """Rows kept from one run to the next.

    Args:
        kind: what the rows tell; another kind is another file.
        about: the folder or the data set that the rows are about.
        row: the type of one row, of a fixed size.
    """

    def __init__(self, kind: str, about: str, row: np.dtype[np.void]) -> None:
        name = about.encode("utf-8", "surrogateescape")
        self.place = cache_folder() / kind / f"{hashlib.sha256(name).hexdigest()[:32]}.rows"
        self._type = np.dtype([("key", np.uint64), ("row", row)])
        self._head = f"vitkit {kind} {VERSION} {self._type}\n".encode()
        self._old = self._read()
        self._used = np.zeros(len(self._old), bool)
        self._new: list[np.ndarray] = []

    def recall(self, keys: UInt64[np.ndarray, " N"]) -> tuple[np.ndarray, Bool[np.ndarray, " N"]]:
        """The rows of these keys (N,), and which of them are known (N,); the others are zeros."""
        rows = np.zeros(len(keys), self._type["row"])
        if len(self._old) == 0:
            return rows, np.zeros(len(keys), bool)
        places = np.minimum(np.searchsorted(self._old["key"], keys), len(self._old) - 1)
        known = (self._old["key"][places] == keys) & (keys != UNKNOWN)
        rows[known] = self._old["row"][places[known]]
        self._used[places[known]] = True
        return rows, known

    def add(self, keys: UInt64[np.ndarray, " N"], rows: np.ndarray) -> None:
        """Take in new rows; `save` writes them."""
        fresh = np.zeros(int((keys != UNKNOWN).sum()), self._type)
        fresh["key"], fresh["row"] = keys[keys != UNKNOWN], rows[keys != UNKNOWN]
        if len(fresh):
            self._new.append(fresh)

    def save(self) -> None:
        """Write all rows, whole or not at all.

        Rows that nobody has asked for belong to files that are gone or to another selection of
        them; they stay while they are the smaller part.
        """
        used, idle = self._old[self._used], self._old[~self._used]
        if len(idle) > len(used):
            idle = idle[:0]
        elif not self._new:
            return
        rows = np.concatenate([*self._new, used, idle])
        _, places = np.unique(rows["key"], return_index=True)
        self._write(rows[places].tobytes())

    def _read(self) -> np.ndarray:
        nothing = np.zeros(0, self._type)
        try:
            content = self.place.read_bytes()
        except OSError:
            return nothing
        start = len(self._head) + CHECKSUM_SIZE
        body = memoryview(content)[start:]
        whole = content[:start] == self._head + _checksum(body) and not len(body) % nothing.itemsize
        return np.frombuffer(body, self._type) if whole else nothing

    def _write(self, body: bytes) -> None:
        with contextlib.suppress(OSError):
            self.place.parent.mkdir(parents=True, exist_ok=True)
            descriptor, name = tempfile.mkstemp(dir=self.place.parent, suffix=".tmp")
            try:
                with os.fdopen(descriptor, "wb") as file:
                    file.write(self._head + _checksum(body))
                    file.write(body)
                os.replace(name, self.place)
            except BaseException:
                os.unlink(name)
                raise


def _checksum(body: bytes | memoryview) -> bytes:
    return hashlib.blake2b(body, digest_size=CHECKSUM_SIZE).digest()
