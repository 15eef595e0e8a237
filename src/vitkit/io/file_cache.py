"""What was found out about each of many files, kept so that unchanged files are not read again.

A `FileCache` is rows of one size, each under a 64-bit key. The key of a file is made of its inode,
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
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import BinaryIO

import numpy as np
from jaxtyping import Bool, UInt64

from vitkit.io.cache_folder import cache_folder
from vitkit.randomness import hash64

VERSION = 2
CHECKSUM_SIZE = 16
AT_ONCE = 1 << 12
"""Rows that are read or written at once."""
UNKNOWN = np.uint64(0)
"""The key of what cannot be told from its earlier self; never kept."""


def file_keys(paths: Iterable[str | os.PathLike[str]]) -> UInt64[np.ndarray, " N"]:
    """A key for each file; `UNKNOWN` for what is no file, cannot be seen, or has no inode."""
    facts = np.fromiter(map(_facts, paths), np.dtype((np.int64, 4)))
    return np.where(facts[:, 0] == 0, UNKNOWN, hash64(*facts.T))


def _facts(path: str | os.PathLike[str]) -> tuple[int, int, int, int]:
    """Inode, size in bytes, and times of change in nanoseconds; zeros for what is no file."""
    try:
        found = os.stat(path)
    except (OSError, ValueError):
        return 0, 0, 0, 0
    if not stat.S_ISREG(found.st_mode):
        return 0, 0, 0, 0
    # the file system's number may have all 64 bits
    inode = found.st_ino if found.st_ino < 1 << 63 else found.st_ino - (1 << 64)
    return inode, found.st_size, found.st_mtime_ns, found.st_ctime_ns


class FileCache:
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
        self._asked: list[_Asked] = []
        self._stored = 0
        """How many of the rows asked for the file holds."""

    def get_many(self, keys: UInt64[np.ndarray, " N"]) -> tuple[np.ndarray, Bool[np.ndarray, " N"]]:
        """The rows of these keys (N,), and which of them are known (N,); the others are zeros.

        Both arrays are shared: who finds out a row fills it in and marks it as known, and `save`
        writes it. So there is no second copy of the rows.
        """
        rows, known = np.zeros(len(keys), self._type["row"]), np.zeros(len(keys), bool)
        order = np.argsort(keys)
        for block in self._read():
            low = np.searchsorted(keys, block["key"][0], "left", sorter=order)
            high = np.searchsorted(keys, block["key"][-1], "right", sorter=order)
            some = order[low:high]
            places = np.searchsorted(block["key"], keys[some])
            found = block["key"][places] == keys[some]
            rows[some[found]] = block["row"][places[found]]
            known[some[found]] = True
        self._asked.append(_Asked(keys, rows, known))
        self._stored += int(known.sum())
        return rows, known

    def save(self, *, finished: bool = True) -> None:
        """Write all rows, whole or not at all.

        Rows that nobody has asked for, once all is asked for, belong to files that are gone or to
        another selection of them; they stay while they are the smaller part.

        Args:
            finished: whether all is asked for.
        """
        keys = np.concatenate([np.zeros(0, np.uint64), *(asked.told() for asked in self._asked)])
        told = int((keys != UNKNOWN).sum())
        keys.sort()
        used, idle = 0, []
        for block in self._read():
            places = np.searchsorted(keys, block["key"], "left")
            among = places < np.searchsorted(keys, block["key"], "right")
            used += int(among.sum())
            idle.append(block[~among])
        rest = np.concatenate([np.zeros(0, self._type), *idle])
        if finished and len(rest) > used:
            rest = rest[:0]
        elif told == self._stored:
            return
        self._write([*self._asked, _Asked(rest["key"], rest["row"], np.ones(len(rest), bool))])
        self._stored = told

    def _read(self) -> Iterator[np.ndarray]:
        """What the file holds, in blocks, by ascending keys; nothing where it is damaged."""
        with contextlib.suppress(OSError), self.place.open("rb") as file:
            if not self._is_whole(file):
                return
            file.seek(len(self._head) + CHECKSUM_SIZE)
            while content := file.read(AT_ONCE * self._type.itemsize):
                yield np.frombuffer(content, self._type)

    def _is_whole(self, file: BinaryIO) -> bool:
        if file.read(len(self._head)) != self._head:
            return False
        stored, checksum, size = file.read(CHECKSUM_SIZE), _checksum(), 0
        while content := file.read(AT_ONCE * self._type.itemsize):
            checksum.update(content)
            size += len(content)
        return stored == checksum.digest() and size % self._type.itemsize == 0

    def _blocks(self, parts: Sequence[_Asked]) -> Iterator[bytes]:
        """All rows that are told, by ascending keys."""
        keys = np.concatenate([part.told() for part in parts])
        order = np.argsort(keys)
        for start in range(int((keys == UNKNOWN).sum()), len(keys), AT_ONCE):
            some = order[start : start + AT_ONCE]
            block = np.empty(len(some), self._type)
            block["key"] = keys[some]
            first = 0
            for part in parts:
                here = (some >= first) & (some < first + len(part.rows))
                block["row"][here] = part.rows[some[here] - first]
                first += len(part.rows)
            yield block.tobytes()

    def _write(self, parts: Sequence[_Asked]) -> None:
        with contextlib.suppress(OSError):
            self.place.parent.mkdir(parents=True, exist_ok=True)
            descriptor, name = tempfile.mkstemp(dir=self.place.parent, suffix=".tmp")
            try:
                with os.fdopen(descriptor, "wb") as file:
                    file.write(self._head + bytes(CHECKSUM_SIZE))
                    checksum = _checksum()
                    for content in self._blocks(parts):
                        checksum.update(content)
                        file.write(content)
                    file.seek(len(self._head))
                    file.write(checksum.digest())
                os.replace(name, self.place)
            except BaseException:
                os.unlink(name)
                raise


@dataclass(frozen=True, eq=False)
class _Asked:
    """What was asked for, and what is known of it by now."""

    keys: UInt64[np.ndarray, " N"]
    rows: np.ndarray
    known: Bool[np.ndarray, " N"]

    def told(self) -> UInt64[np.ndarray, " N"]:
        """The keys (N,), `UNKNOWN` where there is nothing to keep."""
        return np.where(self.known, self.keys, UNKNOWN)


def _checksum() -> hashlib.blake2b:
    return hashlib.blake2b(digest_size=CHECKSUM_SIZE)
