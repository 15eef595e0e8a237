"""Runs with augmented, repeated and mixed images."""

from pathlib import Path

import pytest
from training.tiny_runs import end_of, run

import vitkit
from vitkit import SettingError, TrainConfig
from vitkit.training.plan import make_plan

EVERYTHING = {
    "aa": "rand-m9-mstd0.5-inc1", "color_jitter": 0.3, "reprob": 0.25, "mixup": 0.8, "cutmix": 1.0,
    "repeated_aug": 3, "save_every": 4, "batch_size": 128,
}  # fmt: skip


def test_a_stopped_run_ends_with_the_same_bits_and_nothing_touches_evaluation(tmp_path: Path):
    straight = run(tmp_path / "straight", epochs=2, max_steps=12, **EVERYTHING)
    run(tmp_path / "stopped", epochs=2, max_steps=7, **EVERYTHING)
    resumed = {"resume": str(tmp_path / "stopped"), "workers": 1}
    run(tmp_path / "stopped", epochs=2, max_steps=12, **EVERYTHING, **resumed)
    assert end_of(tmp_path / "stopped") == end_of(tmp_path / "straight")
    again = vitkit.evaluate(straight.best, "digits", split="val")
    for name in ("top1", "loss"):
        assert again[name] == pytest.approx(straight.metrics["val"][name], abs=1e-6)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"aa": "trivail"}, r"did you mean 'trivial'\?"),
        ({"aa": "rand-m99"}, "m must be from 0 to 30, got 99"),
        ({"mixup": 0.8, "batch_size": 4, "grad_accum_steps": 4},
         "micro-batch, and there is 1; raise"),
        ({"cutmix": 1.0, "batch_size": 1}, "micro-batch, and there is 1; raise --batch-size"),
        ({"repeated_aug": 8, "batch_size": 8}, "--repeated-aug 8 fills a whole batch of 8"),
    ],
)  # fmt: skip
def test_nonsense_is_refused_before_the_start(settings, message):
    with pytest.raises(SettingError, match=message):
        make_plan(TrainConfig(data="digits", device="cpu", **settings))


@pytest.mark.parametrize(
    "settings", [{"reprob": 1.5}, {"mixup": -0.1}, {"repeated_aug": 0}, {"color_jitter": 2.0}]
)
def test_a_setting_out_of_range_is_named(settings):
    with pytest.raises(SettingError, match=next(iter(settings))):
        TrainConfig(data="digits", **settings)
