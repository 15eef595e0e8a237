"""Hash files; of many files, those that did not change are not read again."""

from __future__ import annotations

import hashlib
import os
import stat
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import numpy as np
from jaxtyping import Int64, UInt8

from vitkit.data.memory import Memory, file_keys
from vitkit.data.paths import Paths

DIGEST = np.dtype([("sha256", np.uint8, (32,))])
LEAST_REMEMBERED = 1000
"""Fewer files are hashed again in no time."""
GROUP = 256
"""Files that a thread hashes at once; handing over one costs more than hashing it."""


def file_digests(paths: Paths) -> UInt8[np.ndarray, "N 32"]:
    """SHA-256 of every file, in order; of many files, those that are unchanged are remembered."""
    if len(paths) < LEAST_REMEMBERED:
        return _digests(paths, np.arange(len(paths)))
    memory = Memory("digests", os.path.realpath(os.path.commonpath((paths[0], paths[-1]))), DIGEST)
    keys = file_keys(paths.texts())
    rows, known = memory.recall(keys)
    new = np.flatnonzero(~known)
    groups = [new[start : start + GROUP] for start in range(0, len(new), GROUP)]
    with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:
        for group, digests in zip(groups, pool.map(partial(_digests, paths), groups), strict=True):
            rows["sha256"][group] = digests
    known[:] = True
    memory.save()
    return np.asarray(rows["sha256"])


def _digests(paths: Paths, places: Int64[np.ndarray, " M"]) -> UInt8[np.ndarray, "M 32"]:
    digests = b"".join(map(_digest, paths.take(places).texts()))
    return np.frombuffer(digests, np.uint8).reshape(-1, 32)


def _digest(path: str) -> bytes:
    """SHA-256 of a file; of nothing where it cannot be read, which decoding it will report."""
    try:
        if stat.S_ISREG(os.stat(path).st_mode):
            with open(path, "rb") as handle:
                return hashlib.file_digest(handle, "sha256").digest()
    except OSError:
        pass
    return hashlib.sha256().digest()
