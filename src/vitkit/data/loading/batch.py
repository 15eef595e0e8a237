"""`Batch`: the pixels, labels and places of some images; `PixelAugmentation`: what changes them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import numpy as np
import torch
from jaxtyping import Bool, Float, Int64, UInt8
from torch import Tensor

from vitkit.data.images.preprocess import normalise
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


@runtime_checkable
class PixelAugmentation(Protocol):
    """The random changes that a loader process makes; `data.augmentation.pipeline` has them.

    A protocol, so that a loader imports no augmentation: evaluation needs none.
    """

    def reduction(
        self,
        size: tuple[int, int],
        preprocess: Preprocess,
        seed: int,
        augmentation_key: int,
        index: int,
    ) -> int:
        """Return the factor by which a JPEG of a size (H, W) may be decoded smaller."""

    def write(
        self,
        out: UInt8[np.ndarray, "h w C"],
        image: UInt8[np.ndarray, "H W channels"],
        preprocess: Preprocess,
        seed: int,
        augmentation_key: int,
        index: int,
        *,
        mirrored: bool,
        size: tuple[int, int] | None = None,
    ) -> None:
        """Write an image into its place in a batch, resized and perhaps mirrored."""

    def flips(
        self,
        seed: int,
        augmentation_keys: int | Int64[np.ndarray, "B"],
        indices: Int64[np.ndarray, "B"],
    ) -> Bool[np.ndarray, "B"]:
        """Return which images of a batch are mirrored."""

    def shifted(
        self,
        pixels: UInt8[np.ndarray, "B H W C"],
        seed: int,
        augmentation_keys: int | Int64[np.ndarray, "B"],
        indices: Int64[np.ndarray, "B"],
    ) -> UInt8[np.ndarray, "B H W C"]:
        """Shift a batch; the shape stays."""
