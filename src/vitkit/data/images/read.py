"""Read an image of any kind: a path, bytes, a PIL image or an array."""

from __future__ import annotations

from os import PathLike
from typing import TypeAlias

import numpy as np
from jaxtyping import UInt8
from PIL import Image

from vitkit.data.images.decode import as_rgb, decode_with_properties
from vitkit.errors import SettingError

ImageSource: TypeAlias = str | PathLike[str] | bytes | Image.Image | np.ndarray
"""A path, an encoded file's bytes, a PIL image, or (H, W, 3), (H, W, 1) or (H, W) uint8."""


def read_image(image: ImageSource, name: str = "image") -> UInt8[np.ndarray, "H W 3"]:
    """Read an image as (H, W, 3) uint8 RGB.

    Args:
        image: a path, an encoded file's bytes, a PIL image or an array.
        name: its name in messages; a path names itself.

    Raises:
        ImageError: an image that cannot be used.
        SettingError: not an image, such as a list of images.
    """
    if not isinstance(image, str | PathLike | bytes | Image.Image | np.ndarray):
        raise SettingError(
            f"{name} is a {type(image).__name__}; pass an image: a path, bytes, a PIL image or a "
            "uint8 array"
        )
    # Pixels in memory have no header to check first.
    if isinstance(image, Image.Image | np.ndarray):
        return as_rgb(image, name)
    pixels, _ = decode_with_properties(image, name=name if isinstance(image, bytes) else None)
    return pixels
