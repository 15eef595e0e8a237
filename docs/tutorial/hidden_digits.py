"""Digits in photographs, and the training of a model that finds them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import vitkit
from vitkit.data.sources.open import open_dataset

SIDE, PATCH, DIGIT = 48, 8, 16
"""Height and width of an image, a patch and a digit, in pixels."""
CLASS, ROW, COLUMN = slice(0, 10), slice(10, 15), slice(15, 20)
"""The logits of the digit, and of the row and the column of its upper left patch."""


def fresh_model() -> vitkit.ViT:
    """Return a model before training, always with the same weights."""
    spec = vitkit.ViTSpec(
        image_size=SIDE, patch_size=PATCH, in_channels=1, num_classes=20,
        width=64, depth=3, num_heads=4, mlp_width=128, stem="linear",
    )  # fmt: skip
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = vitkit.ViT(spec)
        nn.init.normal_(model.patch_embed.proj.weight, std=0.005)  # usual: 0.125
        nn.init.normal_(model.pos_embed, std=0.005)
    return model


def digits_only(model: vitkit.ViT, folder: Path) -> vitkit.Checkpoint:
    """Save the model with the names of its classes, and load it with the ten digits alone."""
    names = [
        *"0123456789",
        *(f"row {n}" for n in range(5)),
        *(f"column {n}" for n in range(5)),
    ]
    preprocess = vitkit.Preprocess(
        image_size=SIDE, mean=(0.5,), std=(0.5,), fit="squash"
    )
    path = folder / "whole.safetensors"
    vitkit.save(path, model, preprocess=preprocess, classes=names)
    return vitkit.adapt(vitkit.load(path), classes=names[:10])


def maps_of(model: vitkit.ViT, images: Tensor) -> Tensor:
    """Return the attention maps of every layer, (L, B, h, T, T)."""
    record = vitkit.Record(attention=range(model.spec.depth))
    with torch.inference_mode():
        model(images, record=record)
    return torch.stack(list(record.attention.values()))


def grey(photograph: np.ndarray, scale: float) -> Tensor:
    """Convert a photograph (H, W) or (H, W, 3), uint8, to grey and resize it: (h, w) in [0, 1]."""
    pixels = torch.from_numpy(photograph).float() / 255
    pixels = pixels.mean(-1) if pixels.ndim == 3 else pixels
    smaller = F.interpolate(
        pixels[None, None], scale_factor=scale, antialias=True, mode="bilinear"
    )
    return smaller[0, 0]


def digits_of(part: str) -> tuple[Tensor, Tensor]:
    """Return the enlarged digits of a split, (N, 16, 16) in [0, 1] with ink 1, and labels (N,)."""
    split = open_dataset("digits").splits[part]
    scaled = torch.from_numpy(split.images[..., 0]).float()[:, None] / 255
    enlarged = F.interpolate(scaled, size=DIGIT, mode="bilinear")
    return enlarged[:, 0], torch.from_numpy(split.labels)


def hide(
    digits: Tensor, photographs: Sequence[Tensor], side: int, generator: torch.Generator
) -> tuple[Tensor, Tensor]:
    """Draw each digit at a random position of a random part of a photograph.

    Returns:
        Images (B, 1, side, side) in [-1, 1], and rows and columns of the digits (B, 2) in patches.
    """
    count = len(digits)
    which, down, across = torch.randint(999, (3, count), generator=generator).tolist()
    positions = torch.randint(
        (side - DIGIT) // PATCH + 1, (count, 2), generator=generator
    )
    images = torch.empty(count, side, side)
    corners = (PATCH * positions).tolist()
    for n, (digit, (row, column)) in enumerate(zip(digits, corners, strict=True)):
        photograph = photographs[which[n] % len(photographs)]
        top = down[n] % (photograph.shape[0] - side + 1)
        left = across[n] % (photograph.shape[1] - side + 1)
        images[n] = 0.5 * photograph[top : top + side, left : left + side]
        box = images[n, row : row + DIGIT, column : column + DIGIT]
        torch.maximum(box, digit, out=box)
    return 2 * images[:, None] - 1, positions


def digit_mask(positions: Tensor) -> Tensor:
    """Return 1 at the four patches of the digit and 0 elsewhere, (B, 36), for images of 48 x 48."""
    masks = torch.zeros(len(positions), SIDE // PATCH, SIDE // PATCH)
    across = DIGIT // PATCH
    for mask, (row, column) in zip(masks, positions.tolist(), strict=True):
        mask[row : row + across, column : column + across] = 1
    return masks.flatten(1)


def two_digits(
    digits: Tensor, labels: Tensor, photographs: Sequence[Tensor], *, count: int
) -> tuple[Tensor, Tensor, tuple[Tensor, Tensor]]:
    """Draw two digits of different classes into opposite corners of each image.

    Returns:
        Images (B, 1, 48, 48) in [-1, 1], the class of the first digit (B,), and masks (36,) with 1
        on the four patches of the first and of the second digit.
    """
    generator = torch.Generator().manual_seed(7)
    places = torch.tensor([[0, 0], [(SIDE - DIGIT) // PATCH] * 2])
    first = torch.randperm(len(digits), generator=generator)[:count]
    others = [labels != labels[number] for number in first.tolist()]
    second = torch.tensor([int(torch.multinomial(other.float(), 1, generator=generator))
                           for other in others])  # fmt: skip
    images, _ = hide(torch.zeros(count, DIGIT, DIGIT), photographs, SIDE, generator)
    for image, *pair in zip(images, first.tolist(), second.tolist(), strict=True):
        for number, (row, column) in zip(pair, (PATCH * places).tolist(), strict=True):
            box = image[0, row : row + DIGIT, column : column + DIGIT]
            torch.maximum(box, 2 * digits[number] - 1, out=box)
    one, other = digit_mask(places)
    return images, labels[first], (one, other)


def covered(images: Tensor, weights: Tensor) -> Tensor:
    """Cover the four patches of largest weight (B, 36) with the mean of the image."""
    mask = torch.zeros(len(images), 36).scatter(1, weights.topk(4, dim=1).indices, 1.0)
    mask = (
        mask.unflatten(1, (1, 6, 6))
        .repeat_interleave(PATCH, 2)
        .repeat_interleave(PATCH, 3)
    )
    return torch.where(mask > 0, images.mean(dim=(1, 2, 3), keepdim=True), images)


def train(
    model: vitkit.ViT, digits: Tensor, labels: Tensor, photographs: Sequence[Tensor], *,
    steps: int, lr: float,
) -> None:  # fmt: skip
    """Train the model in place, on 64 new images in every step."""
    groups = vitkit.parameter_groups(model, lr=lr, weight_decay=0.05)
    optimizer = torch.optim.AdamW(groups, betas=(0.9, 0.95))
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, lr, total_steps=steps, pct_start=0.15
    )
    generator = torch.Generator().manual_seed(0)
    for _ in range(steps):
        chosen = torch.randint(len(digits), (64,), generator=generator)
        images, positions = hide(digits[chosen], photographs, SIDE, generator)
        logits = model(images)
        loss = F.cross_entropy(logits[:, CLASS], labels[chosen])
        loss = loss + F.cross_entropy(logits[:, ROW], positions[:, 0])
        loss = loss + F.cross_entropy(logits[:, COLUMN], positions[:, 1])
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
