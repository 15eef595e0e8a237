"""Random Erasing (arXiv 1708.04896): noise in a random box of some of the images.

Numbers and noise are those of DeiT's `--reprob` with `pixel` mode: standard normal, after
normalisation. Where and what is a function of (seed, epoch, index, view).
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
ATTEMPTS = 10
NUMBERS, NOISE = (1, 2, 3, 4), 5
"""What the draws of an image are for: area, aspect, place down and across; and the noise."""


def erase(
    images: Images,
    chance: float,
    seed: int,
    augmentation_key: Int64[np.ndarray, " B"],
    indices: Int64[np.ndarray, " B"],
    purpose: int,
) -> Images:
    """Put noise into a box of every image that is drawn, in place.

    Args:
        images: normalised, (B, C, H, W).
        chance: of each image, [0, 1].
        seed: of the run.
        augmentation_key: epoch and view, `randomness.occasion`.
        indices: the images' places in the split.
        purpose: each purpose has random numbers of its own.
    """
    drawn = np.flatnonzero(uniform(seed, augmentation_key, indices, purpose, 0) < chance)
    keys = (seed, augmentation_key[drawn], indices[drawn], purpose)
    attempts = np.arange(ATTEMPTS)[:, None]
    boxes = _boxes(
        (images.shape[2], images.shape[3]), [uniform(*keys, n, attempts) for n in NUMBERS]
    )
    generator = torch.Generator(images.device)
    for place, box, key in zip(drawn, boxes, hash64(*keys, NOISE), strict=True):
        top, bottom, left, right = box
        inside = images[place, :, top:bottom, left:right]
        generator.manual_seed(int(key >> 1))
        inside.normal_(generator=generator)
    return images


def _boxes(
    size: tuple[int, int], draws: Sequence[Float64[np.ndarray, "A N"]]
) -> Int64[np.ndarray, "N 4"]:
    """(top, bottom, left, right) in pixels: of the attempts the first that fits, else nothing."""
    height, width = size
    area, aspect, y, x = draws
    areas = (AREAS[0] + (AREAS[1] - AREAS[0]) * area) * height * width
    low, high = (math.log(aspect) for aspect in ASPECTS)
    aspects = np.exp(low + (high - low) * aspect)
    tall, wide = np.rint(np.sqrt(areas * aspects)), np.rint(np.sqrt(areas / aspects))
    fits = (tall > 0) & (tall < height) & (wide > 0) & (wide < width)
    tall, wide = tall * fits, wide * fits
    top, left = np.floor(y * (height - tall + 1)), np.floor(x * (width - wide + 1))
    boxes = np.stack([top, top + tall, left, left + wide], axis=-1).astype(np.int64)
    return boxes[fits.argmax(axis=0), np.arange(boxes.shape[1])]
