"""A random crop resized to the model's size: by Pillow as in evaluation, or by torch, faster.

torch resizes uint8 pixels in their own order, with the same filters and antialiasing as Pillow and
coefficients of fewer bits: nearly all values are the same or differ by 1, a few at hard edges by up
to 11. A JPEG that is much larger than the crop needs may have been decoded smaller, and the box
shrinks with it.
"""

from __future__ import annotations

import numpy as np
import torch
from jaxtyping import UInt8
from torch.nn.functional import interpolate

from vitkit.data.images.jpeg import REDUCTIONS, reduced_size
from vitkit.data.images.preprocess import in_channels, squash
from vitkit.spec import Preprocess, Resizer

Box = tuple[int, int, int, int]
"""(left, top, right, bottom) in pixels."""


def resized_crop(
    image: UInt8[np.ndarray, "H W channels"], box: Box, preprocess: Preprocess, resizer: Resizer
) -> UInt8[np.ndarray, "h w C"]:
    """Resize a part of an image to the model's size, each side by its own factor.

    Args:
        image: (H, W, 3) RGB or (H, W, 1) grey, uint8.
        box: the part.
        preprocess: size (h, w), channels C and filter; `fit` is ignored.
        resizer: the library. torch has no antialiased `nearest`, which is Pillow's always.

    Raises:
        ShapeError: an image of another shape or dtype.
    """
    left, top, right, bottom = box
    crop = image[top:bottom, left:right]
    if resizer == "pillow" or preprocess.interpolation == "nearest":
        return squash(crop, preprocess)
    # A copy of whole rows: torch's fast path takes pixels without gaps.
    pixels = torch.from_numpy(np.array(in_channels(crop, preprocess.channels), order="C"))
    if pixels.shape[:2] != preprocess.image_size:
        # `unsqueeze` gives strides in which torch recognises channels that come last.
        batch = pixels.unsqueeze(0).permute(0, 3, 1, 2)
        batch = interpolate(
            batch, preprocess.image_size, mode=preprocess.interpolation, antialias=True
        )
        pixels = batch.permute(0, 2, 3, 1)[0]
    return pixels.numpy()


def largest_reduction(size: tuple[int, int], box: Box, output: tuple[int, int]) -> int:
    """Return the largest factor by which an image may be decoded smaller for a crop.

    Args:
        size: (H, W) of the image.
        box: the crop, in pixels of the image.
        output: (h, w) that the crop is resized to; it is never enlarged because of the factor.

    Returns:
        1, 2, 4 or 8.
    """
    for factor in REDUCTIONS:
        left, top, right, bottom = reduced_box(box, size, reduced_size(size, factor))
        if bottom - top >= output[0] and right - left >= output[1]:
            return factor
    return 1


def reduced_box(box: Box, size: tuple[int, int], reduced: tuple[int, int]) -> Box:
    """Return a box of an image in the pixels of the same image at another size.

    Args:
        box: in pixels of the image.
        size: (H, W) of the image.
        reduced: (H, W) of the smaller one; each edge moves to the nearest edge of its pixels.
    """
    if size == reduced:
        return box
    down = reduced[0] / size[0]
    across = reduced[1] / size[1]
    left, top, right, bottom = box
    return round(left * across), round(top * down), round(right * across), round(bottom * down)
