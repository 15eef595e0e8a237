"""An index of a tar file, read from its headers; nothing is ever extracted.

Read are plain files of the ustar format (POSIX.1-1988) with the two ways of giving them long names:
GNU's `L` entries and pax headers (POSIX.1-2001). Links, folders, devices and sparse files are
counted and ignored. A size that leads out of the file is an error. After the block of zeros that
ends the tar there may be nothing but zeros: anything else is an entry that would be lost silently.
"""

from __future__ import annotations

import os
import re
from collections import Counter
from dataclasses import dataclass, field
from typing import BinaryIO

from vitkit.errors import DataError

TAR_BLOCK = 512
LONGEST_NAME = 1 << 16
"""Bytes of an entry that only holds a name."""
LONGEST_NUMBER = 19
"""Digits of a decimal number in a pax record; a file has at most 2**63 bytes."""
READ_AT_ONCE = 1 << 20
"""Bytes after the end of the tar that are read at once."""
PLAIN_FILES = (b"0", b"\0", b"7")
EMPTY_KINDS = (b"1", b"2", b"3", b"4", b"5", b"6")
"""Links, devices, folders and FIFOs: nothing follows, whatever size their header has."""
GNU_NAME, GNU_LINK, PAX, PAX_GLOBAL = b"L", b"K", b"x", b"g"
ENTRY_KINDS = {
    b"1": "hard links",
    b"2": "symbolic links",
    b"3": "devices",
    b"4": "devices",
    b"5": "folders",
    b"6": "FIFOs",
    b"S": "sparse files",
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
    members = Members()
    offset = 0
    end = os.fstat(file.fileno()).st_size
    pax: dict[str, str] = {}  # about the next file, such as its whole name
    while offset < end:
        file.seek(offset)
        header = file.read(TAR_BLOCK)
        if len(header) == TAR_BLOCK and not any(header):
            _check_nothing_follows(file, where, offset)
            return members
        # Every header is checked, so a damaged tar is refused at the first byte that is wrong.
        _check_header(header, where, offset)
        kind = header[156:157]
        size = _content_size(header, kind, pax, where, offset)
        offset += TAR_BLOCK
        if offset + size > end:
            raise DataError(
                f"{where}: the entry at byte {offset - TAR_BLOCK:,} claims {size:,} "
                f"bytes, only {end - offset:,} follow; the file was cut short or is damaged"
            )
        if kind in (GNU_NAME, PAX):
            pax |= _read_names(file, kind, size, where, offset)
        elif kind not in (GNU_LINK, PAX_GLOBAL):
            if kind in PLAIN_FILES and not any(key.startswith("GNU.sparse") for key in pax):
                members.files.append(Member(pax.get("path") or _name(header), offset, size))
            else:
                members.ignored[ENTRY_KINDS.get(kind, "other entries")] += 1
            pax = {}
        offset += -(-size // TAR_BLOCK) * TAR_BLOCK  # contents are padded to whole blocks
    raise DataError(f"{where}: ends without the empty block that closes a tar; it was cut short")


def _content_size(header: bytes, kind: bytes, pax: dict[str, str], where: str, offset: int) -> int:
    """Return the bytes that follow a header."""
    size = _number(header[124:136], where, offset)
    if kind in EMPTY_KINDS:
        return 0
    if kind not in (GNU_NAME, GNU_LINK, PAX, PAX_GLOBAL) and "size" in pax:
        return _number(pax["size"].encode(), where, offset, base=10)
    return size


def _check_header(header: bytes, where: str, offset: int) -> None:
    if offset == 0 and header.startswith(COMPRESSED):
        raise DataError(f"{where}: compressed; expected a plain tar, run gunzip on it")
    # The checksum counts its own eight bytes as spaces.
    total = sum(header[:148]) + 8 * 32 + sum(header[156:])
    if len(header) < TAR_BLOCK or _octal(header[148:156]) != total:
        problem = "not a tar file" if offset == 0 else f"damaged at byte {offset:,}"
        raise DataError(f"{where}: {problem}: expected a header with its checksum")


def _check_nothing_follows(file: BinaryIO, where: str, end: int) -> None:
    """Refuse a tar that goes on after its first block of zeros, which is at byte `end`."""
    file.seek(end + TAR_BLOCK)
    while content := file.read(READ_AT_ONCE):
        rest = content.lstrip(b"\0")
        if rest:
            position = file.tell() - len(rest)
            raise DataError(
                f"{where}: the tar ends with a block of zeros at byte {end:,}, but there is more "
                f"at byte {position:,}; either the header at byte {end:,} was lost: write the file "
                f"again; or files were joined by cat: join them by tar --concatenate instead"
            )


def _read_names(file: BinaryIO, kind: bytes, size: int, where: str, offset: int) -> dict[str, str]:
    """Return the records of an entry about the file after it, such as its whole name."""
    if size > LONGEST_NAME:
        raise DataError(
            f"{where}: an entry at byte {offset:,} has {size:,} bytes of names; "
            f"{LONGEST_NAME:,} are the most"
        )
    content = file.read(size)
    if kind == GNU_NAME:
        return {"path": _text(content)}
    records = {}
    while content:
        # A pax record is "<length> <key>=<value>\n"; the length counts the whole record.
        digits, _, _ = content.partition(b" ")
        length = _decimal(digits)
        if length is None or not len(digits) < length <= len(content):
            raise DataError(f"{where}: damaged at byte {offset:,}: no pax record")
        key, _, value = content[len(digits) + 1 : length].partition(b"=")
        records[_text(key)] = _text(value.removesuffix(b"\n"))
        content = content[length:]
    return records


def _name(header: bytes) -> str:
    name = _text(header[:100])
    prefix = _text(header[345:500])
    return f"{prefix}/{name}" if prefix and header[257:263] == b"ustar\0" else name


def _number(digits: bytes, where: str, offset: int, base: int = 8) -> int:
    """Return a size: octal, or binary where its first bit is set (GNU)."""
    if digits[:1] == b"\x80":
        return int.from_bytes(digits[1:])
    number = _octal(digits) if base == 8 else _decimal(digits)
    if number is None:
        raise DataError(f"{where}: damaged at byte {offset:,}: no size, {digits[:40]!r}")
    return number


def _octal(digits: bytes) -> int | None:
    digits = digits.strip(b" \0")
    return int(digits or b"0", 8) if re.fullmatch(rb"[0-7]*", digits) else None


def _decimal(digits: bytes) -> int | None:
    return int(digits) if digits.isdigit() and len(digits) <= LONGEST_NUMBER else None


def _text(content: bytes) -> str:
    return content.partition(b"\0")[0].decode("utf-8", "backslashreplace")
