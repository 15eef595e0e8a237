"""Image files that must not be decoded: incomplete, hostile, or of another format.

Pillow decodes a PNG without its chunks' checksums, and leaves rows black where the pixel data end
properly but early; it decodes a TIFF whose strips do not cover the image. Both are refused here.
One gap stays: a JPEG cut short and then closed with a proper end marker decodes with a grey rest,
and to notice that would take a second entropy decoder.

A JPEG may go over its image any number of times; one with more scans, or more markers, than any
real image has is refused, since it could keep the decoder busy for minutes.
"""

import contextlib
import ctypes
import functools
import io
import os
import re
import struct
import threading
import warnings
import zlib
from collections.abc import Callable, Iterator

import numpy as np
from PIL import Image, ImageCms, ImageFile, _imaging

from vitkit.errors import ImageError, ImageReason

Stream = io.BytesIO | io.BufferedReader

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
# JPEG (ITU-T T.81, Table B.1). A marker in the coded pixels is neither stuffed nor a restart.
MARKER = re.compile(rb"\xff[^\x00\xff\xd0-\xd7]")
SEQUENTIAL, START_OF_SCAN, END_OF_IMAGE = (0xC0, 0xC1), 0xDA, 0xD9
FRAMES = frozenset(range(0xC0, 0xD0)) - {0xC4, 0xC8, 0xCC}
WITHOUT_LENGTH = (0x01, 0xD8)
MARKERS_AT_ONCE = 1 << 12
TILE_WIDTH, TILE_LENGTH = 322, 323  # tags of a TIFF (TIFF 6.0, Sec. 15)
MOST_SCANS = 100
"""Encoders write 10 or so, optimisers some 20. A scan takes up to a nanosecond a pixel."""
MOST_MARKERS = 20_000
"""A scan has some five; profiles and the like come in pieces of up to 64 kB, a marker each."""


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


def check_png(handle: Stream, name: str) -> None:
    """Check every chunk of a PNG: its length and its checksum.

    Raises:
        ImageError: "truncated" where the file ends before IEND, "damaged" at a wrong checksum.
    """
    for _ in _chunks(handle, name):
        pass


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
    inflated = expected = 0
    stream = zlib.decompressobj()
    for kind, content in _chunks(handle, name):
        if kind == b"IHDR":
            expected = _inflated_size(content)
        while kind == b"IDAT" and content and inflated < expected:
            inflated += len(stream.decompress(content, 1 << 16))
            content = stream.unconsumed_tail
    if inflated < expected:
        raise ImageError(name, "truncated", f"{inflated:,} of {expected:,} bytes of pixels")


def _chunks(handle: Stream, name: str) -> Iterator[tuple[bytes, bytes]]:
    """Generate type and content of the chunks of a PNG."""
    size = handle.seek(0, os.SEEK_END)
    handle.seek(8)  # after the signature
    kind = b""
    while kind != b"IEND":
        head = handle.read(8)
        length, kind = int.from_bytes(head[:4]), head[4:]
        if len(kind) == 4 and not kind.isalpha():
            raise ImageError(name, "damaged", f"no chunk where one should start, at {kind!a}")
        if len(kind) < 4 or handle.tell() + length + 4 > size:
            raise ImageError(name, "truncated", "the PNG file ends too early")
        content = handle.read(length)
        # the checksum covers type and content, not the length
        if zlib.crc32(content, zlib.crc32(kind)) != int.from_bytes(handle.read(4)):
            raise ImageError(name, "damaged", f"wrong checksum in chunk {kind.decode()}")
        yield kind, content


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


def check_tiff(image: ImageFile.ImageFile, name: str, max_pixels: int) -> None:
    """Refuse an opened TIFF whose strips leave a part of the image out, or whose tiles are huge.

    Args:
        image: not loaded yet.
        name: its name in messages.
        max_pixels: of a tile: libtiff takes the memory of a whole one.

    Raises:
        ImageError: "damaged", with both numbers of pixels, or "too large".
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
    tags = getattr(image, "tag_v2", {})
    height, width = tags.get(TILE_LENGTH), tags.get(TILE_WIDTH)
    if isinstance(height, int) and isinstance(width, int) and height * width > max_pixels:
        detail = f"tiles of {height} x {width} pixels; at most {max_pixels:,} are decoded"
        raise ImageError(name, "too large", f"{detail}; save it again without tiles")


# File types by their first bytes: the six image formats, and names for everything else.

IMAGE_FORMATS = ("JPEG", "PNG", "WEBP", "BMP", "GIF", "TIFF")
EXPECTED_TYPES = "expected JPEG, PNG, WEBP, BMP, GIF or TIFF"
IMAGE_ENDINGS = (
    ".jpg", ".jpeg", ".png", ".webp", ".bmp", ".gif", ".tif", ".tiff", ".jfif", ".jpe",
)  # fmt: skip
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
    """Context manager that silences Pillow and libtiff, and refuses images with missing pixels.

    Also where other code has set Pillow to fill those. All threads share it; it ends when the last
    of them leaves. `warnings.catch_warnings` would put back the wrong filters where threads
    overlap.
    """

    FILTER = ("ignore", None, Warning, re.compile(r"PIL\."), 0)
    lock = threading.Lock()
    inside = 0
    before: tuple[int | None, bool] = (None, False)
    """libtiff's function that prints errors, and Pillow's switch, while they are replaced."""

    def __enter__(self) -> None:
        cls = type(self)
        with cls.lock:
            if cls.inside == 0:
                cls.before = _set_tiff_handler()(None), ImageFile.LOAD_TRUNCATED_IMAGES
                ImageFile.LOAD_TRUNCATED_IMAGES = False
            cls.inside += 1
            if cls.FILTER not in warnings.filters:
                warnings.filters.insert(0, cls.FILTER)  # type: ignore[attr-defined]

    def __exit__(self, *error: object) -> None:
        cls = type(self)
        with cls.lock:
            cls.inside -= 1
            if cls.inside == 0:
                handler, ImageFile.LOAD_TRUNCATED_IMAGES = cls.before
                _set_tiff_handler()(handler)
                with contextlib.suppress(ValueError):
                    warnings.filters.remove(cls.FILTER)  # type: ignore[attr-defined]


@functools.cache
def _set_tiff_handler() -> Callable[[int | None], int | None]:
    """Return libtiff's `TIFFSetErrorHandler`: takes the function that prints errors, returns it."""
    try:
        set_handler = ctypes.CDLL(_imaging.__file__).TIFFSetErrorHandler
    except (AttributeError, OSError, TypeError):  # a Pillow without libtiff
        return lambda handler: handler
    set_handler.argtypes = [ctypes.c_void_p]
    set_handler.restype = ctypes.c_void_p
    return set_handler
