"""EXIF orientation: read from a file, and applied to its pixels."""

from __future__ import annotations

import numpy as np
from jaxtyping import UInt8
from PIL import ExifTags, Image

from vitkit.data.images.pillow_errors import PILLOW_ERRORS

# EXIF orientation -> what makes the image upright (EXIF 2.3, tag 0x0112).
UPRIGHT = {
    2: lambda p: p[:, ::-1],
    3: lambda p: p[::-1, ::-1],
    4: lambda p: p[::-1],
    5: lambda p: p.swapaxes(0, 1),
    6: lambda p: p[::-1].swapaxes(0, 1),
    7: lambda p: p[::-1, ::-1].swapaxes(0, 1),
    8: lambda p: p[:, ::-1].swapaxes(0, 1),
}

SIDEWAYS = frozenset({5, 6, 7, 8})
"""Orientations that exchange height and width."""


def turned_upright(
    pixels: UInt8[np.ndarray, "H W 3"], image: Image.Image
) -> UInt8[np.ndarray, "H2 W2 3"]:
    """Return the pixels of an image, turned or mirrored by its EXIF orientation; contiguous."""
    turn = UPRIGHT.get(exif_orientation(image))
    return np.ascontiguousarray(turn(pixels)) if turn else pixels


def exif_orientation(image: Image.Image) -> int:
    """Return the orientation in an image's EXIF data, 1 to 8; 1 where there is none."""
    try:
        orientation = image.getexif().get(ExifTags.Base.Orientation, 1)
    except PILLOW_ERRORS:
        return 1  # corrupt EXIF data: the orientation is unknown
    return orientation if isinstance(orientation, int) else 1
