"""Hash files; of many files, those that did not change are not read again."""

from __future__ import annotations

import hashlib
import os
import stat
from concurrent.futures import ThreadPoolExecutor

import numpy as np
from jaxtyping import Bool, Int64, UInt8

from vitkit.data.datasets.path_list import Paths
from vitkit.data.images.rereading import may_pass, patiently
from vitkit.io.file_cache import FileCache, file_keys

DIGEST = np.dtype([("sha256", np.uint8, (32,))])
LEAST_REMEMBERED = 1000
"""Fewer files are hashed again in no time."""
GROUP = 256
"""Files that a thread hashes at once; handing over one costs more than hashing it."""
NOTHING = hashlib.sha256().digest()
"""Of a file that cannot be read, which decoding it will report; it is not remembered."""


def file_digests(paths: Paths) -> UInt8[np.ndarray, "N 32"]:
    """SHA-256 of every file, in order; of many files, those that are unchanged are remembered."""
    hasher = _Hasher(paths)
    if len(paths) < LEAST_REMEMBERED:
        return hasher(np.arange(len(paths)))
    memory = FileCache(
        "digests", os.path.realpath(os.path.commonpath((paths[0], paths[-1]))), DIGEST
    )
    keys = file_keys(paths.texts())
    rows, known = memory.get_many(keys)
    known &= _has_content(rows["sha256"])
    new = np.flatnonzero(~known)
    groups = [new[start : start + GROUP] for start in range(0, len(new), GROUP)]
    with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:
        for group, digests in zip(groups, pool.map(hasher, groups), strict=True):
            rows["sha256"][group] = digests
    known[:] = _has_content(rows["sha256"])
    memory.save()
    return np.asarray(rows["sha256"])


class _Hasher:
    """Hashes files, patiently until one fails for good: then the disk is gone.

    Args:
        paths: of the files.
    """

    def __init__(self, paths: Paths) -> None:
        self._paths, self._gone = paths, False

    def __call__(self, places: Int64[np.ndarray, " M"]) -> UInt8[np.ndarray, "M 32"]:
        """SHA-256 of the files at some places."""
        digests = b"".join(map(self._digest, self._paths.take(places).texts()))
        return np.frombuffer(digests, np.uint8).reshape(-1, 32)

    def _digest(self, path: str) -> bytes:
        try:
            return _digest(path) if self._gone else patiently(lambda: _digest(path))
        except OSError as error:
            self._gone |= may_pass(error)
            return NOTHING


def _digest(path: str) -> bytes:
    if not stat.S_ISREG(os.stat(path).st_mode):
        return NOTHING
    with open(path, "rb") as handle:
        return hashlib.file_digest(handle, "sha256").digest()


def _has_content(digests: UInt8[np.ndarray, "N 32"]) -> Bool[np.ndarray, " N"]:
    return np.asarray((digests != np.frombuffer(NOTHING, np.uint8)).any(axis=1))
