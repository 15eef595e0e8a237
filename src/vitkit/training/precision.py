"""What a short trial decides on this machine: half precision, and how heads attend.

And float16's loss scale.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from itertools import product
from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from vitkit.errors import CheckpointError
from vitkit.models.attention import AttentionKernel, use_attention
from vitkit.models.vit import ViT
from vitkit.training.state import Tensors, Values

Precision = Literal["off", "bfloat16", "float16"]
ROUNDS = 5
WORTH_IT = 0.95
"""Another way must take at most this part of the time of the usual one."""
TRIAL_FLOPS, TRIAL_FLOPS_ELSEWHERE = 2e10, 2e12
"""Work of one trial step: on a processor short; on a GPU more than the starting of kernels."""


def autocast(precision: Precision, device: torch.device) -> AbstractContextManager[object]:
    """The context a forward pass runs in."""
    if precision == "off":
        return nullcontext()
    return torch.autocast(device.type, dtype=getattr(torch, precision))


def half_precision(device: torch.device) -> Precision:
    """`bfloat16`, or `float16` on a GPU that has no bfloat16 of its own."""
    if device.type == "cuda" and not torch.cuda.is_bf16_supported(including_emulation=False):
        return "float16"
    return "bfloat16"


def fastest_arithmetic(
    model: ViT,
    images: Tensor,
    labels: Tensor,
    device: torch.device,
    kernels: Sequence[AttentionKernel],
) -> tuple[Precision, AttentionKernel, str]:
    """Time a few training steps of a copy, in float32 and in the device's half precision, in turn.

    Args:
        model: left as it is.
        images: a batch (B, C, H, W) on the device.
        labels: class numbers (B,).
        device: where both are.
        kernels: the ways to attend that are tried, each in both precisions.

    Returns:
        The fastest way, float32 with the first kernel unless another is clearly faster; and a line
        that says what was measured.
    """
    trial = copy.deepcopy(model).train()
    tokens = model.spec.num_patches + model.spec.num_prefix_tokens
    flops = 6 * tokens * sum(p.numel() for p in model.parameters())
    most = TRIAL_FLOPS if device.type == "cpu" else TRIAL_FLOPS_ELSEWHERE
    pictures = max(1, min(len(images), int(most / flops)))
    images, labels = images[:pictures], labels[:pictures]
    half = half_precision(device)
    ways: list[tuple[Precision, AttentionKernel]] = list(product(("off", half), kernels))
    times: list[list[float]] = [[] for _ in ways]
    for round_number in range(ROUNDS + 1):
        for (precision, kernel), taken in zip(ways, times, strict=True):
            use_attention(trial, kernel)
            start = time.perf_counter()
            with autocast(precision, device):
                loss = F.cross_entropy(trial(images).float(), labels)
            loss.backward()
            wait_for(device)
            if round_number:  # the first round warms up
                taken.append(time.perf_counter() - start)
    ratios = [min(taken) / min(times[0]) for taken in times]  # what else runs only adds
    fastest = min(range(1, len(ways)), key=ratios.__getitem__)
    chosen = fastest if ratios[fastest] <= WORTH_IT else 0
    names = [f"{'float32' if amp == 'off' else f'{amp} autocast'}, {kernel} attention"
             for amp, kernel in ways]  # fmt: skip
    return *ways[chosen], (
        f"precision: {names[chosen]} (a step of {names[fastest]} takes {ratios[fastest]:.2f}x one "
        f"of {names[0]} here)"
    )


class LossScale:
    """Keeps float16's small gradients from becoming zeros: loss times scale, gradient over scale.

    "Mixed Precision Training" (arXiv 1710.03740), Sec. 3.2, with the numbers of torch's
    `GradScaler`, whose step knows neither Muon's views nor the parts of sharded weights. Every
    scale is a power of two, so scaling itself rounds nothing.

    Attributes:
        scale: the factor.
        good: steps since it last changed.
    """

    FIRST, LOWEST, PATIENCE = 2.0**16, 1.0, 2000

    def __init__(self) -> None:
        self.scale, self.good = self.FIRST, 0

    def fitted(self) -> None:
        """A gradient was finite: after `PATIENCE` of them in a row, try twice the scale."""
        self.good += 1
        if self.good == self.PATIENCE:
            self.scale, self.good = self.scale * 2, 0

    def lowered(self) -> bool:
        """A gradient was not finite: halve the scale; False where that cannot help."""
        if self.scale <= self.LOWEST:
            return False
        self.scale, self.good = self.scale / 2, 0
        return True

    def tensors(self) -> Tensors:
        """None."""
        return {}

    def values(self) -> Values:
        """Both numbers."""
        return {"scale": self.scale, "good": self.good}

    def restore(self, tensors: Tensors, values: Values) -> None:
        """Go on with both. Raises `CheckpointError`."""
        if values.keys() != {"scale", "good"}:
            raise CheckpointError(f"loss scale: stored as {values}")
        self.scale, self.good = float(values["scale"]), int(values["good"])


def wait_for(device: torch.device) -> None:
    """Until the device has done what it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    elif device.type == "mps":
        torch.mps.synchronize()
