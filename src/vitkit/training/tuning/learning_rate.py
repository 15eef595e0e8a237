"""Find a learning rate by a range test: a short run whose learning rate rises."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, field
from typing import NamedTuple

from vitkit.errors import NonFiniteError
from vitkit.models.vit import ViT
from vitkit.training.run_plan import Plan
from vitkit.training.tuning.trial import preserve_generators, trial

LOWEST, HIGHEST = 1e-6, 10.0
"""Range of the learning rates that are tried."""
STEPS = 100
"""Steps of the trial; each learning rate is a constant factor above the one before."""
MOMENTUM = 0.8
"""Weight of the earlier steps in the moving average of the loss."""
DIVERGED = 2.0
"""The trial ends when the loss is this many times its minimum."""
SAFETY = 10.0
"""The learning rate of the lowest loss is divided by this."""


@dataclass
class _RangeTest:
    """The losses and rates of a range test.

    Attributes:
        first_loss: loss of the first step.
        lowest_loss: lowest moving average of the loss.
        best_rate: learning rate of the lowest loss.
        highest_rate: highest learning rate that was tried.
        rates: learning rates of the steps, increasing.
        losses: moving average of the loss after each of them.
    """

    first_loss: float = math.nan
    lowest_loss: float = math.inf
    best_rate: float = LOWEST
    highest_rate: float = LOWEST
    rates: list[float] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)


class FoundRate(NamedTuple):
    """The result of the search for a learning rate.

    Attributes:
        lr: the learning rate, to two digits.
        line: a line on the trial.
        rates: the rates that were tried, increasing.
        losses: the moving average of the training loss at each of them.
        lowest: the rate of the lowest loss.
    """

    lr: float
    line: str
    rates: list[float]
    losses: list[float]
    lowest: float


def find_lr(plan: Plan, model: ViT) -> FoundRate:
    """Return a tenth of the learning rate at which the loss of a range test is lowest.

    The range test of Smith, "Cyclical Learning Rates for Training Neural Networks" (arXiv
    1506.01186), Sec. 3.3, with learning rates that grow by a constant factor. The tenth is fastai's
    rule, because the loss is lowest just before it diverges. The loss is a moving average.

    Args:
        plan: plan of the run.
        model: freshly initialised, on the plan's device; it is not changed.

    Raises:
        NonFiniteError: the loss or its gradient is not a finite number, whatever the rate.
    """
    start = time.monotonic()
    with preserve_generators(plan.device):
        test = _run_range_test(plan, model)
    if not test.rates:
        raise NonFiniteError(
            "--find-lr: the loss or its gradient is not a finite number, even at the rate "
            f"{LOWEST:g}; check --loss and the weights, or pass --amp off"
        )
    lr = float(f"{test.best_rate / SAFETY:.1e}")
    seconds = time.monotonic() - start
    line = (
        f"lr: {lr:g} (the loss fell from {test.first_loss:.4g} to {test.lowest_loss:.4g} at "
        f"{test.best_rate:.2g}; rates tried up to {test.highest_rate:.2g}, in {seconds:.0f} s)"
    )
    return FoundRate(lr, line, test.rates, test.losses, test.best_rate)


def _run_range_test(plan: Plan, model: ViT) -> _RangeTest:
    """Train a copy of the model with rising learning rates, until the loss diverges."""
    test = _RangeTest()
    step = trial(plan, model)
    mean = 0.0
    for number in range(STEPS):
        # a geometric series from the lowest to the highest
        rate = LOWEST * (HIGHEST / LOWEST) ** (number / (STEPS - 1))
        test.highest_rate = rate
        step.set_learning_rate(rate)
        result = step(plan.steps[number % plan.total_steps], number)
        if result.bad is not None:  # not a finite number: it has diverged
            break
        mean = MOMENTUM * mean + (1 - MOMENTUM) * result.loss
        # Without this correction the average of the first steps would be near 0, as in Adam.
        smoothed = mean / (1 - MOMENTUM ** (number + 1))
        test.rates.append(rate)
        test.losses.append(smoothed)
        if number == 0:
            test.first_loss = smoothed
        if smoothed > DIVERGED * test.lowest_loss:
            break
        if smoothed < test.lowest_loss:
            test.lowest_loss = smoothed
            test.best_rate = rate
    return test
