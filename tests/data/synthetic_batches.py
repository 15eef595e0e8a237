"""Batches of synthetic pixels, and the model's inputs that `BatchTransform` makes of them."""

import numpy as np
import torch

from vitkit import Preprocess
from vitkit.data.augmentation.pipeline import BatchTransform
from vitkit.data.loading.crop_flip import Augmentation
from vitkit.data.loading.loader import Batch

CPU = torch.device("cpu")


def preprocess(channels: int, size: tuple[int, int] = (28, 28)) -> Preprocess:
    return Preprocess(image_size=size, mean=(0.5,) * channels, std=(0.25,) * channels)


def images(count: int, channels: int = 3, size: tuple[int, int] = (28, 28)) -> torch.Tensor:
    """Return smooth images with noise, so that no two have a pixel in common."""
    draw = np.random.default_rng(count)
    height, width = size
    slope = np.linspace(60, 180, width) + np.linspace(-20, 20, height)[:, None]
    smooth = slope[None, :, :, None] + draw.normal(0, 12, (count, height, width, channels))
    return torch.from_numpy(smooth.clip(0, 255).astype(np.uint8))


def batch(pixels: torch.Tensor, indices: list[int] | None = None, epoch: int = 0, view: int = 0):
    numbers = torch.arange(len(pixels)) if indices is None else torch.tensor(indices)
    views = torch.full_like(numbers, view)
    return Batch(pixels, numbers % 10, numbers, epoch, views)


def fed(
    pixels: torch.Tensor, indices: list[int] | None = None, *, epoch: int = 0, view: int = 0,
    seed: int = 0, **settings: object,
) -> torch.Tensor:  # fmt: skip
    """Return the model's inputs for some pixels, on the scale [0, 1] but for erased boxes."""
    shown = preprocess(pixels.shape[-1], (pixels.shape[1], pixels.shape[2]))
    feed = BatchTransform(shown, CPU, Augmentation(**settings), seed=seed)
    return feed(batch(pixels, indices, epoch, view), step=0).images * 0.25 + 0.5
