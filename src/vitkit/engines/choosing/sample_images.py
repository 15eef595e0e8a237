"""Images for trials where the user gives none: noise with the statistics of photographs."""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

DECAY = 1.0
"""The amplitude of a spatial frequency f is 1 / f in photographs (Field, 1987)."""


def sample_images(
    count: int, channels: int, image_size: tuple[int, int], seed: int = 0
) -> Float[Tensor, "B C H W"]:
    """Return noise of mean 0 and deviation 1 with the spectrum of photographs (B, C, H, W).

    White noise would not do: a model sees the same grey in every patch of it.

    Args:
        count: B.
        channels: C.
        image_size: (H, W) in pixels.
        seed: seed of the noise.
    """
    height, width = image_size
    generator = torch.Generator().manual_seed(seed)
    noise = torch.randn(count, channels, height, width, generator=generator)
    rows = torch.fft.fftfreq(height)[:, None] * height
    columns = torch.fft.rfftfreq(width)[None, :] * width
    frequency = (rows**2 + columns**2).sqrt().clamp(min=1.0)
    images = torch.fft.irfft2(torch.fft.rfft2(noise) / frequency**DECAY, s=image_size)
    mean, std = images.mean((2, 3), keepdim=True), images.std((2, 3), keepdim=True)
    return (images - mean) / (std + 1e-6)
