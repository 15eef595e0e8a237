"""Caches of the user: rows about files, indexes of large files, and SHA-256 digests.

A `FileCache` holds rows of one size, each under a 64-bit key. The key of a file is a hash of its
inode, size, mtime and ctime, so a row is found while its file is unchanged and never after. All
rows lie in one file of the user's cache. A file that is missing, damaged or of another version
counts as empty, and a cache that cannot be written only costs time.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import stat
import zipfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from io import BufferedReader, FileIO
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

import numpy as np
from jaxtyping import Bool, UInt64

from vitkit.io.atomic import replacing_in_cache
from vitkit.randomness import hash64

if TYPE_CHECKING:
    from torch import Tensor

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


# The user's cache folder: everything in it can be computed or fetched again.


def cache_folder() -> Path:
    """Return `$VITKIT_CACHE`, else `$XDG_CACHE_HOME/vitkit`, else `~/.cache/vitkit`.

    The environment is read at each call.
    """
    # an empty variable counts as none, as the XDG specification has it
    if own := os.environ.get("VITKIT_CACHE"):
        return Path(own).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "vitkit"


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


def tensor_digests(tensors: Mapping[str, Tensor]) -> dict[str, str]:
    """Return a SHA-256 for each group of tensors: `blocks.3`, `patch_embed`, `head`, `cls_token`.

    Each digest covers name, dtype, shape and bytes of the group's tensors, in the order of their
    names. So damage is located, and parts of two models are compared by their headers alone.
    """
    groups: dict[str, list[str]] = {}
    for name in sorted(tensors):
        parts = name.split(".")
        groups.setdefault(".".join(parts[: 2 if parts[0] == "blocks" else 1]), []).append(name)
    with ThreadPoolExecutor(2) as threads:  # hashing releases the interpreter lock
        digests = threads.map(partial(_group_digest, tensors), groups.values())
        return dict(zip(groups, digests, strict=True))


def _group_digest(tensors: Mapping[str, Tensor], names: Sequence[str]) -> str:
    import torch  # here: a check of images needs digests of files, but no torch

    sha256 = hashlib.sha256()
    for name in names:
        tensor = tensors[name].detach().cpu().contiguous()
        # shape and dtype too: equal bytes may be other numbers
        sha256.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        sha256.update(tensor.flatten().view(torch.uint8).numpy().data)
    return sha256.hexdigest()


def weights_fingerprint(tensors: Mapping[str, Tensor], without: Sequence[str] = ()) -> str:
    """Return one SHA-256 of a model's tensors, in 64 hex digits.

    Args:
        tensors: name -> tensor, as in a state dict.
        without: groups to leave out, such as `head`.
    """
    digests = tensor_digests(tensors)
    for group in without:
        digests.pop(group, None)
    return hashlib.sha256(json.dumps(digests, sort_keys=True).encode()).hexdigest()


# Persistent indexes of large files, so that a file is parsed once.
#
# An index is arrays and lists of text about one file. It is kept in the user's cache under the
# file's path or address; that of a local file is valid while the file has the same size and time of
# change. An index that is missing, damaged or of another version is built again; a cache that
# cannot be written only costs time.

INDEX_VERSION = 2
DAMAGE_ERRORS = (OSError, ValueError, KeyError, EOFError, RuntimeError, zipfile.BadZipFile)
"""Errors that reading a missing or damaged .npz file raises, `RuntimeError` where a wrong bit marks
a member as encrypted or of a later version."""
TEXT_PREFIX = "text:"
STAMP_KEY = "stamp"
NO_STAMP = (0, 0)
"""The stamp of a file that is not local."""


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
    subject = str(path.resolve())
    index = kept_index(subject, kind, stamp)
    if index is None:
        index = build(path)
        # a file that changed meanwhile is indexed again next time
        if file_stamp(path) == stamp:
            keep_index(subject, kind, index, stamp)
    return index


def kept_index(subject: str, kind: str, stamp: tuple[int, int] = NO_STAMP) -> Index | None:
    """Return the stored index of a file of this stamp, or None.

    Args:
        subject: the file's resolved path or its address.
        kind: as for `cached_index`.
        stamp: as `file_stamp` returns it.
    """
    try:
        # allow_pickle=False: reading an array of objects would run code
        with _path(subject, kind).open("rb") as file, np.load(file, allow_pickle=False) as stored:
            if tuple(stored[STAMP_KEY].tolist()) != stamp:
                return None
            index = Index()
            for name in stored.files:
                if name.startswith(TEXT_PREFIX):
                    text = json.loads(stored[name].tobytes())
                    index.texts[name.removeprefix(TEXT_PREFIX)] = text
                elif name != STAMP_KEY:
                    index.arrays[name] = stored[name]
    except DAMAGE_ERRORS:
        return None
    return index


def keep_index(subject: str, kind: str, index: Index, stamp: tuple[int, int] = NO_STAMP) -> None:
    """Store the index of a file of this stamp; do nothing where the cache cannot be written."""
    columns: dict[str, Any] = {STAMP_KEY: np.array(stamp, np.int64), **index.arrays}
    # texts as JSON bytes: arrays of strings would be as wide as the longest
    for name, lines in index.texts.items():
        columns[TEXT_PREFIX + name] = np.frombuffer(json.dumps(lines).encode(), np.uint8)
    with contextlib.suppress(OSError), replacing_in_cache(_path(subject, kind)) as file:
        np.savez(file, **columns)


def forget_index(subject: str, kind: str) -> None:
    """Delete a stored index, so that it is built again."""
    with contextlib.suppress(OSError):
        _path(subject, kind).unlink()


def _path(subject: str, kind: str) -> Path:
    name = f"{INDEX_VERSION} {kind} {subject}".encode("utf-8", "surrogateescape")
    return cache_folder() / "indexes" / f"{hashlib.sha256(name).hexdigest()[:32]}.npz"
