"""Random changes to training pictures, each a pure function of (seed, epoch, index, view).

Crops, flips and shifts are done here, where the batch is made: a picture is cropped and resized by
itself, flipped and shifted with the whole batch, by its own draw. The rest is done by
`feeding.Feed`. The same arguments give the same pixels in any process, in any order.
"""

from __future__ import annotations

import math

import numpy as np
from jaxtyping import Int64, UInt8
from pydantic import Field

from vitkit.data.preprocess import fit, resized
from vitkit.data.randomness import uniform
from vitkit.errors import SettingError
from vitkit.frozen import frozen
from vitkit.spec import Preprocess

Pixels = UInt8[np.ndarray, "B H W C"]

# What a draw is for: each purpose has random numbers of its own.
CROP, FLIP, SHIFT, POLICY, JITTER, ERASE = 1, 2, 3, 4, 5, 6
CROP_RATIOS = (3 / 4, 4 / 3)
CROP_ATTEMPTS = 10


@frozen(raises=SettingError)
class Augmentation:
    """What is done to training pictures. The defaults change nothing.

    Attributes:
        flip: chance of a horizontal flip, [0, 1].
        shift: largest shift in pixels, up, down, left and right; edges are repeated.
        crop_scale: smallest part of the area that a random crop keeps, (0, 1]; 1 means no crop.
        aa: a policy by name, as `policies.policy` reads it.
        color_jitter: largest change of brightness, contrast and saturation, as a factor.
        reprob: chance that a box of the picture is erased, [0, 1].
    """

    flip: float = Field(0.0, ge=0.0, le=1.0)
    shift: int = Field(0, ge=0)
    crop_scale: float = Field(1.0, gt=0.0, le=1.0)
    aa: str | None = None
    color_jitter: float = Field(0.0, ge=0.0, le=1.0)
    reprob: float = Field(0.0, ge=0.0, le=1.0)


def crop_box(
    size: tuple[int, int], scale: float, seed: int, occasion: int, index: int
) -> tuple[int, int, int, int]:
    """(left, top, right, bottom) of an Inception crop of a picture of `size` (H, W), in pixels.

    Area uniform in [scale, 1] of the picture's, log of the aspect ratio uniform between 3/4 and
    4/3, ten attempts, else the whole picture ("Going Deeper with Convolutions", arXiv 1409.4842,
    Sec. 6).
    """
    height, width = size
    area, ratio, x, y = uniform(
        seed, occasion, index, CROP, np.arange(4)[:, None], np.arange(CROP_ATTEMPTS)[None, :]
    )
    areas = (scale + (1 - scale) * area) * height * width
    low, high = (math.log(r) for r in CROP_RATIOS)
    ratios = np.exp(low + (high - low) * ratio)
    widths = np.rint(np.sqrt(areas * ratios)).astype(int)
    heights = np.rint(np.sqrt(areas / ratios)).astype(int)
    fits = (widths > 0) & (widths <= width) & (heights > 0) & (heights <= height)
    if not fits.any():
        return 0, 0, width, height
    first = int(fits.argmax())
    w, h = int(widths[first]), int(heights[first])
    left, top = int(x[first] * (width - w + 1)), int(y[first] * (height - h + 1))
    return left, top, left + w, top + h


def training_pixels(
    picture: UInt8[np.ndarray, "H W channels"],
    preprocess: Preprocess,
    augmentation: Augmentation,
    seed: int,
    occasion: int,
    index: int,
) -> UInt8[np.ndarray, "h w C"]:
    """One picture brought to size: by a random crop, or as in evaluation where crops are off.

    `occasion` is its epoch and view, `randomness.occasion`.
    """
    if augmentation.crop_scale == 1.0:
        return fit(picture, preprocess)
    box = crop_box(
        (picture.shape[0], picture.shape[1]), augmentation.crop_scale, seed, occasion, index
    )
    return resized(picture, preprocess, box)


def augment_batch(
    pixels: Pixels,
    augmentation: Augmentation,
    seed: int,
    occasions: int | Int64[np.ndarray, "B"],
    indices: Int64[np.ndarray, "B"],
) -> Pixels:
    """Flip and shift a batch, each picture by its own draw; the shape stays."""
    if augmentation.flip > 0:
        flipped = uniform(seed, occasions, indices, FLIP) < augmentation.flip
        pixels = np.where(flipped[:, None, None, None], pixels[:, :, ::-1], pixels)
    if augmentation.shift > 0:
        pixels = _shift(pixels, augmentation.shift, seed, occasions, indices)
    return np.ascontiguousarray(pixels)


def _shift(
    pixels: Pixels,
    most: int,
    seed: int,
    occasions: int | Int64[np.ndarray, "B"],
    indices: Int64[np.ndarray, "B"],
) -> Pixels:
    """Each picture moved by whole pixels, uniform in [-most, most] down and across."""
    batch, height, width, _ = pixels.shape
    draws = uniform(seed, occasions, indices[None, :], SHIFT, np.arange(2)[:, None])
    down, across = (draws * (2 * most + 1)).astype(np.int64)
    padded = np.pad(pixels, ((0, 0), (most, most), (most, most), (0, 0)), mode="edge")
    rows = down[:, None] + np.arange(height)
    columns = across[:, None] + np.arange(width)
    return padded[np.arange(batch)[:, None, None], rows[:, :, None], columns[:, None, :]]
