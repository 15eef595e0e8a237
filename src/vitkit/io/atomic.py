"""Write files atomically, so that a reader never sees a half-written one.

`replacing` is for results: the content is on the disk when it returns. What can be made again is
written by `caches.caching`.
"""

from __future__ import annotations

import errno
import os
import re
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from vitkit.errors import OutputError

_REASONS = {
    errno.ENOSPC: "the disk is full",
    errno.EFBIG: "the file would be larger than the limit allows",
    errno.EROFS: "the file system is read-only",
    errno.ENOTDIR: "a part of the path is a file, not a folder",
}
"""Errors whose words of the system are no help."""
_TEMPORARY = re.compile(r"\..+\.\d+\.tmp")
"""Names of the temporary files of `replacing`."""
_CANNOT_SYNC = (errno.EINVAL, errno.ENOTSUP, errno.EACCES, errno.EBADF)
"""Errors of file systems on which folders cannot be synchronised."""


def output_error(path: Path, error: OSError, needed: int | None = None) -> OutputError:
    """Return an `OutputError` for a system error, with the reason and advice.

    Args:
        path: the file or folder that was written.
        error: the system's error.
        needed: bytes to write, shown beside the free bytes.
    """
    reason = _REASONS.get(error.errno or 0, error.strerror or str(error))
    advice = sizes = ""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        advice = "free some space, or "
    if needed is not None:
        # `Path.exists` raises for too long a name
        existing = next((p for p in (path, *path.parents) if os.path.exists(p)), Path("/"))
        free = shutil.disk_usage(existing).free
        sizes = f" ({needed / 1e6:.1f} MB needed, {free / 1e6:.1f} MB free)"
    return OutputError(
        f"cannot write {path}: {reason}{sizes}; what was there before is unchanged; "
        f"{advice}choose another place"
    )


def _temporary_for(path: Path) -> Path:
    """Name the temporary file in which this process writes the content of `path`."""
    return path.with_name(f".{path.name}.{os.getpid()}.tmp")


def is_temporary(name: str) -> bool:
    """Return True for the name of a temporary file of `replacing`.

    >>> is_temporary(".best.safetensors.4711.tmp"), is_temporary("notes.tmp")
    (True, False)
    """
    return _TEMPORARY.fullmatch(name) is not None


def remove_temporaries(folder: Path) -> None:
    """Delete the temporary files of killed processes; no process may be writing in `folder`."""
    for path in folder.glob(".*.tmp"):
        if is_temporary(path.name):
            path.unlink(missing_ok=True)


def refuse_unwritable(path: Path) -> None:
    """Check that `path` can be written, before the work whose result goes there.

    Nothing is left behind, no folder either; a file at `path` stays as it is.

    Raises:
        OutputError: `path` is a folder or cannot be written.
    """
    # missing folders would be created in the nearest one that exists
    folder = next(parent for parent in path.absolute().parents if os.path.lexists(parent))
    temporary = folder / _temporary_for(path).name
    try:
        if path.is_dir():
            raise OutputError(f"{path} is a folder; name a file")
        # permissions alone do not tell: the file system may be read-only
        temporary.touch()
        temporary.unlink()
    except OSError as error:
        raise output_error(path, error) from None


@contextmanager
def replacing(path: Path, needed: int | None = None) -> Iterator[Path]:
    """Yield a temporary path beside `path`; rename it to `path` when the block succeeds.

    The bytes are on the disk before the rename, and the rename before the return, so after a
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
        # content, name, folder: in this order no crash shows an empty file
        sync(temporary)
        os.replace(temporary, path)
        sync_folder(path.parent)
    except OSError as error:
        raise output_error(path, error, needed) from error
    finally:
        # raises even for a missing file if a parent is not a folder, or the name is too long
        with suppress(OSError):
            temporary.unlink()


def write_bytes(path: Path, content: bytes) -> None:
    """Replace the file at `path` atomically. Raises `OutputError`."""
    with replacing(path, needed=len(content)) as temporary:
        temporary.write_bytes(content)


@dataclass(frozen=True)
class FileWriter:
    """A file whose content is produced while it is written, so that memory holds no copy.

    Attributes:
        size: in bytes, approximately.
        write: writes the content to a path.
    """

    size: int
    write: Callable[[Path], object]

    @classmethod
    def of(cls, content: bytes) -> FileWriter:
        """Return a writer of bytes that exist already."""
        return cls(len(content), lambda path: path.write_bytes(content))


def write_new(folder: Path, contents: Mapping[str, FileWriter]) -> tuple[Path, ...]:
    """Write files that do not exist yet: all of them or none.

    Args:
        folder: created if it does not exist.
        contents: file name in the folder -> its content.

    Raises:
        OutputError: a file exists already or cannot be written; no new file is left behind.
    """
    files = tuple(folder / name for name in contents)
    refuse_existing(files)
    written: list[Path] = []
    try:
        for file, content in zip(files, contents.values(), strict=True):
            with replacing(file, needed=content.size) as temporary:
                content.write(temporary)
            written.append(file)
    except BaseException:  # after Ctrl-C, too, either all files are there or none
        for file in written:
            file.unlink(missing_ok=True)
        raise
    return files


def refuse_existing(files: Iterable[Path]) -> None:
    """Raise `OutputError` for a file that exists already."""
    for file in files:
        if os.path.lexists(file):
            raise OutputError(f"{file} exists; choose another place, or move it away")


def sync_folder(path: Path) -> None:
    """Wait until a folder's entries are on the disk, if its file system supports that."""
    try:
        sync(path)
    except OSError as error:
        if error.errno not in _CANNOT_SYNC:
            raise


def sync(path: Path) -> None:
    """Wait until the content of a file or a folder is on the disk."""
    descriptor = os.open(path, os.O_RDONLY)  # fsync needs no permission to write
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
