"""The operations of RandAugment and other policies: kornia's functions, with one value per image.

Every function takes images (B, C, H, W) float in [0, 1], on any device, and a value for each (B,),
and returns new images in [0, 1]; each result depends on its own image alone. Values have the
meaning that they have in Pillow. `saturation` and `grey` leave grey images (C = 1) as they are.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import torch
from jaxtyping import Float, Float64, Shaped
from torch import Tensor

from vitkit.shapes import Images

OperationValues = Float[Tensor, " B"]
Names = Shaped[np.ndarray, " B"]

BLUR_SIZE = 13
"""Taps of the blur: three standard deviations, of at most two pixels, to either side."""
SMOOTHING_SIZE = 3
"""Taps of the smoothing filter of `sharpness`."""
BRIGHT = 128 / 255
"""From here on a pixel is bright: Pillow's 128 of 255."""
TRANSLATED = 32
"""Unit of `translate_*_pixels` in pixels; in a smaller image, its side."""


def brightness(images: Images, factors: OperationValues) -> Images:
    """Scale brightness: 0 is black, 1 the image."""
    from kornia.enhance import adjust_brightness_accumulative

    return adjust_brightness_accumulative(images, factors)


def contrast(images: Images, factors: OperationValues) -> Images:
    """Scale contrast: 0 is the mean grey of the image, 1 the image."""
    from kornia.enhance import adjust_contrast_with_mean_subtraction

    return adjust_contrast_with_mean_subtraction(images, factors)


def saturation(images: Images, factors: OperationValues) -> Images:
    """Scale saturation: 0 is grey, 1 the image."""
    from kornia.enhance.adjust import adjust_saturation_with_gray_subtraction

    return adjust_saturation_with_gray_subtraction(images, factors)


def grey(images: Images, values: OperationValues) -> Images:
    """Put Rec. 601's grey in every channel."""
    return saturation(images, torch.zeros_like(values))


def sharpness(images: Images, factors: OperationValues) -> Images:
    """Sharpen: 0 is smoothed, 1 the image, 2 sharpened."""
    from kornia.enhance import sharpness

    # Edge pixels are unchanged, and smaller images have only edge pixels.
    if min(images.shape[2:]) < SMOOTHING_SIZE:
        return images.clone()
    return sharpness(images, factors)


def blur(images: Images, sigmas: OperationValues) -> Images:
    """Blur by a Gaussian of a standard deviation in pixels (0, 2]; edges are repeated."""
    from kornia.filters import gaussian_blur2d

    return gaussian_blur2d(images, BLUR_SIZE, sigmas[:, None].expand(-1, 2), "replicate")


def invert(images: Images, _: OperationValues) -> Images:
    """Return the negative."""
    from kornia.enhance import invert

    return invert(images)


def solarize(images: Images, thresholds: OperationValues) -> Images:
    """Invert the values at or above the threshold; a threshold above 1 inverts none."""
    from kornia.enhance import solarize

    return solarize(images, thresholds)


def solarize_add(images: Images, additions: OperationValues) -> Images:
    """Make dark pixels brighter and leave bright ones as they are."""
    brighter = (images + additions[:, None, None, None]).clamp_(max=1)
    return torch.where(images < BRIGHT, brighter, images)


def posterize(images: Images, bits: OperationValues) -> Images:
    """Keep the highest of 8 bits, a whole number of them from 0 (black) to 8 (all)."""
    from kornia.enhance import posterize

    return posterize(images, bits.clamp(0, 8).int())


def equalize(images: Images, _: OperationValues) -> Images:
    """Flatten the histogram of every channel."""
    from kornia.enhance import equalize

    return equalize(images)


def auto_contrast(images: Images, _: OperationValues) -> Images:
    """Stretch every channel to [0, 1]; a constant channel is unchanged."""
    low = images.amin((2, 3), keepdim=True)
    high = images.amax((2, 3), keepdim=True)
    return torch.where(high > low, (images - low) / (high - low), images)


POINTWISE: dict[str, Callable[[Images, OperationValues], Images]] = {
    "brightness": brightness,
    "contrast": contrast,
    "saturation": saturation,
    "grey": grey,
    "sharpness": sharpness,
    "blur": blur,
    "invert": invert,
    "solarize": solarize,
    "solarize_add": solarize_add,
    "posterize": posterize,
    "equalize": equalize,
    "auto_contrast": auto_contrast,
}
"""Operations on pixel values, applied to groups of images with the same operation."""
GEOMETRIC = (
    "rotate",  # degrees, about the middle
    "shear_x",  # pixels across for each pixel down, about the upper left
    "shear_y",  # pixels down for each pixel across, about the upper left
    "translate_x",  # parts of the width
    "translate_y",  # parts of the height
    "translate_x_pixels",  # `TRANSLATED` pixels
    "translate_y_pixels",
)
"""Operations on pixel positions, applied at once, each image with a matrix of its own."""
IDENTITY = ""
"""The operation that leaves an image as it is."""


def apply(
    images: Images, names: Names, values: Float64[np.ndarray, " B"], fill: tuple[float, ...]
) -> Images:
    """Apply to every image its operation, in place.

    Args:
        images: (B, C, H, W) float in [0, 1].
        names: the operation of each image (B,), or `IDENTITY`.
        values: its value (B,).
        fill: the colour (C,) of pixels that come into view from outside.
    """
    geometric = np.isin(names, GEOMETRIC)
    # All geometric operations are one warp; the others run once for each operation that occurs.
    groups = []
    if geometric.any():
        groups.append(np.flatnonzero(geometric))
    pointwise = set(names[~geometric]) - {IDENTITY}
    for name in sorted(pointwise):
        groups.append(np.flatnonzero(names == name))
    for group in groups:
        rows = torch.from_numpy(group).to(images.device)
        before = images.index_select(0, rows)
        if geometric[group[0]]:
            matrices = matrices_of(names[group], values[group], (images.shape[2], images.shape[3]))
            after = warp(before, torch.from_numpy(matrices).to(images), fill)
        else:
            group_values = torch.from_numpy(values[group]).to(images)
            after = POINTWISE[names[group[0]]](before, group_values)
        images.index_copy_(0, rows, after)
    return images


def warp(images: Images, matrices: Float[Tensor, "B 2 3"], fill: tuple[float, ...]) -> Images:
    """Move the pixels of every image by its own affine map, bilinearly.

    Args:
        images: (B, C, H, W) float in [0, 1].
        matrices: from old (x, y) to new (x, y), in pixels.
        fill: the colour (C,) of pixels that come into view from outside.
    """
    from kornia.geometry.transform import warp_affine

    colour = torch.tensor(fill, device=images.device).view(-1, 1, 1)
    size = (images.shape[2], images.shape[3])
    # kornia fills with zeros, so the colour is zero while it works.
    return warp_affine(images - colour, matrices, size).add_(colour).clamp_(0, 1)


def matrices_of(
    names: Names, values: Float64[np.ndarray, " B"], size: tuple[int, int]
) -> Float64[np.ndarray, "B 2 3"]:
    """Return the maps from (x, y) to new (x, y) of geometric operations.

    Pixel centres are whole numbers.

    Args:
        names: names of `GEOMETRIC`, one for each image.
        values: in the units that `GEOMETRIC` gives for each.
        size: (H, W) in pixels.
    """
    height, width = size

    def of(name: str) -> Float64[np.ndarray, " B"]:
        """Return the values of one operation (B,), 0 for images with another."""
        return np.where(names == name, values, 0.0)

    # The sum of all operations: each image has one, and the values of the others are 0.
    angle = of("rotate") * (math.pi / 180)
    cos, sin = np.cos(angle), np.sin(angle)
    shear_x, shear_y = of("shear_x"), of("shear_y")
    across = of("translate_x") * width + of("translate_x_pixels") * min(TRANSLATED, width)
    down = of("translate_y") * height + of("translate_y_pixels") * min(TRANSLATED, height)
    x, y = (width - 1) / 2, (height - 1) / 2
    # Rotate about the centre of the image, not about its upper left pixel.
    across += x - (cos * x - sin * y) + shear_x / 2  # the upper left corner is at (-1/2, -1/2)
    down += y - (sin * x + cos * y) + shear_y / 2
    rows = [[cos, shear_x - sin, across], [sin + shear_y, cos, down]]
    return np.stack([np.stack(row, axis=-1) for row in rows], axis=1)
