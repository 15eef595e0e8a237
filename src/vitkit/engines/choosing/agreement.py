"""Agreement of two tensors of logits, and the bounds that an engine must keep."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn import functional as F

FLOAT32_BOUND = 1e-4
"""Largest difference of a logit, as a share of the largest logit (at least 1)."""
COSINE_BOUNDS = {"bfloat16": 0.999, "int8": 0.99}
"""Smallest cosine of an image's logits with those of float32."""
SAME_CLASS_BOUNDS = {"bfloat16": 0.99, "int8": 0.99}
"""Smallest share of images with the same most probable class, where `images` are enough."""
ENOUGH_IMAGES = 100
"""Least images to judge the share of equal classes; with fewer, one image weighs too much."""


@dataclass(frozen=True)
class Agreement:
    """How far logits are from those expected.

    Attributes:
        difference: largest difference of a logit.
        scale: largest expected logit, by its absolute value.
        cosine: smallest cosine of an image's logits with those expected.
        same_class: share of images with the same most probable class, in [0, 1].
        images: number of images.
        finite: True if no logit is NaN or infinite.
    """

    difference: float
    scale: float
    cosine: float
    same_class: float
    images: int
    finite: bool

    def refusal(self, precision: str) -> str:
        """Return why these logits are not good enough for a precision; empty if they are."""
        if not self.finite:
            return "its logits are NaN or infinite"
        if precision == "float32":
            bound = FLOAT32_BOUND * max(1.0, self.scale)
            if self.difference <= bound:
                return ""
            return f"its logits differ by {self.difference:.2g}; at most {bound:.2g} is expected"
        if self.cosine < COSINE_BOUNDS[precision]:
            return (
                f"its logits have a cosine similarity of {self.cosine:.4f} with those of float32; "
                f"at least {COSINE_BOUNDS[precision]} is expected"
            )
        if self.images >= ENOUGH_IMAGES and self.same_class < SAME_CLASS_BOUNDS[precision]:
            return (
                f"it gives the same class as float32 for {self.same_class:.1%} of the images; at "
                f"least {SAME_CLASS_BOUNDS[precision]:.0%} is expected"
            )
        return ""


def compare_logits(logits: Float[Tensor, "N K"], expected: Float[Tensor, "N K"]) -> Agreement:
    """Compare logits (N, K) with those expected (N, K), of the same images."""
    logits, expected = logits.double().cpu(), expected.double().cpu()
    return Agreement(
        difference=float((logits - expected).abs().max()),
        scale=float(expected.abs().max()),
        cosine=float(F.cosine_similarity(logits, expected, dim=1).min()),
        same_class=float((logits.argmax(1) == expected.argmax(1)).double().mean()),
        images=len(expected),
        finite=bool(torch.isfinite(logits).all()),
    )
