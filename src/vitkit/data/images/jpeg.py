"""The pixels of a JPEG: by `simplejpeg` where it is installed, the same bits as by Pillow.

Both decode with libjpeg-turbo; `simplejpeg` copies the pixels once less and has fewer calls. It is
an optional package (extra `fast`). No result depends on it: it is used only if it gives Pillow's
pixels of some test images (`agrees_with_pillow`), and a file that it finds damaged is left to
Pillow, which decides as ever whether the file can be used.

A JPEG can be decoded at 1/2, 1/4 or 1/8 of its size: libjpeg then makes fewer pixels of each block
of 8 x 8 coefficients, about their mean, and saves most of the time but that of the entropy coding.
"""

from __future__ import annotations

import functools
import importlib
import io
import os
from collections.abc import Callable
from typing import Any

import numpy as np
from jaxtyping import UInt8
from PIL import Image, ImageFile

JPEGPixels = UInt8[np.ndarray, "H W 3"]
REDUCTIONS = (8, 4, 2)
"""The factors by which a JPEG can be decoded smaller, the largest first."""
SMALLEST_REDUCED = 64
"""Pixels of the shorter side of an image that may be decoded smaller."""
LARGEST_FILE = 64 << 20
"""Bytes of a file that is read into memory as a whole; Pillow reads in blocks."""
DECODED_ALIKE = frozenset({0xC0, 0xC1, 0xC2})
"""Frames that every libjpeg decodes: baseline, extended sequential and progressive Huffman coding
(ITU-T T.81, Table B.1); some are built without arithmetic coding."""

Decoder = Callable[..., Any]
"""`simplejpeg.decode_jpeg`."""


def reduced_size(size: tuple[int, int], reduction: int) -> tuple[int, int]:
    """Return the size (H, W) of an image of `size` that is decoded smaller by a factor."""
    return -(-size[0] // reduction), -(-size[1] // reduction)


def set_reduction(image: ImageFile.ImageFile, reduction: int) -> None:
    """Let Pillow decode a JPEG that is not loaded yet smaller by 2, 4 or 8; 1 changes nothing."""
    if reduction == 1:
        return
    # Pillow takes the largest factor that leaves the image at least this large.
    image.draft(None, (image.width // reduction, image.height // reduction))


def fast_pixels(
    handle: io.BytesIO | io.BufferedReader, image: Image.Image, frame: int, reduction: int = 1
) -> JPEGPixels | None:
    """Return the pixels of a JPEG as they are stored, or None where Pillow has to decode it.

    Args:
        handle: the file; it is left where it was.
        image: the opened image, not loaded yet, of its full size.
        frame: the kind of its frame, the second byte of the marker (`check_jpeg_scans`).
        reduction: 1, 2, 4 or 8.
    """
    if image.mode not in ("RGB", "L") or frame not in DECODED_ALIKE:
        return None
    decoder = fast_decoder()
    if decoder is None:
        return None
    position = handle.tell()
    content = b""
    if handle.seek(0, os.SEEK_END) <= LARGEST_FILE:
        handle.seek(0)
        content = handle.read()
    handle.seek(position)
    if not content:
        return None
    return _decoded(decoder, content, (image.height, image.width), reduction)


@functools.cache
def fast_decoder() -> Decoder | None:
    """Return `simplejpeg.decode_jpeg`; None where it is missing or gives other pixels than Pillow.

    It is looked for once in a process.
    """
    try:
        decoder: Decoder = importlib.import_module("simplejpeg").decode_jpeg
    except (ImportError, AttributeError, ValueError):  # missing, or built for another numpy
        return None
    return decoder if agrees_with_pillow(decoder) else None


def agrees_with_pillow(decoder: Decoder) -> bool:
    """Return True if a decoder gives Pillow's pixels of small JPEGs of each kind and reduction.

    The two have a libjpeg of their own each, and these may be of different versions.
    """
    rows, columns = np.mgrid[0:75, 0:91]
    waves = [np.sin(rows * columns / 90), np.cos(rows / 3), np.sin(columns / 7 - rows / 11)]
    pattern = Image.fromarray((127.5 + 127 * np.stack(waves, axis=-1)).astype(np.uint8))
    kinds = [(pattern, 0, False), (pattern, 1, False), (pattern, 2, True)]
    for drawn, subsampling, progressive in [*kinds, (pattern.convert("L"), 0, False)]:
        stream = io.BytesIO()
        drawn.save(stream, "JPEG", quality=85, subsampling=subsampling, progressive=progressive)
        for reduction in (1, *REDUCTIONS):
            with Image.open(stream, formats=("JPEG",)) as image:
                size = (image.height, image.width)
                set_reduction(image, reduction)
                expected = np.asarray(image.convert("RGB"))
            pixels = _decoded(decoder, stream.getvalue(), size, reduction)
            if pixels is None or not np.array_equal(pixels, expected):
                return False
    return True


def _decoded(
    decoder: Decoder, content: bytes, size: tuple[int, int], reduction: int
) -> JPEGPixels | None:
    """Return the pixels of a file; None where it is damaged or of another size than expected."""
    height, width = reduced_size(size, reduction)
    smallest = {} if reduction == 1 else {"min_height": height, "min_width": width}
    try:
        # Strict: what libjpeg only warns of, such as missing pixels, is an error.
        pixels = decoder(content, "RGB", strict=True, **smallest)
    except (ValueError, RuntimeError, MemoryError):
        return None
    # Another size: the header has several, and the two decoders take different ones.
    return pixels if pixels.shape == (height, width, 3) else None
