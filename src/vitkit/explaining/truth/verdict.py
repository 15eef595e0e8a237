"""The verdict on a map: better than chance, no better, or too few patches to tell."""

from __future__ import annotations

import math
from typing import Literal, TypeAlias

import numpy as np
from jaxtyping import Float

from vitkit.evaluation.mcnemar import SIGNIFICANCE_LEVEL
from vitkit.explaining.truth.statistics import chance_p

Verdict: TypeAlias = Literal[
    "better than chance",
    "no better than chance",
    "too few patches to tell",
    "too few images to tell",
]
ROUNDING = 1e-6
"""Probabilities that differ by less count as equal: the same patches in another batch do."""


def verdict_of_map(value: float, random: Float[np.ndarray, " n"], patches: int) -> Verdict:
    """Return whether the order of a map is better than random orders, if that can be seen at all.

    With few patches, random orders are often the best order itself, so that even the best map has
    a p-value above the threshold of 0.05: n random orders hold it n / patches! times on average.
    The same is true where no random order is better than the map's but some are as good.

    Args:
        value: insertion minus deletion in the order of the map; larger means better.
        random: the same of n random orders.
        patches: of the image.

    >>> verdict_of_map(0.5, np.linspace(-0.4, 0.4, 20), patches=64)
    'better than chance'
    >>> verdict_of_map(0.3, np.linspace(-0.4, 0.4, 20), patches=64)
    'no better than chance'
    >>> verdict_of_map(0.4, np.linspace(-0.4, 0.4, 20), patches=4)
    'too few patches to tell'
    """
    if chance_p(value, random) < SIGNIFICANCE_LEVEL:
        return "better than chance"
    # `math.factorial` is exact; a quotient too small for a float is 0
    expected = (1 + len(random) / math.factorial(patches)) / (1 + len(random))
    equal = np.abs(random - value) <= ROUNDING
    # where all are equal, no order matters to the model
    as_good = equal.any() and not equal.all() and not (random > value + ROUNDING).any()
    if expected >= SIGNIFICANCE_LEVEL or as_good:
        return "too few patches to tell"
    return "no better than chance"


def verdict_of_method(p: float, differences: Float[np.ndarray, " n"]) -> Verdict:
    """Return whether the maps of a method are better than chance, if there are images enough.

    Args:
        p: of the paired permutation test of the differences.
        differences: insertion minus deletion of n images; those that are 0 prove nothing, and the
            others have 2^n assignments of signs.

    >>> verdict_of_method(1 / 16, np.array([0.2, 0.4, 0.1, 0.3]))
    'too few images to tell'
    """
    if p < SIGNIFICANCE_LEVEL:
        return "better than chance"
    # without any difference, no patch of any image matters to the model
    count = int((np.abs(differences) > ROUNDING).sum())
    if len(differences) and 0.5 ** (count or len(differences)) >= SIGNIFICANCE_LEVEL:
        return "too few images to tell"
    return "no better than chance"
