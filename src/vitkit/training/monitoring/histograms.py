"""Histograms of the weights of a model, for TensorBoard."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor, nn

SAMPLED = 10_000
"""Weights of a parameter in its histogram, evenly spaced."""
BINS = 64


@dataclass(frozen=True)
class Histogram:
    """A histogram of the weights of one parameter.

    Attributes:
        sample: the weights that were counted, (S,).
        edges: upper ends of the bins, (BINS,).
        counts: weights in each bin, (BINS,).
    """

    sample: Float[Tensor, " S"]
    edges: list[float]
    counts: list[float]


def histograms(model: nn.Module) -> Iterator[tuple[str, Histogram]]:
    """Yield name and histogram of every matrix of a model, from a sample of its weights."""
    for name, parameter in model.named_parameters():
        if parameter.ndim < 2:  # biases and norms are too small for a histogram
            continue
        weights = parameter.detach().flatten()
        sample = weights[:: max(1, weights.numel() // SAMPLED)].float().cpu()
        low, high = float(sample.min()), float(sample.max())
        if high <= low:  # all weights are equal, such as those of a new head
            high = low + 1e-6
        counts = torch.histc(sample, BINS, low, high)
        edges = torch.linspace(low, high, BINS + 1)[1:]
        yield name, Histogram(sample, edges.tolist(), counts.tolist())
