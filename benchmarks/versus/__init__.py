"""Speed of vitkit beside other libraries: the same weights, equal logits, in turn.

`python benchmarks/versus --help`. Here is what the other scripts use, too: turns in the order
A B B A, medians, and bootstrap intervals.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import numpy as np

RESAMPLES = 2_000
"""Bootstrap samples behind an interval."""
QUANTILES = (0.025, 0.975)
"""Ends of an interval that holds 95 %."""


class Interval(NamedTuple):
    """An estimate with its 95 % bootstrap interval."""

    value: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.value:.2f} x [{self.low:.2f}, {self.high:.2f}]"


def turn_order(names: Iterable[str], rounds: int) -> Iterator[str]:
    """Yield whose turn it is: in each round all names in a drawn order, then all in reverse.

    What drifts over a round, as the temperature of a processor does, then reaches all alike, and no
    name comes after the same one each time. The orders are the same in every call.
    """
    order = list(names)
    draw = random.Random(0)
    for _ in range(rounds):
        draw.shuffle(order)
        yield from order
        yield from reversed(order)


def speed_ratio(seconds: Sequence[float], base: Sequence[float]) -> Interval:
    """Return how many times as fast something is as a base: base's median over its own.

    The interval is that of the percentile bootstrap (Efron and Tibshirani, "An Introduction to the
    Bootstrap", 1993, chapter 13); both sides are drawn anew. It is the same in every call.

    Args:
        seconds: of a call, a number for each turn (N,).
        base: the same of the base (M,).
    """
    drawn = _medians(base, 0) / _medians(seconds, 1)
    low, high = np.quantile(drawn, QUANTILES)
    return Interval(float(np.median(base) / np.median(seconds)), float(low), float(high))


def per_second(seconds: Sequence[float], amount: int | float = 1.0) -> Interval:
    """Return how much is done in a second: an amount over the median time, with its interval."""
    low, high = np.quantile(amount / _medians(seconds, 1), QUANTILES)
    return Interval(amount / float(np.median(seconds)), float(low), float(high))


def _medians(samples: Sequence[float], stream: int) -> np.ndarray:
    """Return the medians of samples drawn with replacement; streams are independent."""
    values = np.asarray(samples, dtype=np.float64)
    size = (RESAMPLES, len(values))
    drawn = np.random.default_rng([0, stream]).choice(values, size)
    return np.asarray(np.median(drawn, axis=1))
