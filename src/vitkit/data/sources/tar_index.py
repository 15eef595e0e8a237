"""An index of a tar file, read from its headers by `tarfile`; nothing is ever extracted.

Links, folders, devices and sparse files are counted and ignored. `tarfile` takes a damaged header
for the end of the tar, so what follows the last entry is checked here: there must be a block of
zeros and nothing but zeros after it; anything else is an entry that would be lost silently.
"""

from __future__ import annotations

import os
import tarfile
from collections import Counter
from dataclasses import dataclass, field
from typing import BinaryIO

from vitkit.errors import DataError

LONGEST_NAME = 1 << 13
"""Bytes of an entry that only holds names: twice the longest path of Linux."""
READ_AT_ONCE = 1 << 20
"""Bytes after the end of the tar that are read at once."""
NAME_ENTRIES = (
    tarfile.GNUTYPE_LONGNAME,
    tarfile.GNUTYPE_LONGLINK,
    tarfile.XHDTYPE,
    tarfile.XGLTYPE,
    tarfile.SOLARIS_XHDTYPE,
)
ENTRY_KINDS = {
    tarfile.LNKTYPE: "hard links",
    tarfile.SYMTYPE: "symbolic links",
    tarfile.CHRTYPE: "devices",
    tarfile.BLKTYPE: "devices",
    tarfile.DIRTYPE: "folders",
    tarfile.FIFOTYPE: "FIFOs",
}
COMPRESSED = b"\x1f\x8b"


@dataclass(frozen=True)
class Member:
    """A file inside a tar."""

    name: str
    offset: int
    """Of its first byte in the tar."""
    size: int
    """In bytes."""


@dataclass
class Members:
    """All files inside a tar, in their order, and counts of its other entries by kind."""

    files: list[Member] = field(default_factory=list)
    ignored: Counter[str] = field(default_factory=Counter)


def read_members(file: BinaryIO, where: str) -> Members:
    """Return the files in an uncompressed tar; only headers are read.

    Args:
        file: the tar, open.
        where: its name for messages.

    Raises:
        DataError: not a tar, compressed, damaged, shorter than its headers claim, or with more
            after its end than zeros.
        OSError: it cannot be read.
    """
    if file.read(len(COMPRESSED)) == COMPRESSED:
        raise DataError(f"{where}: compressed; expected a plain tar: run gunzip on it")
    file.seek(0)
    members = Members()
    length = os.fstat(file.fileno()).st_size
    end = 0  # of the last entry
    try:
        tar = tarfile.TarFile(
            fileobj=file, tarinfo=_Header, encoding="utf-8", errors="backslashreplace"
        )
        while (entry := tar.next()) is not None:
            _check_size(entry, length, where)
            end = tar.offset
            if entry.isreg() and not entry.issparse():
                members.files.append(Member(entry.name, entry.offset_data, entry.size))
            else:
                kind = "sparse files" if entry.issparse() else "other entries"
                members.ignored[ENTRY_KINDS.get(entry.type, kind)] += 1
    except (tarfile.TarError, ValueError, RecursionError) as error:
        problem = "damaged" if end else "not a tar file, or damaged"
        if length:  # `tarfile` raises for an empty file, too
            raise DataError(f"{where}: {problem} at byte {end:,}: {error}") from None
    _check_end(file, where, end)
    return members


class _Header(tarfile.TarInfo):
    """A header whose sizes are plausible, before `tarfile` reads what follows it."""

    @classmethod
    def frombuf(cls, buf: bytes | bytearray, encoding: str, errors: str) -> _Header:
        header = super().frombuf(buf, encoding, errors)
        if header.size < 0:  # some versions of Python would read the same entry for ever
            raise tarfile.HeaderError(f"a size of {header.size} bytes")
        # such an entry is read whole, in a time that grows with the square of its size
        if header.type in NAME_ENTRIES and header.size > LONGEST_NAME:
            raise tarfile.HeaderError(
                f"{header.size:,} bytes of names; {LONGEST_NAME:,} are the most"
            )
        return header


def _check_size(entry: tarfile.TarInfo, length: int, where: str) -> None:
    """Refuse an entry that ends after the file, or before it begins."""
    left = length - entry.offset_data
    if entry.isreg() and not 0 <= entry.size <= left:
        raise DataError(
            f"{where}: the entry at byte {entry.offset:,} claims {entry.size:,} bytes, but only "
            f"{left:,} follow; the file is truncated or damaged"
        )


def _check_end(file: BinaryIO, where: str, end: int) -> None:
    """Refuse a tar that does not end with zeros alone after its last entry, at byte `end`."""
    file.seek(end)
    block = file.read(tarfile.BLOCKSIZE)
    if not block:
        raise DataError(
            f"{where}: ends without the empty block that closes a tar; the file is truncated"
        )
    if len(block) < tarfile.BLOCKSIZE or any(block):
        raise DataError(
            f"{where}: damaged at byte {end:,}: expected a header with its checksum, or a block "
            f"of zeros"
        )
    while content := file.read(READ_AT_ONCE):
        rest = content.lstrip(b"\0")
        if rest:
            position = file.tell() - len(rest)
            raise DataError(
                f"{where}: the tar ends with a block of zeros at byte {end:,}, but there is more "
                f"at byte {position:,}; either the header at byte {end:,} was lost: write the file "
                f"again; or files were joined by cat: join them by tar --concatenate instead"
            )
