"""Permutation tests, rank correlation, and p-values that are never 0."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from jaxtyping import Float, Float64

EXACT_PAIRS = 14
"""Up to so many pairs, all 2^n assignments of signs are counted instead of random ones."""
DRAWS = 9_999
CHUNK = 1_000
"""Random assignments of signs that are in memory at a time."""


def paired_permutation(
    differences: Float[np.ndarray, " n"] | Sequence[float], *, seed: int = 0, draws: int = DRAWS
) -> float:
    """Return the one-sided p-value of the hypothesis that the mean difference is not above 0.

    If first and second of each pair could be exchanged, each difference could as well have the
    other sign (Fisher's randomisation test): p is the share of assignments of signs whose mean is
    at least that of the data. All are counted for up to `EXACT_PAIRS` pairs; else `draws` random
    ones and the data themselves: (1 + count) / (1 + draws).

    Args:
        differences: first minus second of each pair, (n,).
        seed: of the random assignments.
        draws: their number.

    Returns:
        p, in (0, 1]; 1 for no pairs.
    """
    values = np.asarray(differences, np.float64)
    if len(values) == 0:
        return 1.0
    # sums of the same numbers in another order differ in their last bits
    least = values.sum() - 1e-12 * np.abs(values).sum()
    if len(values) <= EXACT_PAIRS:
        numbers = np.arange(2 ** len(values))[:, None]
        signs = 1.0 - 2.0 * ((numbers >> np.arange(len(values))) & 1)
        return float((signs @ values >= least).mean())
    generator = np.random.default_rng(seed)
    count = 1
    for start in range(0, draws, CHUNK):
        size = (min(CHUNK, draws - start), len(values))
        signs = 1.0 - 2.0 * generator.integers(0, 2, size)
        count += int((signs @ values >= least).sum())
    return count / (1 + draws)


def chance_p(value: float, random: Float[np.ndarray, " n"]) -> float:
    """Return how often chance does as well: (1 + count of random values >= value) / (1 + n).

    The value itself counts as one of the draws, so p is never 0 ("Permutation P-values Should
    Never Be Zero", Phipson and Smyth 2010).

    Args:
        value: larger means better.
        random: the same statistic of n random orders.
    """
    return float((1 + (random >= value).sum()) / (1 + len(random)))


def average_ranks(values: Float[np.ndarray, " n"]) -> Float64[np.ndarray, " n"]:
    """Return ranks from 1; equal values share the mean of their ranks."""
    _, inverse, counts = np.unique(values, return_inverse=True, return_counts=True)
    last = np.cumsum(counts)  # the highest rank of each distinct value
    ranks: Float64[np.ndarray, " n"] = (last - (counts - 1) / 2)[inverse]
    return ranks


def spearman(first: Float[np.ndarray, " n"], second: Float[np.ndarray, " n"]) -> float:
    """Return Spearman's rank correlation with ties, in [-1, 1]: Pearson's of the average ranks.

    It is NaN where all values of one side are equal, as their order says nothing.
    """
    centred = []
    for values in (first, second):
        ranks = average_ranks(values)
        centred.append(ranks - ranks.mean())
    a, b = centred
    norm = np.sqrt((a @ a) * (b @ b))
    if norm == 0:
        return float("nan")
    return float(np.clip(a @ b / norm, -1, 1))


def kendall_tau(first: Sequence[float | None], second: Sequence[float | None]) -> float | None:
    """Return Kendall's tau-b of the pairs that have both values, in [-1, 1].

    The share of pairs of pairs in the same order minus that in the opposite one, corrected for
    ties. None for fewer than two pairs, or where all values of one side are equal.
    """
    pairs = [(a, b) for a, b in zip(first, second, strict=True) if a is not None and b is not None]
    if len(pairs) < 2:
        return None
    values = np.array(pairs, np.float64)
    signs = np.sign(values[:, None] - values[None, :])  # n n 2
    agreement = (signs[..., 0] * signs[..., 1]).sum()
    norm = np.sqrt((signs[..., 0] ** 2).sum() * (signs[..., 1] ** 2).sum())
    return float(agreement / norm) if norm else None


def mean_or_none(values: Sequence[float]) -> float | None:
    """Return the mean of the values that are numbers; None if there are none."""
    numbers = np.asarray(values, np.float64)
    numbers = numbers[~np.isnan(numbers)]
    return float(numbers.mean()) if len(numbers) else None


def median_or_none(values: Sequence[float | None]) -> float | None:
    """Return the median of the values that are not None; None if there are none."""
    numbers = [value for value in values if value is not None]
    return float(np.median(numbers)) if numbers else None
