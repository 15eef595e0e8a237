"""Tars written header by header, also those that no program writes, for the tests of shards."""

from __future__ import annotations

import io

from PIL import Image

END = bytes(1024)
POSIX, OLD_GNU, V7 = b"ustar\x0000", b"ustar  \0", bytes(8)


def padded(content: bytes) -> bytes:
    return content + bytes(-len(content) % 512)


def octal(number: int) -> bytes:
    return b"%011o\0" % number


def binary(number: int) -> bytes:
    """A number of any size, as GNU tar writes those that octal digits cannot hold."""
    return b"\x80" + number.to_bytes(11, "big")


def checked(header: bytes) -> bytes:
    """The header with a right checksum, which counts its own bytes as spaces."""
    total = sum(header[:148]) + 8 * 32 + sum(header[156:])
    return header[:148] + b"%06o\0 " % total + header[156:]


def header(
    name: bytes,
    size: bytes,
    kind: bytes = b"0",
    *,
    magic: bytes = POSIX,
    prefix: bytes = b"",
) -> bytes:
    """One block; `prefix` is at byte 345."""
    raw = bytearray(512)
    for at, value in ((0, name[:100]), (100, b"0000644\0"), (108, b"0000000\0"),
                      (116, b"0000000\0"), (124, size), (136, octal(0)), (156, kind),
                      (257, magic), (345, prefix)):  # fmt: skip
        raw[at : at + len(value)] = value
    return checked(bytes(raw))


def entry(name: bytes, content: bytes, kind: bytes = b"0", **options: bytes) -> bytes:
    return header(name, octal(len(content)), kind, **options) + padded(content)


def record(key: bytes, value: bytes) -> bytes:
    """One pax record, whose length counts its own digits."""
    rest = b" %s=%s\n" % (key, value)
    length = len(rest)
    while len(b"%d" % length) + len(rest) != length:
        length = len(b"%d" % length) + len(rest)
    return b"%d" % length + rest


def pax(*records: tuple[bytes, bytes], kind: bytes = b"x") -> bytes:
    return entry(b"pax", b"".join(record(key, value) for key, value in records), kind)


def long_name(name: bytes) -> bytes:
    return entry(b"././@LongLink", name + b"\0", b"L", magic=OLD_GNU)


def image(value: int) -> bytes:
    stream = io.BytesIO()
    Image.new("RGB", (5, 4), (value, 0, 9)).save(stream, "PNG")
    return stream.getvalue()


def sample(number: int, folder: bytes = b"", **options: bytes) -> bytes:
    """An image and its class."""
    return b"".join(
        entry(folder + b"%d.%s" % (number, ending), content, **options)
        for ending, content in ((b"png", image(number)), (b"cls", b"ab"[number % 2 :][:1]))
    )


def named_by(extension: bytes, content: bytes, magic: bytes = POSIX) -> bytes:
    """An entry whose whole name is in the extension before it; the header's lost its ending."""
    return extension + entry(b"d" * 100, content, magic=magic)
