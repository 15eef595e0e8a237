"""Whether bfloat16 autocast pays on this machine: a short trial, decided once and written down."""

from __future__ import annotations

import copy
import time
from contextlib import AbstractContextManager, nullcontext
from statistics import median
from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from vitkit.models.vit import ViT

Precision = Literal["off", "bfloat16"]
ROUNDS = 3
WORTH_IT = 0.95
"""bfloat16 must take at most this part of float32's time."""
TRIAL_FLOPS = 2e10
"""Work of one trial step; keeps the trial short on slow machines."""


def autocast(precision: Precision, device: torch.device) -> AbstractContextManager[object]:
    """The context a forward pass runs in."""
    if precision == "off":
        return nullcontext()
    return torch.autocast(device.type, dtype=torch.bfloat16)


def faster_precision(
    model: ViT, images: Tensor, labels: Tensor, device: torch.device
) -> tuple[Precision, str]:
    """Time a few training steps of a copy in float32 and under bfloat16 autocast, in turn.

    Args:
        model: left as it is.
        images: a batch (B, C, H, W) on the device.
        labels: class numbers (B,).
        device: where both are.

    Returns:
        The faster one, and a line that says what was measured.
    """
    trial = copy.deepcopy(model).train()
    tokens = model.spec.num_patches + model.spec.num_prefix_tokens
    flops = 6 * tokens * sum(p.numel() for p in model.parameters())
    pictures = max(1, min(len(images), int(TRIAL_FLOPS / flops)))
    images, labels = images[:pictures], labels[:pictures]
    times: dict[Precision, list[float]] = {"off": [], "bfloat16": []}
    for round_number in range(ROUNDS + 1):
        for precision, taken in times.items():
            start = time.perf_counter()
            with autocast(precision, device):
                loss = F.cross_entropy(trial(images).float(), labels)
            loss.backward()
            _wait_for(device)
            if round_number:  # the first round warms up
                taken.append(time.perf_counter() - start)
    ratio = median(times["bfloat16"]) / median(times["off"])
    chosen: Precision = "bfloat16" if ratio <= WORTH_IT else "off"
    said = "bfloat16 autocast" if chosen == "bfloat16" else "float32"
    return chosen, f"precision: {said} (a bfloat16 step takes {ratio:.2f}x a float32 step here)"


def _wait_for(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    elif device.type == "mps":
        torch.mps.synchronize()
