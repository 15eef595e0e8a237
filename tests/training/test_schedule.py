"""The learning rate as a function of the step."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest

from vitkit import SettingError
from vitkit.training.config.train_config import TrainConfig
from vitkit.training.optimization.parameters import learning_rate
from vitkit.training.plan import make_plan

PEAK, LOW, WARMUP, TOTAL = 0.4, 0.1, 4, 16


def rates(schedule: str, low: float = LOW) -> list[float]:
    return [learning_rate(s, schedule, peak=PEAK, low=low, warmup=WARMUP, total=TOTAL)
            for s in range(TOTAL)]  # fmt: skip


@pytest.mark.parametrize("schedule", ["cosine", "linear", "constant", "rsqrt"])
def test_every_schedule_rises_linearly_to_its_peak(schedule):
    assert rates(schedule)[:WARMUP] == pytest.approx([0.1, 0.2, 0.3, 0.4])


def test_what_comes_after_the_peak():
    t = [n / 12 for n in range(1, 13)]
    assert rates("cosine")[WARMUP:] == pytest.approx(
        [LOW + (PEAK - LOW) * 0.5 * (1 + math.cos(math.pi * x)) for x in t]
    )
    assert rates("linear")[WARMUP:] == pytest.approx([PEAK - 0.3 * x for x in t])
    assert rates("constant")[WARMUP:] == [PEAK] * 12
    assert rates("rsqrt")[WARMUP:] == pytest.approx([PEAK * 2 / n**0.5 for n in range(5, 17)])
    assert rates("rsqrt", low=0.3)[-1] == 0.3


def test_the_reciprocal_root_does_not_look_at_the_end_and_needs_a_warm_up():
    short = learning_rate(9, "rsqrt", peak=PEAK, low=0.0, warmup=4, total=10)
    assert short == learning_rate(9, "rsqrt", peak=PEAK, low=0.0, warmup=4, total=1000)
    with pytest.raises(SettingError, match="pass --warmup-epochs above 0"):
        make_plan(TrainConfig(data="digits", sched="rsqrt", warmup_epochs=0.0))


def test_without_warm_up_the_first_step_is_at_the_peak_and_the_last_at_the_lowest():
    rates = [learning_rate(s, peak=PEAK, low=1e-5, warmup=0, total=TOTAL) for s in range(TOTAL)]
    assert rates[0] == PEAK
    assert rates[-1] == pytest.approx(1e-5)
    assert all(earlier > later for earlier, later in pairwise(rates))
    assert learning_rate(0, peak=PEAK, low=0.0, warmup=0, total=1) == PEAK


@pytest.mark.parametrize(
    ("settings", "message"),
    [({"epochs": 1, "warmup_epochs": 0.95}, "--warmup-epochs 0.95 covers all 6 steps of the run"),
     ({"sched": "rsqrt", "warmup_epochs": 0.05}, "0.05 of 6 steps per epoch rounds to none; "
      "raise it to 0.17 or more")],
)  # fmt: skip
def test_a_warm_up_is_looked_at_in_steps(settings, message):
    with pytest.raises(SettingError, match=message):
        make_plan(TrainConfig(data="digits", batch_size=200, device="cpu", **settings))


def test_the_learning_rate_rises_to_its_peak_and_ends_at_its_low():
    rates = [learning_rate(s, peak=1e-3, low=1e-5, warmup=10, total=100) for s in range(100)]
    assert rates[0] == pytest.approx(1e-4)
    assert rates[9] == pytest.approx(1e-3)
    assert rates[-1] == pytest.approx(1e-5)
    assert max(rates) == rates[9]
    assert all(b < a for a, b in pairwise(rates[9:]))
    middle = learning_rate(54, peak=1e-3, low=1e-5, warmup=10, total=100)
    assert middle == pytest.approx((1e-3 + 1e-5) / 2, rel=1e-6)
