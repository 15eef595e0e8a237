"""What is printed before the first step."""

import os

import numpy as np
from bad_images import photo

from vitkit import TrainConfig
from vitkit.training.plan import make_plan


def test_equal_files_stay_together_and_changed_copies_across_the_cut_are_reported(tmp_path):
    draw = np.random.default_rng(0)
    for name in ("cat", "dog"):
        (tmp_path / "train" / name).mkdir(parents=True)
        for number in range(6):
            image = photo(draw, (64, 64))
            for copy, quality in (("a", 95), ("b", 95), ("c", 70)):
                image.save(tmp_path / "train" / name / f"{number}{copy}.jpg", quality=quality)
    settings = {"data": str(tmp_path), "model": "vit_tiny_patch16_224", "batch_size": 4}
    plan = make_plan(TrainConfig(**settings, val_fraction=0.2))
    assert not any("also in train, pixel for pixel" in note for note in plan.notes)
    assert any("of val are nearly the same as in train" in note for note in plan.notes)
    assert abs(len(plan.dataset.splits["val"]) - 0.2 * 36) <= 2
    assert not any(
        "in train" in note for note in make_plan(TrainConfig(**settings, val_fraction=0)).notes
    )


def test_a_job_with_fewer_cores_than_the_machine_gets_fewer_workers(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: {0})
    plan = make_plan(TrainConfig(data="digits", workers=2))
    assert "--workers 2 on 1 core: fewer would be as fast" in plan.notes
