"""Permutation tests are exact, never 0, uniform under the null; ranks are scipy's."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest

from vitkit.explaining.truth.statistics import (
    average_ranks,
    chance_p,
    paired_permutation,
    spearman,
)


@pytest.mark.parametrize("count", [1, 2, 5, 9])
def test_few_pairs_are_enumerated(count):
    values = np.random.default_rng(count).normal(0.4, 1, count)
    least = values.sum()
    sums = [sum(s * v for s, v in zip(signs, values, strict=True))
            for signs in product((1, -1), repeat=count)]  # fmt: skip
    expected = sum(total >= least - 1e-9 for total in sums) / 2**count
    assert paired_permutation(values) == expected


def test_many_pairs_come_close_to_the_enumeration():
    values = np.random.default_rng(3).normal(0.3, 1, 16)
    signs = np.array(list(product((1, -1), repeat=16)))
    exact = (signs @ values >= values.sum() - 1e-9).mean()
    assert 0.01 < exact < 0.5
    assert paired_permutation(values) == pytest.approx(exact, abs=0.02)
    assert paired_permutation(values, seed=1) == paired_permutation(values, seed=1)
    assert paired_permutation(values, seed=1) != paired_permutation(values, seed=2)


def test_p_is_uniform_where_there_is_nothing():
    generator = np.random.default_rng(0)
    found = [paired_permutation(generator.normal(size=30), seed=i, draws=199) for i in range(300)]
    shares = [np.mean(np.array(found) <= level) for level in (0.05, 0.25, 0.5, 0.75)]
    assert shares == pytest.approx([0.05, 0.25, 0.5, 0.75], abs=0.08)


def test_p_is_never_0():
    assert paired_permutation(np.ones(40)) == 1 / 10_000
    assert paired_permutation(np.ones(10)) == 2**-10
    assert paired_permutation(-np.ones(10)) == 1
    assert paired_permutation([]) == 1
    assert paired_permutation(np.zeros(5)) == 1  # no difference at all
    assert chance_p(2.0, np.zeros(20)) == 1 / 21
    assert chance_p(0.0, np.zeros(20)) == 1  # as good as chance


def test_ranks_and_correlation_with_ties_are_scipy_s():
    stats = pytest.importorskip("scipy.stats")
    generator = np.random.default_rng(0)
    for levels in (2, 5, 1000):
        first, second = generator.integers(0, levels, (2, 40)).astype(float)
        np.testing.assert_allclose(average_ranks(first), stats.rankdata(first))
        expected = stats.spearmanr(first, second).statistic
        assert spearman(first, second) == pytest.approx(expected, abs=1e-12)
    assert np.isnan(spearman(np.zeros(4), np.arange(4.0)))
    assert spearman(np.arange(4.0), -np.arange(4.0)) == -1
