"""A linear classifier of features: logistic regression by L-BFGS."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int64
from torch import Tensor, nn
from torch.nn import functional as F

from vitkit.errors import DataError

PENALTIES = tuple(10.0**power for power in range(1, -7, -1))
"""Strengths of the L2 penalty, from strong to weak."""
LBFGS_ITERATIONS = 300
"""L-BFGS iterations for one strength, starting from the minimum of the strength before."""
SMALLEST_DEVIATION = 1e-6
"""A feature that varies less than this is constant, and is not scaled."""


@dataclass(frozen=True)
class LinearClassifier:
    """A linear classifier of features, with its score on validation.

    Attributes:
        weight: (K, E).
        bias: (K,).
        strength: strength of the L2 penalty that was best on validation.
        top1: on validation, in [0, 1].
        loss: on validation, in nats.
    """

    weight: Float[Tensor, "K E"]
    bias: Float[Tensor, " K"]
    strength: float
    top1: float
    loss: float

    def __call__(self, features: Float[Tensor, "N E"]) -> Float[Tensor, "N K"]:
        """Return logits."""
        return F.linear(features, self.weight, self.bias)


def fit_linear(
    train: Float[Tensor, "N E"],
    labels: Int64[Tensor, "N"],
    validation: Float[Tensor, "M E"],
    validation_labels: Int64[Tensor, "M"],
    num_classes: int,
    *,
    strengths: Sequence[float] = PENALTIES,
    device: torch.device | None = None,
    watch: Callable[[Tensor], object] = len,
) -> LinearClassifier:
    """Fit logistic regression with an L2 penalty, its strength chosen on validation.

    Minimise the mean cross-entropy + strength / 2 * |W|^2 by L-BFGS, as CLIP's linear probes do
    (arXiv 2103.00020, App. A.3), over features of mean 0 and standard deviation 1 in train.

    Args:
        train: features (N, E).
        labels: their class numbers (N,).
        validation: features (M, E).
        validation_labels: their class numbers (M,).
        num_classes: K.
        strengths: to choose from, by top-1 and then by loss; from strong to weak, as each starts
            from the minimum of the one before.
        device: where to compute.
        watch: receives the logits on validation (M, K) of each strength.

    Returns:
        The classifier of features as they are, on the CPU.

    Raises:
        DataError: all images are of one class.
    """
    if len(labels.unique()) < 2:
        raise DataError("all images have the same class; a linear head needs at least two")
    mean = train.mean(0)
    # train and validation are standardised by the statistics of train
    deviation = train.std(0, correction=0)
    scale = torch.where(deviation > SMALLEST_DEVIATION, deviation, torch.ones_like(deviation))
    inputs = ((train - mean) / scale).to(device)
    val_inputs = ((validation - mean) / scale).to(device)
    targets, val_targets = labels.to(device), validation_labels.to(device)
    head = nn.Linear(inputs.shape[1], num_classes, device=device)
    nn.init.zeros_(head.weight)
    nn.init.zeros_(head.bias)  # the problem is convex: the result needs no seed
    best: LinearClassifier | None = None
    for strength in strengths:
        _minimise(head, inputs, targets, strength)
        with torch.no_grad():
            watch(logits := head(val_inputs))
            top1 = float((logits.argmax(1) == val_targets).float().mean())
            loss = float(F.cross_entropy(logits, val_targets))
        # Of few validation images many strengths have the same top-1: the loss decides.
        if best is None or (top1, -loss) > (best.top1, -best.loss):
            # W ((x - mean) / scale) + b as a map of x itself
            weight = head.weight.detach().cpu() / scale
            bias = head.bias.detach().cpu() - weight @ mean
            best = LinearClassifier(weight, bias, strength, top1, loss)
    assert best is not None, "there is a strength"
    return best


def _minimise(head: nn.Linear, inputs: Tensor, targets: Tensor, strength: float) -> None:
    """Minimise the loss for one strength, starting from the head's weights."""
    optimizer = torch.optim.LBFGS(
        head.parameters(), max_iter=LBFGS_ITERATIONS, line_search_fn="strong_wolfe"
    )

    def loss() -> Tensor:
        optimizer.zero_grad()
        # the bias is not penalised
        penalty = strength / 2 * head.weight.square().sum()
        total = F.cross_entropy(head(inputs), targets) + penalty
        total.backward()
        return total

    optimizer.step(loss)
