"""Normalisation of pixels by mean and standard deviation: (pixels / 255 - mean) / std.

Training, evaluation and prediction all use it, on the device of the pixels.
"""

from __future__ import annotations

import torch
from jaxtyping import Float, UInt8
from torch import Tensor

from vitkit.errors import ShapeError
from vitkit.spec import Preprocess


def normalise(pixels: UInt8[Tensor, "B H W C"], preprocess: Preprocess) -> Float[Tensor, "B C H W"]:
    """Return (pixels / 255 - mean) / std per channel: float32, on the device of `pixels`.

    Args:
        pixels: (B, H, W, C) uint8 [0, 255], as `fit` gives them.
        preprocess: its mean and std, on the scale [0, 1].

    Raises:
        ShapeError: another number of channels or another dtype.
    """
    return standardise_in_place(to_unit(pixels, preprocess), preprocess)


def to_unit(pixels: UInt8[Tensor, "B H W C"], preprocess: Preprocess) -> Float[Tensor, "B C H W"]:
    """Return pixels / 255, on the scale [0, 1]: the first half of `normalise`.

    Raises:
        ShapeError: another number of channels or another dtype.
    """
    if pixels.dtype != torch.uint8 or pixels.ndim != 4 or pixels.shape[-1] != preprocess.channels:
        raise ShapeError(
            f"expected pixels (B, H, W, {preprocess.channels}) uint8, "
            f"got {tuple(pixels.shape)} {pixels.dtype}"
        )
    # A copy in (B, C, H, W) order, which may be changed in place.
    images = pixels.permute(0, 3, 1, 2).to(torch.float32, memory_format=torch.contiguous_format)
    return images.div_(_per_channel((255.0,), images))


def standardise_in_place(
    images: Float[Tensor, "B C H W"], preprocess: Preprocess
) -> Float[Tensor, "B C H W"]:
    """Compute (images - mean) / std per channel, in place: the second half of `normalise`."""
    mean = _per_channel(preprocess.mean, images)
    std = _per_channel(preprocess.std, images)
    return images.sub_(mean).div_(std)


def _per_channel(values: tuple[float, ...], like: Tensor) -> Float[Tensor, "_ 1 1"]:
    """Return numbers as a tensor (C, 1, 1) on the device of `like`.

    Some devices multiply by the reciprocal of a plain number instead of dividing, and the last bit
    would then depend on the device.
    """
    return torch.tensor(values, dtype=torch.float32, device=like.device).view(-1, 1, 1)
