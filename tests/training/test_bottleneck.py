"""The diagnosis of a run that waits for images, and what would help."""

from __future__ import annotations

import os
import re
import time
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from training.logged_runs import train

from vitkit.training.monitoring.bottleneck import ImageCost, Machine, diagnose
from vitkit.training.monitoring.throughput import TimingSnapshot


def pace(waiting: float, working: float, cores: float, batch: int = 100) -> TimingSnapshot:
    """Make the timing of ten steps from seconds per step."""
    return TimingSnapshot(
        10 * (waiting + working), 10, 10 * batch, 10 * waiting, 10 * working, 10 * cores
    )


CASES = {
    # A device of its own: 100 images of 8 ms in 0.1 s need 8 workers; that is 0.9 core-seconds,
    # a step of 0.1 s on 16 cores.
    "many cores": (pace(0.7, 0.1, 0.1), ImageCost(6e-3, 2e-3, 0.0), Machine(16, 1, True),
                   "with --workers 8 a step would take about 0.10 s"),
    # Two cores, and a model on the processor that uses both: 0.5 + 0.6 core-seconds on 2 cores.
    "two cores": (pace(0.6, 0.25, 0.5), ImageCost(1e-3, 5e-3, 0.0), Machine(2, 0),
                  "with --workers 2 a step would take about 0.55 s"),
    # The same with the two workers: the prediction has come true, and is all there is.
    "no cure": (pace(0.15, 0.4, 0.5), ImageCost(1e-4, 59e-4, 0.0), Machine(2, 2),
                "the 2 cores are always busy, so that more workers would not help"),
    "one core": (pace(0.6, 0.5, 0.5), ImageCost(1e-4, 59e-4, 0.0), Machine(1, 0),
                 "the core is always busy, so that more workers would not help"),
    # Nothing to compute, and still a long wait.
    "slow disk": (pace(0.8, 0.1, 0.1), ImageCost(0.0, 1e-4, 0.0), Machine(16, 4, True),
                  "limited by disk or network: the cores are not busy"),
    # Decoding is nearly all of it, and both cores are busy.
    "decoding": (pace(0.55, 0.25, 0.5), ImageCost(10e-3, 1e-3, 0.0), Machine(2, 2),
                 "with --cache (no decoding) a step would take about 0.30 s"),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_the_cure_follows_from_what_was_measured(name):
    found, cost, machine, cure = CASES[name]
    assert diagnose(found, cost, machine).endswith(cure)


def large_images(place: Path) -> Path:
    """Write 64 PNGs of 300 x 300: slow to decode compared to a tiny model."""
    noise = np.random.default_rng(0).integers(0, 256, (64, 300, 300, 3), dtype=np.uint8)
    for number, pixels in enumerate(noise):
        folder = place / "train" / ("low", "high")[number % 2]
        folder.mkdir(parents=True, exist_ok=True)
        Image.fromarray(pixels).save(folder / f"{number}.png", compress_level=1)
    return place


def diagnosed(run: Path) -> str:
    (line,) = [line for line in (run / "train.log").read_text().splitlines() if "after 30" in line]
    return line


@pytest.mark.parametrize("cores", [1, 4])
def test_a_run_that_waits_for_images_says_so_and_what_would_help(tmp_path, monkeypatch, cores):
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(cores)))
    data = str(large_images(tmp_path / "data"))
    few = {"batch_size": 4, "max_steps": 31, "workers": 0, "log_examples": False}
    line = diagnosed(train(tmp_path / "run", data=data, **few).run)
    assert "of it waiting for images (" in line
    assert ("--workers" in line) == (cores == 4)
    assert cores == 4 or "; with --cache" in line  # decoding is most of it


def test_a_run_that_hardly_waits_says_so(tmp_path):
    """As the test above, with images in memory and a larger model."""
    larger = {"spec": {"depth": 2, "width": 64, "patch_size": 1}, "batch_size": 32, "max_steps": 31}
    line = diagnosed(train(tmp_path / "run", **larger).run)
    (share,) = re.findall(r"(\d+)\s?%", line.partition("after 30 steps")[2])[:1]
    assert int(share) < 50
    assert "--cache" not in line


def slow(image):
    """A transform that takes two milliseconds of the processor."""
    end = time.thread_time() + 2e-3
    while time.thread_time() < end:
        pass
    return image


def test_a_slow_transform_of_the_users_is_part_of_the_augmentation(tmp_path):
    few = {"batch_size": 8, "max_steps": 31, "workers": 0, "log_examples": False}
    transform = f"{__name__}:slow"
    line = diagnosed(train(tmp_path / "run", transform=transform, **few).run)
    (augmentation,) = re.findall(r"augmentation ([\d.]+) ms", line)
    assert float(augmentation) >= 2
    assert "disk or network" not in line


def test_a_time_just_below_a_tenth_of_a_second_is_a_plain_number():
    line = diagnose(pace(0.0, 0.0997, 0.0997), None, Machine(2, 0))
    assert line.startswith("after 30 steps: 0.10 s per step, ")
