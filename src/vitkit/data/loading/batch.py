"""`Batch`: the pixels, labels and places of some images; the order of the images of an epoch."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch
from jaxtyping import Float, Int64, UInt8
from torch import Tensor

from vitkit.data.datasets.split import Split
from vitkit.data.images.preprocess import normalise
from vitkit.randomness import hash64, permutation
from vitkit.spec import Preprocess


@dataclass(frozen=True)
class Batch:
    """One batch, still as pixels.

    Attributes:
        pixels: (B, H, W, C) uint8 [0, 255].
        labels: class numbers (B,).
        indices: the images' indices in the split (B,).
        epoch: the epoch whose random numbers changed the images, counted from 0; -1 in evaluation.
        views: the number of each image's repetition in that epoch (B,), counted from 0.
    """

    pixels: UInt8[Tensor, "B H W C"]
    labels: Int64[Tensor, "B"]
    indices: Int64[Tensor, "B"]
    epoch: int
    views: Int64[Tensor, "B"]

    def images(self, preprocess: Preprocess, device: torch.device) -> Float[Tensor, "B C H W"]:
        """Return the normalised images on `device`; uint8 is transferred and converted there.

        Args:
            preprocess: channels C, mean and std.
            device: where the images are wanted.

        Returns:
            (B, C, H, W) float32.

        Raises:
            ShapeError: pixels of another number of channels.
        """
        return normalise(self.pixels.to(device, non_blocking=True), preprocess)

    def first(self, count: int) -> Batch:
        """Return a batch of the first images alone."""
        return self._select(slice(count))

    def parts(self, count: int) -> Iterator[Batch]:
        """Split the batch into `count` parts of one size; part n takes the rows n, n + count ...

        `count` must divide the number of images. The views of one image, which are neighbours, go
        to different parts, and an image is mixed with another one.
        """
        return (self._select(slice(number, None, count)) for number in range(count))

    def _select(self, rows: slice) -> Batch:
        return Batch(
            self.pixels[rows], self.labels[rows], self.indices[rows], self.epoch, self.views[rows]
        )


PixelTransform = Callable[[UInt8[np.ndarray, "H W C"], int, int, str], UInt8[np.ndarray, "h w c"]]
"""A function of an image's pixels, its epoch and view in one key, its index and its name."""


# The order in which the images of a split are trained on: a pure function of (seed, epoch).

AHEAD = 1 << 16
"""Images that are searched for the next shard."""
MIXED = -2
MIXED = -2
"""Key of the random numbers that mix the images of balanced classes."""


def steps_of_epoch(images: int, batch_size: int, *, fill: bool = False) -> int:
    """Return the optimizer steps of an epoch.

    Args:
        images: images of the epoch.
        batch_size: images of a step.
        fill: images that do not fill a batch make one more, with others of the epoch.
    """
    return -(-images // batch_size) if fill else images // batch_size


def sizes_of_epochs(sizes: Sequence[int], epochs: int) -> tuple[int, ...]:
    """Return one image size for every epoch: each of `sizes` for an equal part of them, in order.

    Args:
        sizes: sides in pixels; none where all epochs have the usual size.
        epochs: their number.

    >>> sizes_of_epochs((128, 160, 192), 7)
    (128, 128, 128, 160, 160, 192, 192)
    """
    if not sizes:
        return ()
    return tuple(sizes[epoch * len(sizes) // epochs] for epoch in range(epochs))


class EpochOrder:
    """One permutation of all images.

    The order is that of the split, whether or not its pixels are read from a cache. With `balance`
    every class comes as often as any other, and images of the rare ones several times.
    """

    def __init__(self, split: Split, seed: int, *, balance: bool = False) -> None:
        self._split = split
        self._seed = seed
        self._labels = split.labels if balance else None

    @lru_cache(maxsize=2)  # noqa: B019 - there is one order a run
    def __call__(self, epoch: int) -> Int64[np.ndarray, " N"]:
        """Return N indices of images in the split, in the order of this epoch."""
        if self._labels is not None:
            return balanced_order(self._seed, epoch, self._labels)
        return permutation(self._seed, epoch, len(self._split))

    @lru_cache(maxsize=2)  # noqa: B019 - likewise
    def repeat_index(self, epoch: int) -> Int64[np.ndarray, " N"]:
        """Return how often each image of the order has come before in this epoch (N,)."""
        order = self(epoch)
        if self._labels is None:
            return np.zeros_like(order)
        # Sorted by image, the repetitions of one image are a run of equal numbers.
        by_image = np.argsort(order, kind="stable")
        starts = np.flatnonzero(np.diff(order[by_image], prepend=-1))
        lengths = np.diff(starts, append=len(order))
        repeats = np.empty_like(order)
        repeats[by_image] = np.arange(len(order)) - np.repeat(starts, lengths)
        return repeats


def balanced_order(
    seed: int, epoch: int, labels: Int64[np.ndarray, " N"]
) -> Int64[np.ndarray, " N"]:
    """Return N indices in which every class that has images comes equally often, give or take one.

    The images of a rare class come again and again, each as often as any other of it, or once
    more; of a frequent class there are others in every epoch. The classes that come once more
    change from epoch to epoch, too.
    """
    # Images grouped by class, shuffled inside of each: a class draws its quota from its group.
    shuffled = permutation(seed, epoch, len(labels))
    by_class = shuffled[np.argsort(labels[shuffled], kind="stable")]
    _, starts, counts = np.unique(labels[by_class], return_index=True, return_counts=True)
    share, rest = divmod(len(labels), len(counts))
    # The remainder goes to different classes in every epoch.
    quotas = share + ((np.arange(len(counts)) + epoch) % len(counts) < rest)
    position = np.arange(len(labels)) - np.repeat(np.cumsum(quotas) - quotas, quotas)
    # A quota larger than the class starts again with its first image.
    drawn = by_class[np.repeat(starts, quotas) + position % np.repeat(counts, quotas)]
    return drawn[np.argsort(hash64(seed, epoch, MIXED, np.arange(len(labels))), kind="stable")]


def class_counts(labels: Int64[np.ndarray, " N"], classes: Sequence[str]) -> str:
    """Return a line on how uneven the classes are, and how often a balanced epoch draws each.

    Args:
        labels: class numbers (N,).
        classes: the class names.
    """
    counts = np.bincount(labels, minlength=len(classes))
    present = np.flatnonzero(counts)
    fewest = present[counts[present].argmin()]
    most = present[counts[present].argmax()]
    share = len(labels) / len(present)
    return (
        f"balance: {counts[fewest]:,} ({classes[fewest]}) to {counts[most]:,} ({classes[most]}) "
        f"images per class; each class is drawn {share:,.0f} times per epoch, and an image of "
        f"{classes[fewest]} {share / counts[fewest]:.1f} times"
    )
