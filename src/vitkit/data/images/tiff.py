"""The first directory of a TIFF: its pixel layout and orientation, which Pillow does not report."""

from __future__ import annotations

import io

from PIL import Image, TiffImagePlugin

from vitkit.data.images.pillow_errors import PILLOW_ERRORS, PillowKeptQuiet

BITS, COMPRESSION, PHOTOMETRIC, ORIENTATION, SAMPLES, KIND = 258, 259, 262, 274, 277, 339
"""Tags (TIFF 6.0, Sec. 8 and 19)."""
TILE_WIDTH, TILE_LENGTH = 322, 323
"""Tags (TIFF 6.0, Sec. 15)."""
WHITE_IS_ZERO = 0
SAMPLE_TYPES = {
    1: "unsigned integers",
    2: "signed integers",
    3: "floats",
    4: "bits of no type",
    5: "complex integers",
    6: "complex floats",
}
HEAD, WIDE_HEAD, WIDE = 8, 16, b"+"
"""Bytes of the header, of that of a BigTIFF, and the byte that marks a BigTIFF."""


def pixel_layout(handle: io.BytesIO | io.BufferedReader) -> str | None:
    """Describe the pixels of a TIFF, such as "5 samples of 8 bits (unsigned integers) a pixel".

    Returns:
        None where the directory cannot be read, or has several types of samples.
    """
    try:
        with PillowKeptQuiet():
            # Pillow's own parser of directories; it reads tags of images that it cannot open.
            handle.seek(0)
            head = handle.read(HEAD)
            if WIDE in head[2:4]:
                head += handle.read(WIDE_HEAD - HEAD)
            directory = TiffImagePlugin.ImageFileDirectory_v2(head)
            handle.seek(directory.next)
            directory.load(handle)
            bits = directory.get(BITS, (1,))
            samples = directory.get(SAMPLES, 1)
            (kind,) = {*directory.get(KIND, (1,))}
            # Here and not below: a tag is only parsed, with its warnings, when it is read.
            photometric = directory.get(PHOTOMETRIC)
            compression = directory.get(COMPRESSION, 1)
    except PILLOW_ERRORS:
        return None
    depth = " or ".join(map(str, sorted({*bits})))
    sample_type = SAMPLE_TYPES.get(kind, "of an unknown type")
    return (
        f"{samples} samples of {depth} bits ({sample_type}) a pixel, "
        f"photometric {photometric}, compression {compression}"
    )


def tiff_orientation(image: Image.Image) -> int:
    """Return the orientation of a TIFF that was opened and not yet loaded; 1 where there is none.

    Pillow turns TIFFs itself while it loads them, and then forgets that it did.
    """
    orientation = getattr(image, "tag_v2", {}).get(ORIENTATION, 1)
    return orientation if isinstance(orientation, int) else 1


def tile_size(image: Image.Image) -> tuple[int, int]:
    """Return (H, W) of the tiles of an opened TIFF, in pixels; (0, 0) where it has strips."""
    tags = getattr(image, "tag_v2", {})
    height, width = tags.get(TILE_LENGTH), tags.get(TILE_WIDTH)
    if isinstance(height, int) and isinstance(width, int):
        return height, width
    return 0, 0
