"""Truncated and incomplete image files, also those that Pillow decodes without an error.

Pillow decodes a PNG without its chunks' checksums, and leaves rows black where the pixel data end
properly but early; it decodes a TIFF whose strips do not cover the image. Both are refused here.
One gap stays: a JPEG cut short and then closed with a proper end marker decodes with a grey rest,
and to notice that would take a second entropy decoder.

A JPEG may go over its image any number of times; one with more scans, or more markers, than any
real image has is refused, since it could keep the decoder or the count itself busy for minutes. So
is a PNG of more chunks.
"""

from __future__ import annotations

import ctypes
import functools
import io
import os
import re
import struct
import threading
import warnings
import zlib
from collections import deque
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import ClassVar, Literal, get_args

import numpy as np
from PIL import Image, ImageCms, ImageFile, _imaging

from vitkit.errors import ImageError, ImageReason

Stream = io.BytesIO | io.BufferedReader

READ_BLOCK = 1 << 16
PNG_SIGNATURE_SIZE = 8
PNG_CHECKSUM_SIZE = 4
LONGEST_CHUNK = 2**31 - 1  # PNG specification, 5.3
SAMPLES = {0: 1, 2: 3, 3: 1, 4: 2, 6: 4}  # PNG colour type -> samples in a pixel
# x, y of the first pixel, then the steps, of Adam7's passes (PNG specification, 8.2).
ADAM7 = (
    (0, 0, 8, 8),
    (4, 0, 8, 8),
    (0, 4, 4, 8),
    (2, 0, 4, 4),
    (0, 2, 2, 4),
    (1, 0, 2, 2),
    (0, 1, 1, 2),
)

# TIFF 6.0, Sec. 2: bytes of a value of each type, and the integer types' codes for `struct`.
TIFF_SIZES = {
    1: 1, 2: 1, 3: 2, 4: 4, 5: 8, 6: 1, 7: 1, 8: 2, 9: 4, 10: 8, 11: 4, 12: 8, 13: 4, 16: 8, 17: 8,
    18: 8,
}  # fmt: skip
TIFF_INTEGERS = {3: "H", 4: "I", 16: "Q"}
# JPEG (ITU-T T.81, Table B.1). A marker in the coded pixels is neither stuffed nor a restart.
MARKER = re.compile(rb"\xff[^\x00\xff\xd0-\xd7]")
SEQUENTIAL, START_OF_SCAN, END_OF_IMAGE = (0xC0, 0xC1), 0xDA, 0xD9
FRAMES = frozenset(range(0xC0, 0xD0)) - {0xC4, 0xC8, 0xCC}
WITHOUT_LENGTH = (0x01, 0xD8)
MARKERS_AT_ONCE = 1 << 12
MOST_SCANS = 100
"""Encoders write 10 or so, optimisers some 20. A scan takes up to a nanosecond a pixel."""
MOST_MARKERS = 20_000
"""A scan has some five; profiles and the like come in pieces of up to 64 kB, a marker each."""
MOST_CHUNKS = 100_000
"""Encoders cut the pixels of a PNG into chunks of 8 kB or more: so many would be 0.8 GB."""
TIFF_STRIPS = (273, 279, 324, 325)  # offsets and lengths of strips, then of tiles


def check_jpeg_scans(handle: Stream, name: str) -> int:
    """Count a JPEG's scans, without decoding any; memory stays flat.

    Returns:
        The kind of its frame, the second byte of the marker; 0 where none was found.

    Raises:
        ImageError: "too large" with more than `MOST_SCANS`, or more than `MOST_MARKERS` in all.
    """
    position = 2
    scans = frame = components = 0
    for _ in range(MOST_MARKERS):
        marker = _next_marker(handle, position)
        if marker is None:
            return frame
        position, kind = marker
        if kind == END_OF_IMAGE:
            return frame
        if kind in WITHOUT_LENGTH:
            position += 2
            continue
        handle.seek(position + 2)
        head = handle.read(8).ljust(8, b"\0")  # a length of 2 bytes first
        if kind in FRAMES:
            frame = kind
            components = head[7]
        if kind == START_OF_SCAN:
            scans += 1
            if scans > MOST_SCANS:
                break
            if frame in SEQUENTIAL and head[2] == components:
                return frame  # this scan has all components, so decoders do not look for another
        position += 2 + int.from_bytes(head[:2])
    most = f"{MOST_SCANS} scans" if scans > MOST_SCANS else f"{MOST_MARKERS:,} markers"
    raise ImageError(
        name, "too large", f"a JPEG of more than {most}; save it again as a baseline JPEG"
    )


def check_png_chunk_count(handle: Stream, name: str) -> None:
    """Count a PNG's chunks by their lengths, without reading their content.

    Raises:
        ImageError: "too large" with more than `MOST_CHUNKS`.
    """
    position = PNG_SIGNATURE_SIZE
    for _ in range(MOST_CHUNKS):
        handle.seek(position)
        head = handle.read(8)
        # `check_png_chunks` reports what is wrong with the chunk
        if len(head) < 8 or head[4:] == b"IEND":
            return
        position += len(head) + int.from_bytes(head[:4]) + PNG_CHECKSUM_SIZE
    raise ImageError(
        name, "too large", f"a PNG of more than {MOST_CHUNKS:,} chunks; save it again as a PNG"
    )


def check_png_chunks(handle: Stream, name: str) -> None:
    """Walk a PNG's chunks to its end, checking every checksum; memory stays flat.

    Raises:
        ImageError: "truncated" where the file ends before IEND, "damaged" at a wrong checksum.
    """
    for kind, blocks in _chunks(handle, name):
        checksum = zlib.crc32(kind)  # the checksum covers type and content, not the length
        for block in blocks:
            checksum = zlib.crc32(block, checksum)
        stored = handle.read(PNG_CHECKSUM_SIZE)
        if len(stored) < PNG_CHECKSUM_SIZE:
            raise ImageError(name, "truncated", f"the file ends in chunk {_shown(kind)}")
        if checksum != int.from_bytes(stored):
            raise ImageError(name, "damaged", f"wrong checksum in chunk {_shown(kind)}")


def check_png_rows(handle: Stream, image: Image.Image, name: str) -> None:
    """Refuse a PNG whose pixel data end before its last row.

    The last row of such an image is zero, as it was allocated; in an interlaced one it may not be,
    since a row is written in several passes. Other images are not inflated a second time.

    Raises:
        ImageError: "truncated", with both numbers of bytes.
    """
    last_row = image.crop((0, image.height - 1, image.width, image.height))
    if not image.info.get("interlace") and np.asarray(last_row).any():
        return
    inflated = 0
    expected = 0
    stream = zlib.decompressobj()
    for kind, blocks in _chunks(handle, name):
        for block in blocks:
            if kind == b"IHDR":
                expected = _inflated_size(block)
            elif kind == b"IDAT":
                while block and inflated < expected:
                    inflated += len(stream.decompress(block, READ_BLOCK))
                    block = stream.unconsumed_tail
        handle.seek(PNG_CHECKSUM_SIZE, os.SEEK_CUR)
    if inflated < expected:
        raise ImageError(name, "truncated", f"{inflated:,} of {expected:,} bytes of pixels")


def check_tiff_coverage(image: ImageFile.ImageFile, name: str) -> None:
    """Refuse a TIFF whose strips or tiles leave a part of the image out.

    Raises:
        ImageError: "damaged", with both numbers of pixels.
    """
    areas: dict[object, int] = {}
    for tile in image.tile:
        # Planes stored one by one differ in their raw mode; tiles at an edge in other arguments.
        plane = tile.args[0] if isinstance(tile.args, tuple) and tile.args else tile.args
        left, top, right, bottom = tile.extents or (0, 0, 0, 0)
        areas[plane] = areas.get(plane, 0) + (right - left) * (bottom - top)
    # Use the least covered plane.
    expected = image.width * image.height
    covered = min(areas.values(), default=0)
    if covered < expected:
        raise ImageError(name, "damaged", f"its strips hold {covered:,} of {expected:,} pixels")


def ends_early(handle: Stream, format: str) -> bool:
    """Return True if a file of one of the six formats lacks its end, by its own headers."""
    handle.seek(0, os.SEEK_END)
    size = handle.tell()
    handle.seek(0)
    head = handle.read(16).ljust(16, b"\0")
    if format == "JPEG":
        return not _has_jpeg_end(handle)
    if format == "PNG":
        return not _has_png_end(handle)
    if format == "GIF":
        handle.seek(max(size - 1, 0))  # a GIF ends with a semicolon
        return handle.read(1) != b";"
    if format == "WEBP":
        return size < int.from_bytes(head[4:8], "little") + 8  # the size in the RIFF header
    if format == "BMP":
        return size < max(int.from_bytes(head[2:6], "little"), 54)  # 54: its two headers
    return _tiff_ends_early(handle, head, size)


def is_cut_short(handle: Stream, format: str, error: BaseException) -> bool:
    """Return True if a file cannot be decoded because its end is missing.

    Args:
        handle: the file.
        format: one of the six.
        error: what Pillow raised.
    """
    if "truncat" in str(error).lower():
        return True
    try:
        return ends_early(handle, format)
    except OSError:  # the disk fails, as `error` reports already
        return False


def _chunks(handle: Stream, name: str) -> Iterator[tuple[bytes, Iterator[bytes]]]:
    """Generate the chunks of a PNG: type and content in blocks; the caller reads the checksum."""
    handle.seek(PNG_SIGNATURE_SIZE)
    kind = b""
    while kind != b"IEND":
        head = handle.read(8)
        if len(head) < 8:
            raise ImageError(name, "truncated", "the file ends before chunk IEND")
        length = int.from_bytes(head[:4])
        kind = head[4:]
        if length > LONGEST_CHUNK or not (kind.isalpha() and kind.isascii()):
            raise ImageError(name, "damaged", f"no chunk where one should start, at {kind!a}")
        yield kind, _blocks(handle, length, kind, name)


def _blocks(handle: Stream, length: int, kind: bytes, name: str) -> Iterator[bytes]:
    while length:
        block = handle.read(min(READ_BLOCK, length))
        if not block:
            raise ImageError(name, "truncated", f"the file ends in chunk {_shown(kind)}")
        length -= len(block)
        yield block


def _shown(kind: bytes) -> str:
    return kind.decode("ascii")


def _inflated_size(header: bytes) -> int:
    """Return the bytes of all filtered rows, from a PNG's IHDR."""
    width, height, depth, colour, _, _, interlace = struct.unpack(">IIBBBBB", header[:13])
    bits = depth * SAMPLES[colour]
    total = 0
    for x, y, across, down in ADAM7 if interlace else ((0, 0, 1, 1),):
        columns = -((x - width) // across)
        rows = -((y - height) // down)
        if columns > 0 and rows > 0:
            total += rows * (1 + (columns * bits + 7) // 8)  # a byte of each row is its filter
    return total


def _next_marker(handle: Stream, position: int) -> tuple[int, int] | None:
    """Return the position and the second byte of a JPEG's next marker; None at the file's end."""
    handle.seek(position)
    before = b""
    while block := handle.read(MARKERS_AT_ONCE):
        content = before + block
        match = MARKER.search(content)
        if match:
            return handle.tell() - len(content) + match.start(), content[match.start() + 1]
        before = content[-1:]  # a marker may begin at the end of a block
    return None


def _has_jpeg_end(handle: Stream) -> bool:
    """Return True if an end marker follows the start of a scan; a thumbnail's lies before it."""
    position = 2
    while True:
        handle.seek(position)
        head = handle.read(4)
        if len(head) < 4 or head[0] != 0xFF:
            return False
        position += 2 + int.from_bytes(head[2:])
        if head[1] == START_OF_SCAN:  # what follows holds no FF D9 but the end
            handle.seek(position)
            return b"\xff\xd9" in handle.read()


def _has_png_end(handle: Stream) -> bool:
    try:
        for _, blocks in _chunks(handle, ""):
            deque(blocks, maxlen=0)  # skipped
            handle.seek(PNG_CHECKSUM_SIZE, os.SEEK_CUR)
    except ImageError as error:
        return error.reason != "truncated"
    return True


def _tiff_ends_early(handle: Stream, head: bytes, size: int) -> bool:
    """Return True if the first directory of a TIFF, its values or its strips pass the file's end.

    TIFF 6.0, Sec. 2, and its 64-bit form: a directory is a count and entries of tag, type, number
    of values, and the values or, where they do not fit, their offset.
    """
    order = "<" if head.startswith(b"II") else ">"
    is_wide = head[2:4] in (b"+\0", b"\0+")
    codes = ("Q", "Q", "HHQ8s") if is_wide else ("I", "H", "HHI4s")
    offset, counter, entry = (struct.Struct(order + code) for code in codes)

    def read(start: int, length: int) -> bytes:
        if start + length > size:
            raise EOFError
        handle.seek(start)
        return handle.read(length)

    try:
        (start,) = offset.unpack_from(head, 8 if is_wide else 4)
        (number,) = counter.unpack(read(start, counter.size))
        entries = read(start + counter.size, number * entry.size)
        arrays: dict[int, tuple[int, ...]] = {}
        for tag, kind, count, stored in entry.iter_unpack(entries):
            length = count * TIFF_SIZES.get(kind, 0)
            # Values that do not fit into the entry lie elsewhere, and may lie beyond the end.
            values = read(offset.unpack(stored)[0], length) if length > len(stored) else stored
            if tag in TIFF_STRIPS and kind in TIFF_INTEGERS:
                arrays[tag] = struct.unpack_from(f"{order}{count}{TIFF_INTEGERS[kind]}", values)
        for offsets, lengths in (TIFF_STRIPS[:2], TIFF_STRIPS[2:]):
            for strip in zip(arrays.get(offsets, ()), arrays.get(lengths, ()), strict=False):
                read(*strip)
    except EOFError:
        return True
    return False


# File types by their first bytes: the six image formats, and names for everything else.

FileProperty = Literal["CMYK", "16 bits", "1 bit", "alpha", "frames", "turned"]
"""A property of an image file that decoding changes."""
FILE_PROPERTIES: tuple[FileProperty, ...] = get_args(FileProperty)

IMAGE_FORMATS = ("JPEG", "PNG", "WEBP", "BMP", "GIF", "TIFF")
EXPECTED_TYPES = "expected JPEG, PNG, WEBP, BMP, GIF or TIFF"
IMAGE_ENDINGS = (
    ".jpg",
    ".jpeg",
    ".png",
    ".webp",
    ".bmp",
    ".gif",
    ".tif",
    ".tiff",
    ".jfif",
    ".jpe",
)
"""Endings of the names of image files that are read, in lower case."""
HEAD_SIZE = 512
"""Bytes at the start of a file that `identify` and `describe` need."""

_IMAGES: tuple[tuple[str, re.Pattern[bytes]], ...] = (
    ("JPEG", re.compile(rb"\xff\xd8\xff")),
    ("PNG", re.compile(rb"\x89PNG\r\n\x1a\n")),
    ("WEBP", re.compile(rb"RIFF....WEBP", re.DOTALL)),
    ("BMP", re.compile(rb"BM")),
    ("GIF", re.compile(rb"GIF8[79]a")),
    ("TIFF", re.compile(rb"II\*\0|MM\0\*|II\+\0|MM\0\+")),
)

# Images and documents that some programs show, but that are not read here.
_OTHER_FORMATS: tuple[tuple[str, re.Pattern[bytes]], ...] = (
    ("an SVG drawing", re.compile(rb"(\xef\xbb\xbf)?\s*(<\?xml.{0,400}?)?\s*<svg", re.DOTALL)),
    ("PostScript (EPS)", re.compile(rb"%!PS|\xc5\xd0\xd3\xc6")),
    ("a Photoshop file (PSD)", re.compile(rb"8BPS")),
    ("a PDF", re.compile(rb"%PDF")),
    ("FITS", re.compile(rb"SIMPLE  =")),
    ("DDS", re.compile(rb"DDS ")),
    ("an Apple icon (ICNS)", re.compile(rb"icns")),
    ("an icon (ICO)", re.compile(rb"\0\0[\x01\x02]\0")),
    ("HEIC or HEIF", re.compile(rb"....ftyp(hei|hev|mif|msf)", re.DOTALL)),
    ("AVIF", re.compile(rb"....ftypavi", re.DOTALL)),
    ("a video", re.compile(rb"....ftyp|\x1a\x45\xdf\xa3|RIFF....AVI ", re.DOTALL)),
    ("JPEG 2000", re.compile(rb"\0\0\0\x0cjP  |\xff\x4f\xff\x51")),
    ("JPEG XL", re.compile(rb"\0\0\0\x0cJXL |\xff\x0a")),
    ("Netpbm", re.compile(rb"P[1-7]\s")),
    ("QOI", re.compile(rb"qoif")),
)

_NOT_IMAGES: tuple[tuple[str, re.Pattern[bytes]], ...] = (
    ("an HTML page", re.compile(rb"(\xef\xbb\xbf)?\s*<(!doctype html|html|head|body)", re.I)),
    (
        "a Git LFS pointer (run `git lfs pull`)",
        re.compile(rb"version https://git-lfs\.github\.com"),
    ),
    ("a ZIP archive", re.compile(rb"PK\x03\x04")),
    ("a gzip archive", re.compile(rb"\x1f\x8b")),
    ("zeros", re.compile(rb"\0{16,}\Z")),
    ("text", re.compile(rb"[\t\n\r\x20-\x7e]+\Z")),
)


def identify(head: bytes) -> str | None:
    """Return one of `IMAGE_FORMATS`, or None for another type.

    Args:
        head: the first `HEAD_SIZE` bytes of the file.
    """
    return _first(_IMAGES, head)


def describe(head: bytes) -> tuple[ImageReason, str]:
    """Return the reason to refuse bytes that `identify` does not know, and one line of detail."""
    # An image of another format can be converted, so it has a separate reason.
    other = _first(_OTHER_FORMATS, head)
    if other is not None:
        return "format", f"{EXPECTED_TYPES}, found {other}"
    starts = "starts with " + ascii(head[:24].decode("latin-1"))
    known = _first(_NOT_IMAGES, head)
    if known is not None:
        return "not an image", f"{EXPECTED_TYPES}, found {known}: it {starts}"
    return "not an image", f"{EXPECTED_TYPES}, found {starts}"


def _first(table: tuple[tuple[str, re.Pattern[bytes]], ...], head: bytes) -> str | None:
    """Return the name of the first pattern that matches."""
    for name, pattern in table:
        if pattern.match(head):
            return name
    return None


# The exceptions of Pillow at damaged files, and silence for its warnings, which name no file.

# Pillow's plugins parse files with plain Python, and any of these can come out. A list, not
# `Exception`, so that a bug of vitkit is not blamed on the image.
PILLOW_ERRORS = (
    OSError,
    SyntaxError,
    ValueError,
    TypeError,
    LookupError,
    AttributeError,
    ArithmeticError,
    AssertionError,
    RuntimeError,
    EOFError,
    MemoryError,
    BufferError,
    struct.error,
    zlib.error,
    Image.DecompressionBombError,
    ImageCms.PyCMSError,
)
"""All that Pillow raises at damaged files."""


class PillowKeptQuiet:
    """A context manager that silences Pillow's warnings and libtiff's error lines.

    It is shared by all threads and ends when the last of them leaves it.

    `warnings.catch_warnings` would not do: it swaps the filters of the whole process and puts the
    wrong ones back when threads overlap. Here one filter is added by the first and taken out by
    the last.
    """

    FILTER: ClassVar = ("ignore", None, Warning, re.compile(r"PIL\."), 0)
    lock: ClassVar = threading.Lock()
    inside: ClassVar[int] = 0
    tiff_handler: ClassVar[int | None] = None
    """The function that prints libtiff's errors, while it is replaced."""

    def __enter__(self) -> None:
        cls = type(self)
        with cls.lock:
            cls.inside += 1
            if cls.FILTER not in warnings.filters:
                warnings.filters.insert(0, cls.FILTER)  # type: ignore[attr-defined]
            set_handler = _tiff_error_handler()
            if cls.inside == 1 and set_handler:
                cls.tiff_handler = set_handler(None)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        cls = type(self)
        with cls.lock:
            cls.inside -= 1
            if cls.inside == 0 and cls.FILTER in warnings.filters:
                warnings.filters.remove(cls.FILTER)  # type: ignore[attr-defined]
            set_handler = _tiff_error_handler()
            if cls.inside == 0 and set_handler:
                set_handler(cls.tiff_handler)


@functools.cache
def _tiff_error_handler() -> Callable[[int | None], int | None] | None:
    """Return `TIFFSetErrorHandler` of the libtiff that Pillow uses; None where it is not found.

    It takes the function that prints errors, None for none, and returns the one before.
    """
    try:
        set_handler = ctypes.CDLL(_imaging.__file__).TIFFSetErrorHandler
    except (AttributeError, OSError, TypeError):  # no libtiff, or no such way to it
        return None
    set_handler.argtypes = [ctypes.c_void_p]
    set_handler.restype = ctypes.c_void_p
    return set_handler
