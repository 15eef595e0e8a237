"""Random Erasing (arXiv 1708.04896): noise in a random box of some of the images.

Boxes and noise are those of DeiT's `--reprob` with `pixel` mode: standard normal, after
normalisation. Both are functions of (seed, epoch, index, view).
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
from jaxtyping import Float64, Int64

from vitkit.randomness import hash64, uniform
from vitkit.shapes import Images

AREAS = (0.02, 1 / 3)
"""Smallest and largest part of the image that is erased."""
ASPECTS = (0.3, 1 / 0.3)
"""Flattest and steepest box, height over width."""
ERASING_ATTEMPTS = 10
NUMBERS, NOISE = (1, 2, 3, 4), 5
"""Keys of an image's random numbers: area, aspect, position down and across; and the noise."""


def erase(
    images: Images,
    chance: float,
    seed: int,
    augmentation_key: Int64[np.ndarray, " B"],
    indices: Int64[np.ndarray, " B"],
    purpose: int,
) -> Images:
    """Put noise into a box of some images, in place.

    Args:
        images: normalised, (B, C, H, W).
        chance: chance that an image is erased, [0, 1].
        seed: seed of the run.
        augmentation_key: epoch and view of each (B,), `randomness.augmentation_key`.
        indices: the images' indices in the split (B,).
        purpose: key of the random numbers.
    """
    drawn = np.flatnonzero(uniform(seed, augmentation_key, indices, purpose, 0) < chance)
    keys = (seed, augmentation_key[drawn], indices[drawn], purpose)
    attempts = np.arange(ERASING_ATTEMPTS)[:, None]
    boxes = _boxes(
        (images.shape[2], images.shape[3]), [uniform(*keys, n, attempts) for n in NUMBERS]
    )
    # The noise comes from a generator of the device, whose numbers differ from the CPU's.
    generator = torch.Generator(images.device)
    for row, box, key in zip(drawn, boxes, hash64(*keys, NOISE), strict=True):
        top, bottom, left, right = box
        inside = images[row, :, top:bottom, left:right]
        generator.manual_seed(int(key >> 1))  # 63 bits: positive as int64
        inside.normal_(generator=generator)
    return images


def _boxes(
    size: tuple[int, int], draws: Sequence[Float64[np.ndarray, "A N"]]
) -> Int64[np.ndarray, "N 4"]:
    """Return (top, bottom, left, right) in pixels: the first attempt that fits, else an empty box.

    Args:
        size: (H, W) of the images.
        draws: area, aspect and position down and across of each attempt (A, N), in [0, 1).
    """
    height, width = size
    area, aspect, y, x = draws
    areas = (AREAS[0] + (AREAS[1] - AREAS[0]) * area) * height * width
    low = math.log(ASPECTS[0])
    high = math.log(ASPECTS[1])
    # Uniform in the logarithm: a box is as often flat as steep.
    aspects = np.exp(low + (high - low) * aspect)
    tall = np.rint(np.sqrt(areas * aspects))
    wide = np.rint(np.sqrt(areas / aspects))
    # As in timm, a box is smaller than the image on both sides.
    fits = (tall > 0) & (tall < height) & (wide > 0) & (wide < width)
    tall *= fits
    wide *= fits
    top = np.floor(y * (height - tall + 1))
    left = np.floor(x * (width - wide + 1))
    # Attempts that do not fit have height 0, so that the box is empty if none fits.
    boxes = np.stack([top, top + tall, left, left + wide], axis=-1).astype(np.int64)
    return boxes[fits.argmax(axis=0), np.arange(boxes.shape[1])]
