"""Reading image files during a run: disks that fail for a moment, files that are replaced."""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Callable, Iterable
from typing import TypeVar

import numpy as np
from jaxtyping import UInt64

from vitkit.errors import ImageError
from vitkit.randomness import hash64

PASSING_ERRORS = frozenset(
    {
        errno.EIO,
        errno.ESTALE,
        errno.EAGAIN,
        errno.ETIMEDOUT,
        errno.ENOTCONN,
        errno.EHOSTDOWN,
        errno.EHOSTUNREACH,
        errno.ENETDOWN,
        errno.ENETUNREACH,
        errno.ENOMEM,
        errno.ENFILE,
        errno.EMFILE,
    }
)
"""Errors of a disk, most often a network's, that may be over in a moment."""
READ_PAUSES = (0.2, 1.0, 3.0)
"""Seconds to wait before the next attempts."""
NO_FILE = np.uint64(0)
"""The stamp of a path that cannot be seen."""
ANOTHER_FILE = np.uint64(1)
"""The stamp of a file that is gone: any file under its name is another one."""
Result = TypeVar("Result")


def patiently(read: Callable[[], Result]) -> Result:
    """Read, and read again after a pause where the disk failed in a way that may pass.

    Raises:
        ImageError, OSError: those of `read`, at once or at the last attempt.
    """
    for pause in READ_PAUSES:
        try:
            return read()
        except (ImageError, OSError) as error:
            if not may_pass(error):
                raise
        time.sleep(pause)
    return read()


def file_stamps(paths: Iterable[str | os.PathLike[str]]) -> UInt64[np.ndarray, " N"]:
    """Return a hash of each file's size and time of change (N,); `NO_FILE` if it cannot be seen."""
    facts = np.fromiter(map(_facts, paths), np.dtype((np.int64, 3)))
    return np.where(facts[:, 0] == 0, NO_FILE, hash64(facts[:, 1], facts[:, 2]))


def file_stamp(path: str | os.PathLike[str]) -> np.uint64:
    """Return the stamp of one file as `file_stamps` does, without arrays."""
    is_seen, size, changed = _facts(path)
    return np.uint64(hash64(size, changed)) if is_seen else NO_FILE


def may_pass(error: BaseException | None) -> bool:
    """Return True if an error, or its cause, is of the disk and may be over in a moment."""
    # Pillow and `decode` wrap the error of the disk in their own.
    while error is not None:
        if isinstance(error, OSError) and error.errno in PASSING_ERRORS:
            return True
        error = error.__cause__
    return False


def _facts(path: str | os.PathLike[str]) -> tuple[int, int, int]:
    """Return 1, size in bytes and time of change in nanoseconds; zeros if it cannot be seen."""
    try:
        status = os.stat(path)
    except (OSError, ValueError):  # `ValueError`: a path with a zero byte
        return 0, 0, 0
    return 1, status.st_size, status.st_mtime_ns
