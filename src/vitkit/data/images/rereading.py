"""Reading image files while a run is on: disks that fail for a moment, files that are replaced."""

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

PASSING = frozenset({
    errno.EIO, errno.ESTALE, errno.EAGAIN, errno.ETIMEDOUT, errno.ENOTCONN, errno.EHOSTDOWN,
    errno.EHOSTUNREACH, errno.ENETDOWN, errno.ENETUNREACH, errno.ENOMEM, errno.ENFILE,
    errno.EMFILE,
})  # fmt: skip
"""Errors of a disk, most often a network's, that may be over in a moment."""
PAUSES = (0.2, 1.0, 3.0)
"""Seconds to wait before the next attempts."""
NO_FILE = np.uint64(0)
"""The stamp of what cannot be seen."""
ANOTHER_FILE = np.uint64(1)
"""The stamp of what is gone: any file under its name is another one."""
Answer = TypeVar("Answer")


def patiently(read: Callable[[], Answer]) -> Answer:
    """Read, and read again after a pause where the disk failed in a way that may pass.

    Raises:
        ImageError, OSError: what `read` raises, at once or at the last attempt.
    """
    for pause in PAUSES:
        try:
            return read()
        except (ImageError, OSError) as error:
            if not may_pass(error):
                raise
        time.sleep(pause)
    return read()


def file_stamps(paths: Iterable[str | os.PathLike[str]]) -> UInt64[np.ndarray, " N"]:
    """A hash of each file's size and time of change (N,); `NO_FILE` for what cannot be seen."""
    facts = np.fromiter(map(_facts, paths), np.dtype((np.int64, 3)))
    return np.where(facts[:, 0] == 0, NO_FILE, hash64(facts[:, 1], facts[:, 2]))


def may_pass(error: BaseException | None) -> bool:
    """Tell whether an error, or one it comes from, is of the disk and may be over in a moment."""
    while error is not None:
        if isinstance(error, OSError) and error.errno in PASSING:
            return True
        error = error.__cause__
    return False


def _facts(path: str | os.PathLike[str]) -> tuple[int, int, int]:
    try:
        found = os.stat(path)
    except (OSError, ValueError):
        return 0, 0, 0
    return 1, found.st_size, found.st_mtime_ns
