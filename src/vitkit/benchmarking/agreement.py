"""Agreement of a contender's logits with ours, which is checked before anything is timed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

LARGEST_DIFFERENCE = {"float32": 1e-4, "bfloat16": 5e-2, "int8": 0.25}
"""Precision -> largest allowed difference of two logits, relative to the largest logit if that is
above 1. In half precision and in int8 the reference is float32, so that rounding counts."""


class Agreement(NamedTuple):
    """Two models' logits of the same images.

    Attributes:
        difference: the largest |difference|, divided by the largest |logit| of ours if above 1;
            infinite for other shapes, or numbers that are not finite.
        same_class: share of the images whose largest logit is the same one.
        bound: largest difference that counts as equal.
    """

    difference: float
    same_class: float
    bound: float

    @property
    def equal(self) -> bool:
        """True if both are the same model, as far as the precision shows."""
        return self.difference <= self.bound


def compare_logits(
    ours: Tensor, theirs: Tensor | Sequence[Sequence[float]], precision: str
) -> Agreement:
    """Compare logits of the same images.

    Args:
        ours: (B, K), in float32.
        theirs: (B, K).
        precision: that theirs were computed in.
    """
    bound = LARGEST_DIFFERENCE[precision]
    other = torch.as_tensor(theirs, dtype=torch.float32)
    if other.shape != ours.shape or not bool(other.isfinite().all()):
        return Agreement(float("inf"), 0.0, bound)
    scale = max(1.0, float(ours.abs().max()))
    difference = float((ours - other).abs().max()) / scale
    same = float((ours.argmax(1) == other.argmax(1)).float().mean())
    return Agreement(difference, same, bound)
