"""File types by their first bytes: the six image formats, and names for everything else."""

from __future__ import annotations

import re
from typing import Literal, get_args

from vitkit.errors import ImageReason

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
