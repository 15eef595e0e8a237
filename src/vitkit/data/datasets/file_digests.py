"""SHA-256 of files; in large datasets the digests of unchanged files come from a cache."""

from __future__ import annotations

import hashlib
import os
import stat
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np
from jaxtyping import Bool, UInt8

from vitkit.io.file_cache import FileCache, file_keys
from vitkit.process import available_cores

DIGEST = np.dtype([("sha256", np.uint8, (32,))])
LEAST_CACHED = 1000
"""Fewer files are hashed again, without the cache, as that is fast."""
DIGEST_GROUP = 256
"""Files that a thread hashes at once; handing over one costs more than hashing it."""
HASHING_THREADS = 8
NO_CONTENT = hashlib.sha256().digest()
"""Digest of an unreadable file, which decoding reports; it is not cached."""


def file_digests(paths: Sequence[str]) -> UInt8[np.ndarray, "N 32"]:
    """Return the SHA-256 of every file, in order; many files are looked up in a cache first."""
    if len(paths) < LEAST_CACHED:
        return _digests(paths)
    # Two paths are enough to name the cache: the same dataset gives the same folder.
    folder = os.path.realpath(os.path.commonpath((paths[0], paths[-1])))
    cache = FileCache("digests", folder, DIGEST)
    rows, known = cache.get_many(file_keys(paths))
    known &= _has_content(rows["sha256"])
    new = np.flatnonzero(~known)
    groups = [new[start : start + DIGEST_GROUP] for start in range(0, len(new), DIGEST_GROUP)]
    chosen = ([paths[index] for index in group] for group in groups)
    with ThreadPoolExecutor(min(HASHING_THREADS, available_cores())) as pool:
        for group, digests in zip(groups, pool.map(_digests, chosen), strict=True):
            rows["sha256"][group] = digests
    # `rows` and `known` are shared with the cache: what is marked as known is saved.
    known[:] = _has_content(rows["sha256"])
    cache.save()
    return np.asarray(rows["sha256"])


def _digests(paths: Sequence[str]) -> UInt8[np.ndarray, "M 32"]:
    return np.frombuffer(b"".join(map(_digest, paths)), np.uint8).reshape(-1, 32)


def _digest(path: str) -> bytes:
    try:
        # Opening a FIFO would wait for a writer.
        if not stat.S_ISREG(os.stat(path).st_mode):
            return NO_CONTENT
        with open(path, "rb") as handle:
            return hashlib.file_digest(handle, "sha256").digest()
    except (OSError, ValueError):  # `ValueError`: a path with a zero byte
        return NO_CONTENT


def _has_content(digests: UInt8[np.ndarray, "N 32"]) -> Bool[np.ndarray, " N"]:
    return np.asarray((digests != np.frombuffer(NO_CONTENT, np.uint8)).any(axis=1))
