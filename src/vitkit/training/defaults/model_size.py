"""Augmentation and model size for a dataset, chosen by statistics of its images."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from vitkit.data.datasets.split import Split
from vitkit.errors import SettingError
from vitkit.training.config.field_types import Settings
from vitkit.training.recipes.small import cifar10, cifar10_small, digits, fashion_mnist

SAMPLE = 64
"""Images in the sample, evenly spaced over the training split."""
LARGEST = 64
"""Side to which larger images are resized, in pixels: from scratch, more epochs gain more."""
SMALLEST_PATCH = 4
"""On images of 8 pixels, patches of 4 are far better than patches of 2 (the recipe `digits`)."""
FEWEST_PATCHES, SIDE_OF_MANY = 3, 12
"""Patches in a row of a larger image, at least, and the side from which an image is larger."""
MANY = 100_000
"""Images larger than `LARGEST` from which a model at their own resolution learns more."""
FINE = 28
"""Largest side for a grid of 4 x 4 patches (the recipe `fashion-mnist`); above it, 8 x 8."""


@dataclass(frozen=True)
class ImageStatistics:
    """Statistics of a sample of the training images.

    Attributes:
        side: median of the shorter sides, in pixels.
        uniform: True if all images are squares of one size, as in MNIST: centred and cropped by the
            authors of the dataset.
        colour: True if any image has colour.
    """

    side: int
    uniform: bool
    colour: bool

    @classmethod
    def of(cls, split: Split) -> ImageStatistics:
        """Compute the statistics of a split, of the first images where it is on a server.

        Raises:
            ImageError: one of them cannot be read.
        """
        last = len(split) - 1
        if split.is_remote:  # from the first shards, as each one is a download
            last = min(last, SAMPLE - 1)
        indices = np.unique(np.linspace(0, last, SAMPLE).astype(int))
        # Decoded, as the header does not tell grey images from colour.
        images = [split.read(int(index)) for index in indices]
        sizes = {image.shape[:2] for image in images}
        return cls(
            side=int(np.median([min(image.shape[:2]) for image in images])),
            uniform=len(sizes) == 1 and all(height == width for height, width in sizes),
            # A grey image that is stored in colour has equal channels.
            colour=any((image != image[..., :1]).any() for image in images),
        )

    @property
    def _shifted(self) -> bool:
        return self.uniform and self.side <= LARGEST

    def augmentation(self, side: int) -> Settings:
        """Return the augmentation of training images that a model gets at `side` pixels.

        Grey images are often signs (digits, letters, scans), whose meaning a flip would change.
        Uniform images that are not larger than a model from scratch gets them are shifted, as in
        the recipes for them; photographs are cropped.
        """
        flip, part_shifted = 0.0, 14
        if self.colour:
            flip, part_shifted = 0.5, 8
        if self._shifted:
            shift = max(1, side // part_shifted)
            return {"flip": flip, "shift": shift, "crop_scale": 1.0}
        return {"flip": flip, "shift": 0, "crop_scale": 0.35}

    def describe(self) -> str:
        """Return the statistics and the augmentation in one line."""
        kind, flips = "grey", "no flips, as grey images are often signs"
        if self.colour:
            kind, flips = "colour", "flips"
        sizes, change = "of several sizes or shapes", "random crops"
        if self.uniform:
            sizes = "all of the same size"
        if self._shifted:
            change = "shifts"
        return f"images: {kind}, {self.side} px, {sizes}; augmentation: {change}, {flips}"


@dataclass(frozen=True)
class ModelSize:
    """A size of a model from scratch, and the conditions under which it is used.

    Attributes:
        settings: recipe with this size and its optimizer.
        images: smallest number of training images.
        epochs: epochs that must fit into the time; on small data they decide the accuracy.
    """

    settings: Callable[[], Settings]
    images: int
    epochs: int


SIZES = (
    ModelSize(cifar10, images=30_000, epochs=100),
    ModelSize(cifar10_small, images=30_000, epochs=20),
    ModelSize(fashion_mnist, images=10_000, epochs=10),
    ModelSize(digits, images=0, epochs=0),
)
"""From large to small: 2.7, 0.8, 0.23 and 0.14 million parameters. The first that fits is used."""


def default_size(images: int, statistics: ImageStatistics) -> ModelSize | None:
    """Return the size of a model for so many images, which two cores can train.

    Args:
        images: training images.
        statistics: statistics of these images.

    Returns:
        The size; `None` where a preset at its own resolution learns more.
    """
    if images >= MANY and statistics.side > LARGEST:
        return None
    # the largest one is for a GPU
    return next(size for size in SIZES[1:] if size.images <= images)


def scratch_settings(
    size: ModelSize, statistics: ImageStatistics, side: int | None = None
) -> Settings:
    """Adapt a recipe to images of another size, with an augmentation for them.

    Args:
        size: size of the model.
        statistics: statistics of the training images.
        side: side of the model's images, in pixels; default that of the images, up to `LARGEST`.

    Raises:
        SettingError: a side that only patches of more than a third of it divide.
    """
    # A multiple of 4, so that patches of 4 fit.
    side = side or max(8, min(statistics.side, LARGEST) // 4 * 4)
    patch_size = _patch_size(side)
    if side >= SIDE_OF_MANY and side // patch_size < FEWEST_PATCHES:
        raise SettingError(
            f"--img-size {side}: only patches of {patch_size} pixels divide it, too few for a "
            f"model; pass a size that smaller ones divide, such as {_divisible_side(side)}"
        )
    recipe = size.settings()
    # The recipe's normalisation belongs to its dataset.
    settings = {name: v for name, v in recipe.items() if name not in ("mean", "std", "fit")}
    settings |= statistics.augmentation(side)
    if statistics.uniform:
        # Images of one square size: nothing is cut off, nothing is stretched.
        settings["fit"] = "squash"
    settings["spec"] = recipe["spec"] | {
        "image_size": side,
        "patch_size": patch_size,
        "in_channels": 3 if statistics.colour else 1,
    }
    return settings


def _patch_size(side: int) -> int:
    """Return the smallest patch that divides the side and gives a grid of 4 or 8 at most."""
    for patch in range(min(SMALLEST_PATCH, side), side):
        if side % patch == 0 and side // patch <= _most_patches(side):
            return patch
    return side


def _divisible_side(side: int) -> int:
    """Return the nearest side with 3 patches in a row or more."""
    step = _most_patches(side)
    return round(side / step) * step


def _most_patches(side: int) -> int:
    """Return the most patches in a row of an image."""
    return 4 if side <= FINE else 8
