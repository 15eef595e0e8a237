"""Mixup and CutMix: two images of a batch in one, their labels in the same proportion.

As in DeiT, one draw a batch: an image is mixed with the one at the same place from the other end.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Float, Int64
from pydantic import Field
from torch import Tensor
from torch.nn import functional as F

from vitkit.errors import SettingError
from vitkit.frozen import frozen
from vitkit.randomness import hash64
from vitkit.shapes import Images

MIXING = 0x317
"""What the numbers of a step are for, among the things drawn from the seed."""


@dataclass(frozen=True)
class Mixture:
    """How the images of a batch are mixed.

    Attributes:
        weight: what is an image's own of itself, [0, 1]; the rest is its partner's.
        box: (top, bottom, left, right) in pixels, what CutMix pastes; `None` for mixup.
    """

    weight: float
    box: tuple[int, int, int, int] | None = None

    def images(self, images: Images) -> Images:
        """The images mixed, in place."""
        if self.box is None:
            partners = images.flip(0).mul_(1 - self.weight)
            return images.mul_(self.weight).add_(partners)
        top, bottom, left, right = self.box
        inside = images[:, :, top:bottom, left:right]
        inside.copy_(inside.flip(0))
        return images

    def targets(self, targets: Float[Tensor, "B K"]) -> Float[Tensor, "B K"]:
        """Probabilities, or what a teacher says of the images, mixed alike."""
        return self.weight * targets + (1 - self.weight) * targets.flip(0)


@frozen(raises=SettingError)
class Mixing:
    """When and how strongly images are mixed.

    Attributes:
        num_classes: K.
        mixup: alpha of Beta(alpha, alpha), from which an image's weight is drawn (arXiv
            1710.09412); 0 is off.
        cutmix: the same for the area that is not pasted over (arXiv 1905.04899).
        prob: chance that a batch is mixed at all.
        switch_prob: chance of CutMix where both are on.
        until: the step from which on nothing is mixed; `None` for never.
        seed: of the run.
    """

    num_classes: int = Field(ge=2)
    mixup: float = Field(0.0, ge=0.0)
    cutmix: float = Field(0.0, ge=0.0)
    prob: float = Field(1.0, ge=0.0, le=1.0)
    switch_prob: float = Field(0.5, ge=0.0, le=1.0)
    until: int | None = None
    seed: int = 0

    def draw(self, step: int, part: int, size: tuple[int, int]) -> Mixture | None:
        """How to mix a part of a step's images of `size` (H, W); `None` for not at all."""
        key = int(hash64(self.seed, step, MIXING, part))
        # numpy promises that this generator's numbers stay what they are (NEP 19).
        generator = np.random.RandomState([key & 0xFFFFFFFF, key >> 32])
        mixed, switch, y, x = generator.random_sample(4)
        if mixed >= self.prob or (self.until is not None and step >= self.until):
            return None
        cut = self.cutmix > 0 and (self.mixup == 0 or switch < self.switch_prob)
        alpha = self.cutmix if cut else self.mixup
        weight = float(generator.beta(alpha, alpha))
        return _cut(weight, size, y, x) if cut else Mixture(weight)

    def probabilities(self, labels: Int64[Tensor, " B"]) -> Float[Tensor, "B K"]:
        """Class numbers as probabilities, all on one class."""
        return F.one_hot(labels, self.num_classes).to(torch.float32)


def _cut(weight: float, size: tuple[int, int], y: float, x: float) -> Mixture:
    """A box of the image's shape with its middle anywhere; what the edge cuts off is not pasted.

    The weight is that of the pixels left (arXiv 1905.04899, Eq. 2, as DeiT corrects it).
    """
    height, width = size
    tall, wide = (int(side * math.sqrt(1 - weight)) for side in size)
    middle_y, middle_x = int(y * height), int(x * width)
    top, bottom = max(0, middle_y - tall // 2), min(height, middle_y + (tall + 1) // 2)
    left, right = max(0, middle_x - wide // 2), min(width, middle_x + (wide + 1) // 2)
    pasted = (bottom - top) * (right - left)
    return Mixture(1 - pasted / (height * width), (top, bottom, left, right))
