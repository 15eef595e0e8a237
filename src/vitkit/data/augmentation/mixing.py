"""Changes of a whole batch: mixup, CutMix and Random Erasing.

As in DeiT, one draw per batch: image i is mixed with image B - 1 - i.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Float, Float64, Int64
from pydantic import Field
from torch import Tensor
from torch.nn import functional as F

from vitkit import errors, randomness, shapes
from vitkit.frozen import frozen


@dataclass(frozen=True)
class Mixture:
    """One draw of mixup or CutMix for a batch.

    Attributes:
        weight: share of an image in its mixture, [0, 1]; the rest is its partner's.
        box: (top, bottom, left, right) in pixels, the part that CutMix pastes; `None` for mixup.
    """

    weight: float
    box: tuple[int, int, int, int] | None = None

    def images(self, images: shapes.Images) -> shapes.Images:
        """Mix the images (B, C, H, W), in place."""
        if self.box is None:
            # The partner of image i is image B - 1 - i; `flip` copies, so nothing is overwritten.
            partners = images.flip(0).mul_(1 - self.weight)
            return images.mul_(self.weight).add_(partners)
        # A box lies in the same place in an image and its partner, so they exchange it.
        top, bottom, left, right = self.box
        inside = images[:, :, top:bottom, left:right]
        inside.copy_(inside.flip(0))
        return images

    def targets(self, targets: Float[Tensor, "B K"]) -> Float[Tensor, "B K"]:
        """Mix probabilities (B, K), of labels or from a teacher, alike."""
        return self.weight * targets + (1 - self.weight) * targets.flip(0)


@frozen(raises=errors.SettingError)
class Mixing:
    """Settings of mixup and CutMix.

    Attributes:
        num_classes: K.
        mixup: alpha of Beta(alpha, alpha), from which an image's weight is drawn (arXiv
            1710.09412); 0 is off.
        cutmix: the same for the area that is not pasted over (arXiv 1905.04899).
        prob: chance that a batch is mixed at all.
        switch_prob: chance of CutMix where both are on.
        until: the step from which on nothing is mixed; `None` for never.
        seed: seed of the run.

    Raises:
        SettingError: a value out of range.
    """

    num_classes: int = Field(ge=2)
    mixup: float = Field(0.0, ge=0.0)
    cutmix: float = Field(0.0, ge=0.0)
    prob: float = Field(1.0, ge=0.0, le=1.0)
    switch_prob: float = Field(0.5, ge=0.0, le=1.0)
    until: int | None = None
    seed: int = 0

    def draw(self, step: int, part: int, size: tuple[int, int]) -> Mixture | None:
        """Draw the mixture of a part of a step; `None` for no mixing.

        Args:
            step: step of the run.
            part: part of the step, counted over all processes and micro-batches.
            size: (H, W) of the images, in pixels.
        """
        key = int(randomness.hash64(self.seed, step, randomness.Draw.MIXING, part))
        # numpy promises that this generator's numbers stay what they are (NEP 19).
        generator = np.random.RandomState([key & 0xFFFFFFFF, key >> 32])
        # All four are always drawn, so that the weight does not depend on which are used.
        mixed, switch, y, x = generator.random_sample(4)
        if mixed >= self.prob or (self.until is not None and step >= self.until):
            return None
        if self.cutmix > 0 and (self.mixup == 0 or switch < self.switch_prob):
            weight = float(generator.beta(self.cutmix, self.cutmix))
            return _cut(weight, size, y, x)
        return Mixture(float(generator.beta(self.mixup, self.mixup)))

    def probabilities(self, labels: Int64[Tensor, " B"]) -> Float[Tensor, "B K"]:
        """Return class numbers (B,) as probabilities (B, K), 1 for one class."""
        return F.one_hot(labels, self.num_classes).to(torch.float32)


def _cut(weight: float, size: tuple[int, int], y: float, x: float) -> Mixture:
    """Place a box of the image's shape with its centre anywhere, cut off at the image's edge.

    The weight becomes the share of the pixels left (arXiv 1905.04899, Eq. 2, as DeiT corrects it).

    Args:
        weight: drawn share of the pixels that are not pasted over, [0, 1].
        size: (H, W) of the images, in pixels.
        y: of the box's centre, as a part of the height.
        x: of the box's centre, as a part of the width.
    """
    height, width = size
    # Both sides by the root, so that the area is 1 - weight (Eq. 2: r_w, r_h).
    box_height = int(height * math.sqrt(1 - weight))
    box_width = int(width * math.sqrt(1 - weight))
    middle_y = int(y * height)
    middle_x = int(x * width)
    top = max(0, middle_y - box_height // 2)
    bottom = min(height, middle_y + (box_height + 1) // 2)
    left = max(0, middle_x - box_width // 2)
    right = min(width, middle_x + (box_width + 1) // 2)
    pasted = (bottom - top) * (right - left)
    return Mixture(1 - pasted / (height * width), (top, bottom, left, right))


# Random Erasing (arXiv 1708.04896): noise in a random box of some of the images.
#
# Boxes and noise are those of DeiT's `--reprob` with `pixel` mode: standard normal, after
# normalisation. Both are functions of (seed, epoch, index, view).

AREAS = (0.02, 1 / 3)
"""Smallest and largest part of the image that is erased."""
ASPECTS = (0.3, 1 / 0.3)
"""Flattest and steepest box, height over width."""
ERASING_ATTEMPTS = 10
NUMBERS, NOISE = (1, 2, 3, 4), 5
"""Keys of an image's random numbers: area, aspect, position down and across; and the noise."""


def erase(
    images: shapes.Images,
    chance: float,
    seed: int,
    augmentation_key: Int64[np.ndarray, " B"],
    indices: Int64[np.ndarray, " B"],
) -> shapes.Images:
    """Put noise into a box of some images, in place.

    Args:
        images: normalised, (B, C, H, W).
        chance: chance that an image is erased, [0, 1].
        seed: seed of the run.
        augmentation_key: epoch and view of each (B,), `randomness.augmentation_key`.
        indices: the images' indices in the split (B,).
    """
    drawn = np.flatnonzero(
        randomness.uniform(seed, augmentation_key, indices, randomness.Draw.ERASE, 0) < chance
    )
    keys = (seed, augmentation_key[drawn], indices[drawn], randomness.Draw.ERASE)
    attempts = np.arange(ERASING_ATTEMPTS)[:, None]
    boxes = _boxes(
        (images.shape[2], images.shape[3]),
        [randomness.uniform(*keys, n, attempts) for n in NUMBERS],
    )
    # The noise comes from a generator of the device, whose numbers differ from the CPU's.
    generator = torch.Generator(images.device)
    for row, box, key in zip(drawn, boxes, randomness.hash64(*keys, NOISE), strict=True):
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
