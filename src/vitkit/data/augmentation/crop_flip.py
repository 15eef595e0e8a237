"""Random changes to training images, each a pure function of (seed, epoch, index, view).

Crops, flips and shifts are done here, where the batch is made: an image is cropped and resized by
itself, flipped and shifted with the whole batch, by its own draw. The rest is done by
`feeding.Feed`. The same arguments give the same pixels in any process, in any order.
"""

from __future__ import annotations

import math

import numpy as np
from jaxtyping import Bool, Int64, UInt8
from pydantic import Field

from vitkit.data.images.preprocess import fit, resized
from vitkit.errors import SettingError
from vitkit.frozen import frozen
from vitkit.randomness import uniform
from vitkit.spec import Preprocess

Pixels = UInt8[np.ndarray, "B H W C"]

# What a draw is for: each purpose has random numbers of its own.
CROP, FLIP, SHIFT, POLICY, JITTER, ERASE = 1, 2, 3, 4, 5, 6
CROP_RATIOS = (3 / 4, 4 / 3)
CROP_ATTEMPTS = 10


@frozen(raises=SettingError)
class Augmentation:
    """What is done to training images. The defaults change nothing.

    Attributes:
        flip: chance of a horizontal flip, [0, 1].
        shift: largest shift in pixels, up, down, left and right; edges are repeated.
        crop_scale: smallest part of the area that a random crop keeps, (0, 1]; 1 means no crop.
        aa: a policy by name, as `policies.policy` reads it.
        color_jitter: largest change of brightness, contrast and saturation, as a factor.
        reprob: chance that a box of the image is erased, [0, 1].
    """

    flip: float = Field(0.0, ge=0.0, le=1.0)
    shift: int = Field(0, ge=0)
    crop_scale: float = Field(1.0, gt=0.0, le=1.0)
    aa: str | None = None
    color_jitter: float = Field(0.0, ge=0.0, le=1.0)
    reprob: float = Field(0.0, ge=0.0, le=1.0)


def crop_box(
    size: tuple[int, int], scale: float, seed: int, augmentation_key: int, index: int
) -> tuple[int, int, int, int]:
    """(left, top, right, bottom) of an Inception crop of an image of `size` (H, W), in pixels.

    Area uniform in [scale, 1] of the image's, log of the aspect ratio uniform between 3/4 and
    4/3, ten attempts ("Going Deeper with Convolutions", arXiv 1409.4842, Sec. 6). Where none fits,
    as mostly in long images, the largest box in the middle whose ratio is allowed, as torchvision
    and timm take it.
    """
    height, width = size
    area, ratio, x, y = uniform(
        seed,
        augmentation_key,
        index,
        CROP,
        np.arange(4)[:, None],
        np.arange(CROP_ATTEMPTS)[None, :],
    )
    areas = (scale + (1 - scale) * area) * height * width
    low, high = (math.log(r) for r in CROP_RATIOS)
    ratios = np.exp(low + (high - low) * ratio)
    widths = np.rint(np.sqrt(areas * ratios)).astype(int)
    heights = np.rint(np.sqrt(areas / ratios)).astype(int)
    fits = (widths > 0) & (widths <= width) & (heights > 0) & (heights <= height)
    if not fits.any():
        return _middle(size)
    first = int(fits.argmax())
    w, h = int(widths[first]), int(heights[first])
    left, top = int(x[first] * (width - w + 1)), int(y[first] * (height - h + 1))
    return left, top, left + w, top + h


def _middle(size: tuple[int, int]) -> tuple[int, int, int, int]:
    """The largest box in the middle of an image of `size` (H, W) whose aspect ratio is allowed."""
    height, width = size
    low, high = CROP_RATIOS
    w, h = min(width, max(1, round(height * high))), min(height, max(1, round(width / low)))
    left, top = (width - w) // 2, (height - h) // 2
    return left, top, left + w, top + h


def training_pixels(
    image: UInt8[np.ndarray, "H W channels"],
    preprocess: Preprocess,
    augmentation: Augmentation,
    seed: int,
    augmentation_key: int,
    index: int,
) -> UInt8[np.ndarray, "h w C"]:
    """One image brought to size: by a random crop, or as in evaluation where crops are off.

    `augmentation_key` is its epoch and view, `randomness.occasion`.
    """
    if augmentation.crop_scale == 1.0:
        return fit(image, preprocess)
    box = crop_box(
        (image.shape[0], image.shape[1]), augmentation.crop_scale, seed, augmentation_key, index
    )
    return resized(image, preprocess, box)


def augment_batch(
    pixels: Pixels,
    augmentation: Augmentation,
    seed: int,
    occasions: int | Int64[np.ndarray, "B"],
    indices: Int64[np.ndarray, "B"],
) -> Pixels:
    """Flip and shift a batch, each image by its own draw; the shape stays."""
    pixels = np.ascontiguousarray(pixels)
    if augmentation.flip > 0:
        pixels = _flip(pixels, uniform(seed, occasions, indices, FLIP) < augmentation.flip)
    if augmentation.shift > 0:
        draws = uniform(seed, occasions, indices[None, :], SHIFT, np.arange(2)[:, None])
        most = augmentation.shift
        down, across = (draws * (2 * most + 1)).astype(np.int64) - most
        pixels = _shift(pixels, down, across)
    return pixels


def _flip(pixels: Pixels, which: Bool[np.ndarray, "B"]) -> Pixels:
    """Mirror some images of a batch, left to right; the others are copied."""
    made = pixels.copy()
    # An item of all channels: numpy moves the few bytes of a pixel at once, not one by one.
    pixel = f"V{pixels.shape[3]}"
    made.view(pixel)[which] = pixels[which].view(pixel)[:, :, ::-1]
    return made


def _shift(pixels: Pixels, down: Int64[np.ndarray, "B"], across: Int64[np.ndarray, "B"]) -> Pixels:
    """Each image read from so many pixels further down and across; its edges are repeated."""
    batch, height, width, channels = pixels.shape
    rows = np.clip(down[:, None] + np.arange(height), 0, height - 1)
    rows += np.arange(batch)[:, None] * height
    moved = pixels.reshape(batch * height, width * channels).take(rows.ravel(), axis=0)
    moved = moved.reshape(pixels.shape)
    made = np.empty_like(pixels)
    for offset in np.unique(across).tolist():
        some = np.flatnonzero(across == offset)
        made[some] = _shifted_across(moved[some], min(max(offset, 1 - width), width - 1))
    return made


def _shifted_across(pixels: Pixels, offset: int) -> Pixels:
    """Images all read from the same number of pixels further right, less than their width."""
    width = pixels.shape[2]
    start, end = max(0, -offset), width - max(0, offset)
    made = np.empty_like(pixels)
    made[:, :, start:end] = pixels[:, :, start + offset : end + offset]
    made[:, :, :start] = pixels[:, :, :1]
    made[:, :, end:] = pixels[:, :, -1:]
    return made
