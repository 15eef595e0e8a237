"""A weighted k-nearest-neighbour classifier of features."""

from __future__ import annotations

import torch
from jaxtyping import Float, Int64
from torch import Tensor
from torch.nn import functional as F

NEIGHBOURS = 20
TEMPERATURE = 0.07
"""As in DINO (arXiv 2104.14294, Sec. 3.2 and its eval_knn.py)."""
SIMILARITIES_AT_ONCE = 2**26
"""Similarities computed at once: 256 MB of float32."""


def knn(
    train: Float[Tensor, "N E"],
    labels: Int64[Tensor, "N"],
    queries: Float[Tensor, "M E"],
    num_classes: int,
    *,
    neighbours: int = NEIGHBOURS,
    temperature: float = TEMPERATURE,
) -> Float[Tensor, "M K"]:
    """Return a probability of every class for each of M images.

    Of cosine similarities s, the k largest vote for their class with exp(s / temperature)
    (Z. Wu et al., arXiv 1805.01978, Sec. 3.4; as in DINO).

    Args:
        train: features of N images (N, E).
        labels: their class numbers (N,).
        queries: features of the M images (M, E).
        num_classes: K.
        neighbours: k; at most N.
        temperature: above 0; the smaller it is, the more the nearest neighbours count.
    """
    train = F.normalize(train, dim=1)
    neighbours = min(neighbours, len(train))
    votes = []
    for batch in queries.split(max(1, SIMILARITIES_AT_ONCE // len(train))):
        # (m, N) cosine similarities
        similarities = F.normalize(batch, dim=1) @ train.T
        nearest, indices = similarities.topk(neighbours)
        # relative to the nearest, so that the exponential cannot overflow
        weights = ((nearest - nearest[:, :1]) / temperature).exp()
        class_votes = weights.new_zeros(len(batch), num_classes)
        votes.append(class_votes.scatter_add_(1, labels[indices], weights))
    all_votes = torch.cat(votes)
    # votes become probabilities, (M, K)
    return all_votes / all_votes.sum(1, keepdim=True)
