"""Turns, ratios and their intervals, with samples whose statistics are known."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from vitkit.benchmarking.statistics import per_second, speed_ratio, turn_order


def test_each_round_goes_forwards_and_backwards_and_all_pairs_are_equally_far_apart():
    names = ["base", "a", "b", "c", "base, again"]
    turns = list(turn_order(names, 400))
    apart: dict[tuple[str, str], list[int]] = {}
    before_itself = dict.fromkeys(names, 0)
    for start in range(0, len(turns), 10):
        order = turns[start : start + 5]
        assert sorted(order) == sorted(names)
        assert turns[start + 5 : start + 10] == order[::-1]
        before_itself[order[-1]] += 1
        for one, other in itertools.combinations(names, 2):
            distance = abs(order.index(one) - order.index(other))
            apart.setdefault((one, other), []).append(distance)
    # of five in a random order two are (5 + 1) / 3 apart
    assert [np.mean(distances) for distances in apart.values()] == pytest.approx([2] * 10, abs=0.2)
    assert list(before_itself.values()) == pytest.approx([80] * 5, abs=30)
    assert turns == list(turn_order(names, 400))


def test_a_ratio_is_that_of_the_medians_and_above_one_for_what_is_faster():
    ours, base = [0.9, 1.0, 1.1, 50.0, 1.0], [1.9, 2.0, 2.1, 2.0, 90.0]
    assert speed_ratio(ours, base).value == 2.0
    assert speed_ratio(base, ours).value == 0.5
    assert speed_ratio(ours, base) == speed_ratio(ours, base)


def test_without_spread_the_interval_is_a_point():
    assert speed_ratio([0.5] * 14, [1.5] * 14) == (3.0, 3.0, 3.0)
    assert per_second([0.25] * 14, 8) == (32.0, 32.0, 32.0)


def test_the_interval_of_a_median_is_the_one_of_order_statistics():
    """Its coverage is known without any bootstrap: binomial probabilities of ranks."""
    seconds = 1 / np.arange(1.0, 102.0)
    low, high = per_second(list(seconds), 1.0)[1:]
    # of 101 values the median lies between the 41st and the 61st with 95 %
    assert low == pytest.approx(41, abs=2)
    assert high == pytest.approx(61, abs=2)


def test_intervals_of_equal_speeds_hold_one_and_of_others_do_not():
    draw = np.random.default_rng(7)
    held = 0
    for _ in range(60):
        first, second = np.exp(0.05 * draw.standard_normal((2, 14)))
        held += speed_ratio(list(first), list(second)).contains(1.0)
        assert not speed_ratio(list(first), list(1.5 * second)).contains(1.0)
    assert held >= 50  # 95 % of 60 is 57


def test_more_turns_give_a_narrower_interval():
    draw = np.random.default_rng(0)
    few, many = np.exp(0.1 * draw.standard_normal(8)), np.exp(0.1 * draw.standard_normal(200))
    wide, narrow = speed_ratio(list(few), [1.0] * 8), speed_ratio(list(many), [1.0] * 8)
    assert narrow.high - narrow.low < wide.high - wide.low
