"""Inputs of a measurement: labels, and weights that are not zero."""

from __future__ import annotations

import torch
from torch import Tensor, nn

PROBES = 8
"""Images whose logits are compared before anything is timed."""
NOISE = 0.1
"""Standard deviation of what is added to biases, and to a head of zeros."""


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
            parameter.add_(noise.to(parameter.device), alpha=NOISE)
