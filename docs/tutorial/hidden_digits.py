"""Digits hidden in photographs, and the training of a model that is to find them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import vitkit
from vitkit.data.sources.open import open_dataset

SIDE, PATCH, DIGIT = 48, 8, 16
"""Of an image, a patch and a digit, in pixels."""
WHAT, ROW, COLUMN = slice(0, 10), slice(10, 15), slice(15, 20)
"""The logits that say which digit it is, and the row and the column of its upper left patch."""


def grey(photograph: np.ndarray, scale: float) -> Tensor:
    """A photograph (H, W) or (H, W, 3), uint8, made smaller and grey: (h, w) in [0, 1]."""
    pixels = torch.from_numpy(photograph).float() / 255
    pixels = pixels.mean(-1) if pixels.ndim == 3 else pixels
    smaller = F.interpolate(pixels[None, None], scale_factor=scale, antialias=True, mode="bilinear")
    return smaller[0, 0]


def digits_of(part: str) -> tuple[Tensor, Tensor]:
    """The digits of a split, enlarged: (N, 16, 16) in [0, 1], ink 1; and their labels (N,)."""
    split = open_dataset("digits").splits[part]
    scaled = torch.from_numpy(split.images[..., 0]).float()[:, None] / 255
    enlarged = F.interpolate(scaled, size=DIGIT, mode="bilinear")
    return enlarged[:, 0], torch.from_numpy(split.labels)


def hidden(
    digits: Tensor, photographs: Sequence[Tensor], side: int, generator: torch.Generator
) -> tuple[Tensor, Tensor]:
    """Images (B, 1, side, side) in [-1, 1], and the digits' rows and columns (B, 2) in patches."""
    count = len(digits)
    which, down, across = torch.randint(999, (3, count), generator=generator).tolist()
    places = torch.randint((side - DIGIT) // PATCH + 1, (count, 2), generator=generator)
    images = torch.empty(count, side, side)
    for n, (digit, (row, column)) in enumerate(zip(digits, (PATCH * places).tolist(), strict=True)):
        photograph = photographs[which[n] % len(photographs)]
        top = down[n] % (photograph.shape[0] - side + 1)
        left = across[n] % (photograph.shape[1] - side + 1)
        images[n] = 0.5 * photograph[top : top + side, left : left + side]
        box = images[n, row : row + DIGIT, column : column + DIGIT]
        torch.maximum(box, digit, out=box)
    return 2 * images[:, None] - 1, places


def on_digit(places: Tensor) -> Tensor:
    """Return 1 at the four patches with the digit and 0 elsewhere, (B, 36), for images of 48 x 48."""
    inside = torch.zeros(len(places), SIDE // PATCH, SIDE // PATCH)
    across = DIGIT // PATCH
    for image, (row, column) in zip(inside, places.tolist(), strict=True):
        image[row : row + across, column : column + across] = 1
    return inside.flatten(1)


def train(
    model: vitkit.ViT, digits: Tensor, labels: Tensor, photographs: Sequence[Tensor], *,
    steps: int, lr: float,
) -> None:  # fmt: skip
    """Train it in place on images that are made anew for every step, 64 at a time."""
    groups = vitkit.parameter_groups(model, lr=lr, weight_decay=0.05)
    optimizer = torch.optim.AdamW(groups, betas=(0.9, 0.95))
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, lr, total_steps=steps, pct_start=0.15)
    generator = torch.Generator().manual_seed(0)
    for _ in range(steps):
        chosen = torch.randint(len(digits), (64,), generator=generator)
        images, places = hidden(digits[chosen], photographs, SIDE, generator)
        logits = model(images)
        loss = F.cross_entropy(logits[:, WHAT], labels[chosen])
        loss = loss + F.cross_entropy(logits[:, ROW], places[:, 0])
        loss = loss + F.cross_entropy(logits[:, COLUMN], places[:, 1])
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
