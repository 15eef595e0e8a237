"""Temperature scaling: one number that makes probabilities say how often they are right."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from jaxtyping import Float, Int64
from torch import Tensor

from vitkit.training.distributed import World

LOWEST, HIGHEST = 0.05, 20.0
"""Temperatures that are looked at."""
HALVINGS = 40


def fit_temperature(
    outputs: Iterable[tuple[Float[Tensor, "_ K"], Int64[Tensor, "_"]]], world: World | None = None
) -> float | None:
    """The T whose softmax(z / T) has the least negative log-likelihood of the labels.

    Guo et al., "On Calibration of Modern Neural Networks" (arXiv 1706.04599), Sec. 4.2. In
    b = 1 / T the loss is convex, with the slope sum_i (E_softmax(b z_i)[z_i] - z_i,label), so that
    halving an interval finds the one place where it is level. Which class comes first does not
    change.

    Args:
        outputs: logits and class numbers, batch by batch; of pictures that are neither trained on
            nor tested with.
        world: the processes that share the pictures; each must call, and each gets the same.

    Returns:
        T in [0.05, 20]; `None` where the loss is least at a bound. That is so where every picture
        is right: the loss then falls for ever as T does, and the labels do not say how sure one
        may be.
    """
    world = world or World()
    held = [(logits.cpu(), labels.cpu()) for logits, labels in outputs]

    def slope(b: float) -> float:
        total = torch.zeros((), dtype=torch.float64)
        for single, labels in held:
            logits = single.double()
            expected = ((b * logits).softmax(1) * logits).sum(1)
            total += (expected - logits.gather(1, labels[:, None])[:, 0]).sum()
        return float(world.summed(total))

    low, high = 1 / HIGHEST, 1 / LOWEST
    if not slope(low) < 0 < slope(high):
        return None
    for _ in range(HALVINGS):
        middle = math.sqrt(low * high)
        low, high = (middle, high) if slope(middle) < 0 else (low, middle)
    return 1 / math.sqrt(low * high)
