"""Persistent indexes of large files, so that a file is parsed once.

An index is arrays and lists of text about one file. It is kept in the user's cache under the file's
path or address; that of a local file is valid while the file has the same size and time of change.
An index that is missing, damaged or of another version is built again; a cache that cannot be
written only costs time.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import zipfile
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from vitkit.io.atomic import replacing_in_cache
from vitkit.io.cache_folder import cache_folder

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
