"""Writing files so that nobody ever meets half of one."""

from __future__ import annotations

import errno
import os
import re
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from vitkit.errors import OutputError

_REASONS = {
    errno.ENOSPC: "the disk is full",
    errno.EDQUOT: "the disk quota is used up",
    errno.EFBIG: "the file would be larger than the limit allows",
    errno.EROFS: "the file system is read-only",
    errno.EACCES: "permission denied",
    errno.EPERM: "permission denied",
    errno.ENOTDIR: "a part of the path is a file, not a folder",
    errno.EIO: "the disk reports an error",
}
_ADVICE = {
    errno.ENOSPC: "free some space or choose another place",
    errno.EDQUOT: "free some space or choose another place",
    errno.EFBIG: "raise the limit (ulimit -f) or choose another place",
    errno.EACCES: "choose a place that you may write to",
    errno.EPERM: "choose a place that you may write to",
}
_TEMPORARY = re.compile(r"\..+\.\d+\.tmp")
"""Names of the files that `replacing` yields."""


def output_error(path: Path, error: OSError, needed: int | None = None) -> OutputError:
    """`error` in one line: the path, the reason, the bytes needed and free, what to do."""
    reason = _REASONS.get(error.errno or 0, error.strerror or str(error))
    advice = _ADVICE.get(error.errno or 0, "choose another place")
    sizes = ""
    if needed is not None:
        place = next((p for p in (path, *path.parents) if p.exists()), Path("/"))
        free = shutil.disk_usage(place).free
        sizes = f" ({needed / 1e6:.1f} MB needed, {free / 1e6:.1f} MB free)"
    return OutputError(
        f"cannot write {path}: {reason}{sizes}; what was there before is untouched; {advice}"
    )


def _temporary_for(path: Path) -> Path:
    """Name the file in which this process writes the next content of `path`."""
    return path.with_name(f".{path.name}.{os.getpid()}.tmp")


def is_temporary(name: str) -> bool:
    """Tell whether a file's name is one that `replacing` gives to half-written files.

    >>> is_temporary(".best.safetensors.4711.tmp"), is_temporary("notes.tmp")
    (True, False)
    """
    return _TEMPORARY.fullmatch(name) is not None


def remove_temporaries(folder: Path) -> None:
    """Delete the half-written files of killed processes; nobody else may be writing there."""
    for left in folder.glob(".*.tmp"):
        if is_temporary(left.name):
            left.unlink(missing_ok=True)


def refuse_unwritable(path: Path) -> None:
    """Raise `OutputError` before the work is done whose result goes to `path`.

    Its folder is made; what is at `path` stays.
    """
    temporary = _temporary_for(path)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.is_dir():
            raise OutputError(f"{path} is a folder; name a file")
        temporary.touch()
        temporary.unlink()
    except OSError as error:
        raise output_error(path, error) from None


@contextmanager
def replacing(path: Path, needed: int | None = None) -> Iterator[Path]:
    """Yield a temporary path beside `path`; when the block ends well, it takes `path`'s place.

    The bytes are on the disk before the rename, and the rename is before the return, so after a
    crash at any moment `path` holds either all of the old file or all of the new one.

    Args:
        path: the file to write.
        needed: its size in bytes, for the message.

    Raises:
        OutputError: the disk is full, read-only, or otherwise refuses; `path` is untouched.
    """
    temporary = _temporary_for(path)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        yield temporary
        sync(temporary)
        os.replace(temporary, path)
        sync_folder(path.parent)
    except OSError as error:
        raise output_error(path, error, needed) from error
    finally:
        temporary.unlink(missing_ok=True) if path.parent.is_dir() else None


def write_bytes(path: Path, content: bytes) -> None:
    """Replace the file at `path` by `content`, all or nothing. Raises `OutputError`."""
    with replacing(path, needed=len(content)) as temporary:
        temporary.write_bytes(content)


@dataclass(frozen=True)
class FileWriter:
    """What a file will hold, written when its place is known, so that no copy of it is in memory.

    Attributes:
        size: in bytes, nearly.
        write: puts it at a path.
    """

    size: int
    write: Callable[[Path], object]

    @classmethod
    def of(cls, text: bytes) -> FileWriter:
        """Bytes that are there already."""
        return cls(len(text), lambda path: path.write_bytes(text))


def write_new(folder: Path, contents: Mapping[str, FileWriter]) -> tuple[Path, ...]:
    """Write files that were not there, all of them or none.

    Args:
        folder: made if it is not there.
        contents: name in the folder -> what the file will hold.

    Raises:
        OutputError: one is there already, or cannot be written; nothing new is left behind.
    """
    files = tuple(folder / name for name in contents)
    for file in files:
        if file.exists():
            raise OutputError(f"{file} exists already; choose another place, or move it away")
    done: list[Path] = []
    try:
        for file, content in zip(files, contents.values(), strict=True):
            with replacing(file, needed=content.size) as temporary:
                content.write(temporary)
            done.append(file)
    except BaseException:
        for file in done:
            file.unlink(missing_ok=True)
        raise
    return files


def sync_folder(path: Path) -> None:
    """Wait until a folder's entries are on the disk, where its file system can say so."""
    try:
        sync(path)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP, errno.EACCES, errno.EBADF):
            raise


def sync(path: Path) -> None:
    """Wait until a file's or a folder's content is on the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
