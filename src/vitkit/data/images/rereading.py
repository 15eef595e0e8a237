"""Reading image files: opening, transient disk errors, files that were replaced."""

from __future__ import annotations

import errno
import io
import os
import stat
import time
from collections.abc import Callable, Iterable
from pathlib import Path
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
"""Transient errors of a disk, most often a network drive."""
READ_PAUSES = (0.2, 1.0, 3.0)
"""Seconds to wait before the next attempts."""
NO_FILE = np.uint64(0)
"""The stamp of a path that cannot be accessed."""
ANOTHER_FILE = np.uint64(1)
"""The stamp of a file that is gone: no other file under its name matches."""
READ_AT_ONCE = 4 << 20
"""Bytes of a file that is read into memory before it is decoded; Pillow would read it in pieces."""
Result = TypeVar("Result")


def patiently(read: Callable[[], Result]) -> Result:
    """Read, and retry after a pause on transient disk errors.

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
    """Return a hash of each file's size and mtime (N,); `NO_FILE` if it does not exist."""
    facts = np.fromiter(map(_facts, paths), np.dtype((np.int64, 3)))
    return np.where(facts[:, 0] == 0, NO_FILE, hash64(facts[:, 1], facts[:, 2]))


def single_file_stamp(path: str | os.PathLike[str]) -> np.uint64:
    """Return the stamp of one file as `file_stamps` does, without arrays."""
    is_seen, size, changed = _facts(path)
    return np.uint64(hash64(size, changed)) if is_seen else NO_FILE


def may_pass(error: BaseException | None) -> bool:
    """Return True if an error, or its cause, is a transient disk error."""
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


def open_image_file(
    source: bytes | str | os.PathLike[str], name: str
) -> io.BytesIO | io.BufferedReader:
    """Open the bytes as a stream. A path is opened only when it is a file: a FIFO would hang."""
    if isinstance(source, bytes):
        if not source:
            raise ImageError(name, "empty", "expected an image, got 0 bytes")
        return io.BytesIO(source)
    try:
        status = os.stat(source)
        if not stat.S_ISREG(status.st_mode):
            raise ImageError(name, "not a file", f"expected a file, found {_kind(status.st_mode)}")
        if status.st_size == 0:
            raise ImageError(name, "empty", "expected an image, got a file of 0 bytes")
        return Path(source).open("rb")
    except FileNotFoundError:
        raise ImageError(name, "missing", "no such file") from None
    # A path with a zero byte, or one too long, is a ValueError or an OSError.
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise ImageError(name, "missing", f"cannot be opened: {reason}") from error


class _FileContent(io.BytesIO):
    """The content of a file in memory, with the file's name."""

    name: str

    def __repr__(self) -> str:
        return f"<_io.BytesIO name={self.name!r}>"  # as for a file, which messages do not name


def file_in_memory(
    handle: io.BytesIO | io.BufferedReader, head: bytes
) -> io.BytesIO | io.BufferedReader:
    """Return a file of up to `READ_AT_ONCE` bytes as a stream in memory, a larger one as it is.

    Args:
        handle: the file.
        head: the bytes that were read.
    """
    if isinstance(handle, io.BytesIO) or os.fstat(handle.fileno()).st_size > READ_AT_ONCE:
        return handle
    stream = _FileContent(head + handle.read())
    stream.name = handle.name
    stream.seek(len(head))  # as if the file had been read from the beginning
    return stream


def _kind(mode: int) -> str:
    kinds = (
        (stat.S_ISDIR, "a folder"),
        (stat.S_ISFIFO, "a FIFO"),
        (stat.S_ISSOCK, "a socket"),
        (stat.S_ISCHR, "a character device"),
        (stat.S_ISBLK, "a block device"),
    )
    for is_kind, kind in kinds:
        if is_kind(mode):
            return kind
    return "something else"
