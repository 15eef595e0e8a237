"""What may be done to training images on their device: kornia's functions, a value an image.

Every function takes images (B, C, H, W) float in [0, 1] and a value for each (B,), and gives new
images in [0, 1]; no image has a part in what becomes of another. Values mean what they mean in
Pillow. Of grey images (C = 1), saturation and grey leave alone what they are given.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import torch
from jaxtyping import Float, Float64, Shaped
from torch import Tensor

from vitkit.shapes import Images

Values = Float[Tensor, " B"]
Names = Shaped[np.ndarray, " B"]

BLUR_SIZE = 13
"""Taps of the blur: three standard deviations, of at most two pixels, to either side."""
HALF = 128 / 255
"""From here on a pixel is bright: Pillow's 128 of 255."""
TRANSLATED = 32
"""Pixels that `translate_*_pixels` counts in; in a smaller image, its side."""


def brightness(images: Images, factors: Values) -> Images:
    """0 black, 1 the image."""
    from kornia.enhance import adjust_brightness_accumulative

    return adjust_brightness_accumulative(images, factors)


def contrast(images: Images, factors: Values) -> Images:
    """0 the mean grey of the image, 1 the image."""
    from kornia.enhance import adjust_contrast_with_mean_subtraction

    return adjust_contrast_with_mean_subtraction(images, factors)


def saturation(images: Images, factors: Values) -> Images:
    """0 grey, 1 the image."""
    from kornia.enhance.adjust import adjust_saturation_with_gray_subtraction

    return adjust_saturation_with_gray_subtraction(images, factors)


def grey(images: Images, _: Values) -> Images:
    """Rec. 601's grey in every channel."""
    return saturation(images, torch.zeros_like(_))


def sharpness(images: Images, factors: Values) -> Images:
    """0 smoothed, 1 the image, 2 sharpened."""
    from kornia.enhance import sharpness

    return sharpness(images, factors)


def blur(images: Images, sigmas: Values) -> Images:
    """Gaussian, its standard deviation in pixels (0, 2]; edges are repeated."""
    from kornia.filters import gaussian_blur2d

    return gaussian_blur2d(images, BLUR_SIZE, sigmas[:, None].expand(-1, 2), "replicate")


def invert(images: Images, _: Values) -> Images:
    """The negative."""
    from kornia.enhance import invert

    return invert(images)


def solarize(images: Images, thresholds: Values) -> Images:
    """The negative of what is at the threshold or above it; above 1 nothing is."""
    from kornia.enhance import solarize

    return solarize(images, thresholds)


def solarize_add(images: Images, additions: Values) -> Images:
    """Dark pixels made brighter, bright ones left alone."""
    return torch.where(
        images < HALF, (images + additions[:, None, None, None]).clamp_(max=1), images
    )


def posterize(images: Images, bits: Values) -> Images:
    """Only the highest bits of 8 are kept, whole numbers from 0 (black) to 8 (all)."""
    from kornia.enhance import posterize

    return posterize(images, bits.clamp(0, 8).int())


def equalize(images: Images, _: Values) -> Images:
    """A flat histogram for every channel."""
    from kornia.enhance import equalize

    return equalize(images)


def auto_contrast(images: Images, _: Values) -> Images:
    """Every channel stretched to [0, 1]; one of a single value stays as it is."""
    low, high = images.amin((2, 3), keepdim=True), images.amax((2, 3), keepdim=True)
    return torch.where(high > low, (images - low) / (high - low), images)


POINTWISE: dict[str, Callable[[Images, Values], Images]] = {
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
"""Operations of the values, in groups of images that have the same."""
GEOMETRIC = (
    "rotate",  # degrees, about the middle
    "shear_x", "shear_y",  # pixels across for each down, or the reverse, about the upper left
    "translate_x", "translate_y",  # of the width, of the height
    "translate_x_pixels", "translate_y_pixels",  # of `TRANSLATED` pixels
)  # fmt: skip
"""Operations of the places; all of them are done at once, each image with a matrix of its own."""
IDENTITY = ""
"""The name of doing nothing."""


def apply(
    images: Images, names: Names, values: Float64[np.ndarray, " B"], fill: tuple[float, ...]
) -> Images:
    """Do to every image what is asked for it, in place.

    Args:
        images: (B, C, H, W) float in [0, 1].
        names: of the operation of each image, or `IDENTITY`.
        values: what it is done with.
        fill: the colour (C,) of what comes into view from outside.
    """
    geometric = np.isin(names, GEOMETRIC)
    groups = [np.flatnonzero(geometric)] if geometric.any() else []
    pointwise = set(names[~geometric]) - {IDENTITY}
    groups += [np.flatnonzero(names == name) for name in sorted(pointwise)]
    for group in groups:
        places = torch.from_numpy(group).to(images.device)
        before = images.index_select(0, places)
        if geometric[group[0]]:
            matrices = matrices_of(names[group], values[group], (images.shape[2], images.shape[3]))
            after = warp(before, torch.from_numpy(matrices).to(images), fill)
        else:
            given = torch.from_numpy(values[group]).to(images)
            after = POINTWISE[names[group[0]]](before, given)
        images.index_copy_(0, places, after)
    return images


def warp(images: Images, matrices: Float[Tensor, "B 2 3"], fill: tuple[float, ...]) -> Images:
    """Every image through its own affine map from old places to new ones, bilinearly."""
    from kornia.geometry.transform import warp_affine

    colour = torch.tensor(fill, device=images.device).view(-1, 1, 1)
    size = (images.shape[2], images.shape[3])
    return warp_affine(images - colour, matrices, size).add_(colour).clamp_(0, 1)


def matrices_of(
    names: Names, values: Float64[np.ndarray, " B"], size: tuple[int, int]
) -> Float64[np.ndarray, "B 2 3"]:
    """The map from (x, y) to new (x, y) of a geometric operation; pixel centres are whole numbers.

    Args:
        names: of `GEOMETRIC`, one for each image.
        values: degrees, or fractions.
        size: (H, W) in pixels.
    """
    height, width = size

    def of(name: str) -> Float64[np.ndarray, " B"]:
        return np.where(names == name, values, 0.0)

    angle = of("rotate") * (math.pi / 180)
    cos, sin = np.cos(angle), np.sin(angle)
    shear_x, shear_y = of("shear_x"), of("shear_y")
    across = of("translate_x") * width + of("translate_x_pixels") * min(TRANSLATED, width)
    down = of("translate_y") * height + of("translate_y_pixels") * min(TRANSLATED, height)
    x, y = (width - 1) / 2, (height - 1) / 2
    across += x - (cos * x - sin * y) + shear_x / 2  # the upper left corner is at (-1/2, -1/2)
    down += y - (sin * x + cos * y) + shear_y / 2
    rows = [[cos, shear_x - sin, across], [sin + shear_y, cos, down]]
    return np.stack([np.stack(row, axis=-1) for row in rows], axis=1)
