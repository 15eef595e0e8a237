"""The random changes that a loader process makes, as a loader sees them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol, runtime_checkable

import numpy as np
from jaxtyping import Bool, Int64, UInt8

from vitkit.spec import Preprocess

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
