"""Inputs of a measurement: images with the statistics of photographs, and weights unlike zero."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

NOISE = 0.1
"""Standard deviation of what is added to biases, and to a head of zeros."""
COARSE = 8
"""Pixels from one random number to the next."""


def smooth_images(count: int, size: tuple[int, int], channels: int = 3, *, seed: int = 0) -> Tensor:
    """Return smoothed noise (B, C, H, W) in float32, the same for the same arguments.

    Images of zeros, or of one colour, are computed faster on some hardware than photographs are.

    Args:
        count: number of images.
        size: height and width in pixels.
        channels: of each image.
        seed: 0 or more; another one gives other images.
    """
    generator = torch.Generator().manual_seed(seed)
    coarse = [max(1, side // COARSE) for side in size]
    noise = torch.randn(count, channels, *coarse, generator=generator)
    return F.interpolate(noise, size=size, mode="bicubic")


def class_labels(count: int, classes: int, *, seed: int = 0) -> Tensor:
    """Return random class numbers (B,), the same for the same arguments."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(max(1, classes), (count,), generator=generator)


@torch.no_grad()
def unsettle(model: nn.Module) -> None:
    """Add noise to the biases and norms of an untrained model, and to a head of zeros.

    They would be 0 or 1, so that logits show no mistake in them. The biases of query, key and
    value stay zero: vit-pytorch has none, and computes the same only so.

    Args:
        model: an untrained one; it is changed in place.
    """
    generator = torch.Generator().manual_seed(0)
    for name, parameter in model.named_parameters():
        if ".attn.qkv." in name:
            continue
        if parameter.ndim == 1 or not parameter.any():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter += NOISE * noise.to(parameter.device)
