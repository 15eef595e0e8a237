"""What suits some images: how training changes them, and how large a model from noise is."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from vitkit.data.sources.open import Split
from vitkit.training.config.train_config import Settings
from vitkit.training.recipes.small import cifar10, cifar10_small, digits, fashion_mnist

SAMPLE = 64
"""Images that are looked at, evenly over the training split."""
LARGEST = 64
"""Larger images are brought to this size, in pixels: from noise, passes are worth more."""
SMALLEST_PATCH = 4
"""Of images of 8 pixels, patches of 4 are far ahead of 2 (the recipe `digits`)."""
FINE = 28
"""Up to this size a grid of 4 x 4 patches will do (the recipe `fashion-mnist`); beyond, 8 x 8."""
LEAST_STEPS = 8
"""Of an epoch; batches are no larger than that allows."""


@dataclass(frozen=True)
class Looks:
    """What training images look like, by a sample.

    Attributes:
        side: the median of their shorter sides, in pixels.
        alike: all are squares of one size, as in MNIST: framed by whoever made them.
        colour: any of them has some.
    """

    side: int
    alike: bool
    colour: bool

    @classmethod
    def of(cls, split: Split) -> Looks:
        """Look at some of a split."""
        places = np.unique(np.linspace(0, len(split) - 1, SAMPLE).astype(int))
        images = [split.read(int(place)) for place in places]
        sizes = {image.shape[:2] for image in images}
        (height, width), *others = sizes
        return cls(
            side=int(np.median([min(image.shape[:2]) for image in images])),
            alike=not others and height == width,
            colour=any((image != image[..., :1]).any() for image in images),
        )

    def augmentation(self, side: int) -> Settings:
        """How training images are changed that a model sees at `side` pixels.

        Grey images are often signs (digits, letters, scans), which a flip would make others of.
        Images framed alike and no larger than a model from noise sees them are shifted, as in the
        recipes for them; photographs are cropped.
        """
        flip = 0.5 if self.colour else 0.0
        if self.alike and self.side <= LARGEST:
            shift = max(1, side // (8 if self.colour else 14))
            return {"flip": flip, "shift": shift, "crop_scale": 1.0}
        return {"flip": flip, "shift": 0, "crop_scale": 0.35}

    def says(self) -> str:
        """All of it in a line."""
        framed = "framed alike" if self.alike else "of several sizes or shapes"
        kind = "colour" if self.colour else "grey"
        flips = "flips" if self.colour else "no flips, as grey images are often signs"
        change = "shifts" if self.alike and self.side <= LARGEST else "random crops"
        return f"images: {kind}, {self.side} px, {framed}; changed by {change}, {flips}"


@dataclass(frozen=True)
class Size:
    """A model from noise, and what it takes to be worth its time.

    Attributes:
        settings: the recipe whose size and optimizer it has.
        images: training images from which on it is tried.
        passes: over them that must fit into the time; accuracy on small data is bought with them.
    """

    settings: Callable[[], Settings]
    images: int
    passes: int


SIZES = (
    Size(cifar10, images=30_000, passes=100),
    Size(cifar10_small, images=30_000, passes=20),
    Size(fashion_mnist, images=10_000, passes=10),
    Size(digits, images=0, passes=0),
)
"""From large to small: 2.7, 0.8, 0.23 and 0.14 million parameters. The first that fits is taken."""


def scratch_settings(size: Size, looks: Looks) -> Settings:
    """A recipe brought to images of another size, with changes that suit them."""
    side = max(8, min(looks.side, LARGEST) // 4 * 4)
    most = 4 if side <= FINE else 8
    patch = next(p for p in range(SMALLEST_PATCH, side + 1) if side % p == 0 and side // p <= most)
    fields = {"image_size": side, "patch_size": patch, "in_channels": 3 if looks.colour else 1}
    recipe = size.settings()
    plain = {name: v for name, v in recipe.items() if name not in ("mean", "std", "fit")}
    fit = {"fit": "squash"} if looks.alike else {}
    return plain | looks.augmentation(side) | fit | {"spec": recipe["spec"] | fields}


def batch_of(images: int, usual: int) -> int:
    """The usual batch, or the largest power of two that leaves an epoch `LEAST_STEPS` steps."""
    most = max(LEAST_STEPS, images // LEAST_STEPS)
    return min(usual, 1 << most.bit_length() - 1, images)
