"""An index of a tar file, read from its headers; nothing is ever extracted.

`tarfile.TarInfo` decodes each block that is a header. Finding the next header is done
here: `tarfile.TarFile` ignores damaged records of long names, believes negative sizes, and takes a
damaged header for the end of the tar, so that samples would be lost silently. Links, folders,
devices and sparse files are counted and ignored. After the block of zeros that ends the tar there
may be nothing but zeros; anything else is an entry that would be lost.
"""

from __future__ import annotations

import os
import re
import tarfile
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import BinaryIO

from vitkit.errors import DataError

LONGEST_EXTENSION = 1 << 20
"""Bytes of the longest extended header, which holds names and attributes of the next entry."""
READ_AT_ONCE = 1 << 20
"""Bytes after the end of the tar that are read at once."""
GNU_NAMES = {tarfile.GNUTYPE_LONGNAME: "path", tarfile.GNUTYPE_LONGLINK: "linkpath"}
"""Types of entries that hold one name of the next entry, and its key in pax headers."""
EXTENSIONS = (*GNU_NAMES, tarfile.XHDTYPE, tarfile.XGLTYPE, tarfile.SOLARIS_XHDTYPE)
PLAIN_FILES = (tarfile.REGTYPE, tarfile.AREGTYPE, tarfile.CONTTYPE)
EMPTY_KINDS = {
    tarfile.LNKTYPE: "hard links",
    tarfile.SYMTYPE: "symbolic links",
    tarfile.CHRTYPE: "devices",
    tarfile.BLKTYPE: "devices",
    tarfile.DIRTYPE: "folders",
    tarfile.FIFOTYPE: "FIFOs",
}
"""Types of entries without contents, whatever size their header states."""
RECORD = re.compile(rb"([0-9]{1,7}) ([^=]+)=")
"""Start of a pax record, `<length> <key>=<value>\\n`; the length counts the whole record."""
POSIX_MAGIC = b"ustar\0"
MAP_IN_HEADER, MAP_IN_BLOCK = 482, 504
"""Bytes that say if another block of a GNU sparse file's map follows the header, or a block."""
COMPRESSED = b"\x1f\x8b"


@dataclass(frozen=True)
class Member:
    """A file inside a tar."""

    name: str
    offset: int
    """Offset of its first byte in the tar."""
    size: int
    """Size in bytes."""


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
    members = Members()
    length = os.fstat(file.fileno()).st_size
    shared: dict[str, str] = {}  # pax headers for all following entries
    own: dict[str, str] = {}  # pax headers for the next entry only
    offset = 0
    try:
        while (header := _read_header(file, offset)) is not None:
            is_extension = header.type in EXTENSIONS
            records = {} if is_extension else shared | own
            start = _content_offset(file, offset, header)
            size = _content_size(header, records)
            left = max(length - start, 0)
            if size > left:
                raise DataError(
                    f"{where}: the entry at byte {offset:,} claims {size:,} bytes, but only "
                    f"{left:,} follow; the file is truncated or damaged"
                )
            if header.type == tarfile.XGLTYPE:
                shared |= _read_extension(file, start, header)
            elif is_extension:
                own |= _read_extension(file, start, header)
            else:
                _add_entry(members, header, records, Member(_name(header, records), start, size))
                own = {}
            # contents are padded to whole blocks
            offset = start + -(-size // tarfile.BLOCKSIZE) * tarfile.BLOCKSIZE
        if own:
            raise tarfile.HeaderError("no entry after an extended header")
    except tarfile.HeaderError as error:
        place = (
            f"damaged at byte {offset:,}" if offset else "not a tar file, or a damaged one (byte 0)"
        )
        raise DataError(f"{where}: {place}: {error}") from None
    _check_end(file, where, offset)
    return members


def _read_header(file: BinaryIO, offset: int) -> tarfile.TarInfo | None:
    """Return the header at an offset; None for zeros, and at the end of the file.

    Raises:
        tarfile.HeaderError: no header, or one whose checksum is wrong.
    """
    file.seek(offset)
    block = file.read(tarfile.BLOCKSIZE)
    if not any(block):
        return None
    header = tarfile.TarInfo.frombuf(block, "utf-8", "backslashreplace")
    # where POSIX has the first part of a long name, GNU tar may have the time of access
    if not block.startswith(POSIX_MAGIC, 257):
        header.name = _text(block[:100].partition(b"\0")[0])
    return header


def _content_offset(file: BinaryIO, offset: int, header: tarfile.TarInfo) -> int:
    """Return the offset of an entry's contents: after its header, and the map of a sparse file."""
    start = offset + tarfile.BLOCKSIZE
    flag = offset + MAP_IN_HEADER
    while header.type == tarfile.GNUTYPE_SPARSE:
        file.seek(flag)
        if file.read(1) in (b"", b"\0"):
            break
        flag = start + MAP_IN_BLOCK
        start += tarfile.BLOCKSIZE
    return start


def _content_size(header: tarfile.TarInfo, records: Mapping[str, str]) -> int:
    """Return the number of bytes of an entry's contents."""
    if header.type in EMPTY_KINDS:
        return 0
    if stated := records.get("size"):
        # a file has at most 2**63 bytes: 19 digits
        if not re.fullmatch(r"[0-9]{1,19}", stated):
            raise tarfile.HeaderError(f"no size, {stated[:40]!r}")
        return int(stated)
    if header.size < 0:
        raise tarfile.HeaderError(f"a size of {header.size} bytes")
    return header.size


def _read_extension(file: BinaryIO, start: int, header: tarfile.TarInfo) -> dict[str, str]:
    """Return the records of an extended header, such as a name of more than 100 bytes.

    Raises:
        tarfile.HeaderError: too long, or damaged; no checksum covers it.
    """
    if header.size > LONGEST_EXTENSION:
        raise tarfile.HeaderError(
            f"an extended header of {header.size:,} bytes; {LONGEST_EXTENSION:,} are the most"
        )
    file.seek(start)
    content = file.read(header.size)
    if header.type in GNU_NAMES:
        name = content.rstrip(b"\0")
        records = {GNU_NAMES[header.type]: _text(name)}
        is_whole = name and b"\0" not in name
    else:
        records = _pax_records(content)
        is_whole = "\0" not in records.get("path", "")
    # the name in the header is truncated, without its extension
    if not is_whole:
        raise tarfile.HeaderError("a name that is empty or contains a zero byte")
    return records


def _pax_records(content: bytes) -> dict[str, str]:
    records = {}
    position = 0
    while position < len(content):
        start = RECORD.match(content, position)
        end = position + int(start[1]) if start else 0
        # past the end of the contents the slice is empty
        if start is None or start.end() >= end or content[end - 1 : end] != b"\n":
            raise tarfile.HeaderError(f"no pax record, {content[position : position + 40]!r}")
        records[_text(start[2])] = _text(content[start.end() : end - 1])
        position = end
    return records


def _name(header: tarfile.TarInfo, records: Mapping[str, str]) -> str:
    return records.get("path") or header.name


def _add_entry(
    members: Members, header: tarfile.TarInfo, records: Mapping[str, str], member: Member
) -> None:
    """Add a plain file to the members; count an entry of another kind."""
    is_sparse = header.type == tarfile.GNUTYPE_SPARSE or any(
        key.startswith("GNU.sparse") for key in records
    )
    if is_sparse:
        members.ignored["sparse files"] += 1
    elif header.type in PLAIN_FILES:
        members.files.append(member)
    else:
        members.ignored[EMPTY_KINDS.get(header.type, "other entries")] += 1


def _text(content: bytes) -> str:
    return content.decode("utf-8", "backslashreplace")


def _check_end(file: BinaryIO, where: str, end: int) -> None:
    """Refuse a tar without a block of zeros at byte `end`, or with more than zeros after it."""
    file.seek(end)
    if len(file.read(tarfile.BLOCKSIZE)) < tarfile.BLOCKSIZE:
        raise DataError(
            f"{where}: ends without the empty block that closes a tar; the file is truncated"
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
