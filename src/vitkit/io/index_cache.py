"""What was found out about a large file, kept so that it is found out once.

An index is arrays and lists of text about one file. It is kept in the user's cache under the file's
place or address; that of a local file is used while the file has the same size and time of change.
An index that is missing, damaged or of an older make is built again; a cache that cannot be written
only costs time.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import os
import tempfile
import zipfile
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from vitkit.io.cache_folder import cache_folder

VERSION = 2
DAMAGE = (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile)
TEXT, STAMP = "text:", "stamp"
UNSTAMPED = (0, 0)
"""The stamp of what is no file here."""


@dataclass(frozen=True)
class Index:
    """Columns about one file."""

    arrays: dict[str, np.ndarray] = field(default_factory=dict)
    texts: dict[str, list[str]] = field(default_factory=dict)


def stamp(file: Path | int) -> tuple[int, int]:
    """(size in bytes, time of change in nanoseconds) of a file, or of an open one."""
    found = os.stat(file)
    return found.st_size, found.st_mtime_ns


def cached_index(path: Path, kind: str, build: Callable[[Path], Index]) -> Index:
    """The index of a file, from the cache or built now.

    Args:
        path: the file.
        kind: what sort of index; one file may have several.
        build: makes it; what it raises is passed on.
    """
    now, about = stamp(path), str(path.resolve())
    kept = kept_index(about, kind, now)
    if kept is None:
        kept = build(path)
        if stamp(path) == now:
            keep_index(about, kind, kept, now)
    return kept


def kept_index(about: str, kind: str, now: tuple[int, int] = UNSTAMPED) -> Index | None:
    """What is kept about a file of this stamp; None where there is nothing, or of another one."""
    place = _place(about, kind)
    try:
        with place.open("rb") as file, np.load(file, allow_pickle=False) as stored:
            if tuple(stored[STAMP].tolist()) != now:
                return None
            arrays = {name: stored[name] for name in stored.files if name != STAMP}
        texts = {
            name.removeprefix(TEXT): json.loads(arrays.pop(name).tobytes())
            for name in [*arrays]
            if name.startswith(TEXT)
        }
    except DAMAGE:
        return None
    return Index(arrays, texts)


def keep_index(about: str, kind: str, index: Index, now: tuple[int, int] = UNSTAMPED) -> None:
    """Keep what was found out about a file of this stamp."""
    place = _place(about, kind)
    columns: dict[str, Any] = {STAMP: np.array(now, np.int64), **index.arrays}
    for name, lines in index.texts.items():
        columns[TEXT + name] = np.frombuffer(json.dumps(lines).encode(), np.uint8)
    stream = io.BytesIO()
    np.savez(stream, **columns)
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
        descriptor, name = tempfile.mkstemp(dir=place.parent, suffix=".tmp")
        with os.fdopen(descriptor, "wb") as file:
            file.write(stream.getbuffer())
        os.replace(name, place)
    except OSError:
        pass  # the next run finds it out again


def forget_index(about: str, kind: str) -> None:
    """Have it found out again."""
    with contextlib.suppress(OSError):
        _place(about, kind).unlink()


def _place(about: str, kind: str) -> Path:
    key = hashlib.sha256(f"{VERSION} {kind} {about}".encode("utf-8", "surrogateescape"))
    return cache_folder() / "indexes" / f"{key.hexdigest()[:32]}.npz"
