"""The 8 x 8 digits as tensors, and a short training that shifts them."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import Tensor
from torch.nn import functional as F

from vitkit.data.sources.open import open_dataset

Loss = Callable[[Tensor, Tensor], Tensor]
"""A function of images and labels."""


def images(part: str) -> tuple[Tensor, Tensor]:
    """Return the images (N, 1, 8, 8) in [-1, 1] and labels (N,) of a split."""
    split = open_dataset("digits").splits[part]
    images = torch.from_numpy(split.images).permute(0, 3, 1, 2) / 127.5 - 1
    return images, torch.from_numpy(split.labels)


def shifted(images: Tensor, generator: torch.Generator) -> Tensor:
    """Shift each image by -1, 0 or 1 pixels in both directions; the border is filled with paper."""
    rows, columns = torch.randint(
        3, (2, len(images), 1), generator=generator
    ) + torch.arange(8)
    number = torch.arange(len(images))[:, None, None]
    return F.pad(images, (1, 1, 1, 1), value=-1.0)[
        number, :, rows[:, :, None], columns[:, None]
    ].permute(0, 3, 1, 2)


def fit(
    loss: Loss, parameters: Iterable[Tensor], data: tuple[Tensor, Tensor], *, steps: int, lr: float,
    seed: int,
) -> None:  # fmt: skip
    """Train with AdamW, a short warm-up and a linear decay, on random batches of 64."""
    generator = torch.Generator().manual_seed(seed)
    optimizer = torch.optim.AdamW(parameters, lr=lr, weight_decay=0.05, fused=True)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min((step + 1) / 20, 1 - step / steps)
    )
    images, labels = data
    for _ in range(steps):
        chosen = torch.randint(len(labels), (64,), generator=generator)
        value = loss(shifted(images[chosen], generator), labels[chosen])
        optimizer.zero_grad()
        value.backward()
        optimizer.step()
        schedule.step()
