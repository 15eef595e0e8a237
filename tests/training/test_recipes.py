"""Every recipe runs on a folder of images; a reference result tells if a run keeps up with it."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

import vitkit
from vitkit.training.config.merging import layered
from vitkit.training.config.run_config import USUAL, RunConfig
from vitkit.training.config.train_config import TrainConfig
from vitkit.training.recipes import RECIPES, recipe_settings
from vitkit.training.recipes.reference_comparison import (
    EARLY,
    SLACK,
    ReferenceMonitor,
    ReferenceResult,
    reference_result,
)

SMALL = {"width": 48, "depth": 1, "num_heads": 3, "mlp_width": 48}
"""Fields that make any of the models quick."""
LATE = ("finetune-sgd",)
"""Recipes whose warm-up is shorter than an epoch."""
STARTS = ("finetune", "finetune-sgd", "linear-probe")
QUICK = {
    "batch_size": 16, "epochs": 1, "amp": "off", "device": "cpu", "workers": 0,
    "quiet": True, "log_examples": False, "log_histograms": False, "plots": False, "report": False,
}  # fmt: skip


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """200 images of four colours, 40 x 36 pixels."""
    root, draw = tmp_path_factory.mktemp("images"), np.random.default_rng(0)
    for number in range(200):
        folder = root / "images" / ["red", "green", "blue", "grey"][number % 4]
        folder.mkdir(parents=True, exist_ok=True)
        pixels = draw.integers(0, 80, (36, 40, 3), dtype=np.uint8)
        pixels[..., [number % 4] if number % 4 < 3 else slice(None)] += np.uint8(150)
        Image.fromarray(pixels).save(folder / f"{number}.png")
    return root / "images"


@pytest.fixture(scope="module")
def weights(images: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of these four classes, to start or to learn from."""
    spec = SMALL | {"image_size": 32, "patch_size": 8}
    output = str(tmp_path_factory.mktemp("weights") / "run")
    return vitkit.train(str(images), **QUICK | {"spec": spec, "output": output}).best


@pytest.mark.parametrize("recipe", RECIPES)
def test_every_recipe_runs_on_a_folder_of_images(recipe, images, weights, tmp_path):
    settings: dict[str, object] = {"output": str(tmp_path / "run")}
    if recipe in STARTS:
        settings |= {"pretrained": str(weights)}
    else:
        settings |= {"spec": SMALL | {"image_size": 32, "patch_size": 8}, "max_steps": 3}
    if recipe == "distil":
        settings |= {"teacher": str(weights)}
    if recipe == "plain-vit-s16-90ep":
        settings["spec"] |= {"positions": "sincos_2d"}
    result = vitkit.train(str(images), recipe=recipe, **QUICK | settings)
    stored = vitkit.load(result.last).metadata["recipe"]
    expected = layered(recipe_settings(recipe), QUICK)
    assert {name: stored[name] for name in QUICK} == QUICK
    assert stored["warmup_epochs"] == (
        expected.get("warmup_epochs", 1.0) if recipe in LATE else 0.1
    )
    for name in expected.keys() - {"spec", "model", "mean", "std", "warmup_epochs"}:
        value = TrainConfig(**{"data": "-", name: expected[name]}).to_json()[name]
        assert stored[name] == value, name


@pytest.mark.soak
@pytest.mark.parametrize("recipe", ["vit-paper", "deit", "deit3", "plain-vit-s16-90ep", "augreg"])
def test_recipes_for_a_million_images_take_twenty_steps_at_full_size(recipe, images, tmp_path):
    settings = {"batch_size": 4, "max_steps": 20, "output": str(tmp_path / "run")}
    result = vitkit.train(str(images), recipe=recipe, **QUICK | settings)
    log = (result.run / "train.log").read_text()
    assert f"recipe {recipe}" in log
    assert result.stopped == "20 steps"


def test_a_recipe_of_a_paper_says_where_its_score_comes_from():
    for name, recipe in RECIPES.items():
        text = recipe.__doc__ or ""
        assert "Command:" in text, name
        assert "Expected:" in text or reference_result(name) is not None, name
        if recipe.__module__.endswith((".imagenet", ".transfer")):
            assert "Paper:" in text, name


@pytest.fixture
def reference() -> ReferenceResult:
    curve = tuple((0.5 + 0.04 * n, 0.52 + 0.04 * n) for n in range(10))
    return ReferenceResult(
        recipe="digits", command="vitkit train digits --recipe digits", hardware="two cores",
        date="2026-11-21", seconds=(50.0, 60.0), images=1000, test=(0.9, 0.92),
        curve=curve, settings=TrainConfig(data="digits").to_json() | USUAL,
    )  # fmt: skip


def watched(
    reference: ReferenceResult, scores: list[float], images: int = 1000, **settings: object
):
    config = RunConfig(**{"data": "digits"} | USUAL | settings)
    monitor = ReferenceMonitor(reference, config.to_json(), images)
    best = np.maximum.accumulate(scores).tolist()
    lines = []
    for epoch, score in enumerate(scores, 1):
        validation = {"top1": score, "images": 1e6}
        lines.append(monitor.after_epoch(epoch, validation, best[epoch - 1], 0))
    return lines


def test_a_run_is_behind_when_it_is_below_the_worst_seed_and_its_slack(reference: ReferenceResult):
    low = [low for low, _ in reference.curve]
    assert watched(reference, low) == [None] * 10
    assert watched(reference, [x - 0.9 * SLACK for x in low]) == [None] * 10
    lines = watched(reference, [x - 1.1 * SLACK for x in low])
    assert (
        "behind the reference runs of digits: best validation top-1 0.4890 by epoch 1" in lines[0]
    )
    assert lines[1:] == [None] * 9, "it is logged once"


def test_one_bad_epoch_or_few_images_make_no_run_late(reference: ReferenceResult):
    low = [low for low, _ in reference.curve]
    ahead = [x + 0.04 for x in low]
    assert watched(reference, [*ahead[:5], 0.1, *ahead[6:]]) == [None] * 10
    monitor = ReferenceMonitor(reference, TrainConfig(data="digits", epochs=10).to_json(), 1000)
    for images, late in ((144.0, False), (10_000.0, True)):
        line = monitor.after_epoch(1, {"top1": 0.45, "images": images}, 0.45, 0)
        assert bool(line) is late, "2 deviations are 0.12 and 0.014"


def test_a_run_that_has_caught_up_logs_it(reference: ReferenceResult):
    line = watched(reference, [0.3, 0.3, 0.9])[2]
    assert line == "level with the reference runs of digits again after epoch 3"


def test_the_likely_cause_is_few_images_then_settings_then_labels(reference: ReferenceResult):
    (few,) = watched(reference, [0.1], images=100)
    assert "100 training images instead of 1,000" in (few or "")
    (other,) = watched(reference, [0.1], lr=0.5, workers=2, seed=3)
    assert (other or "").endswith("likely: lr 0.5 instead of 0.001")
    (field,) = watched(reference, [0.1], spec={"mlp_dropout": 0.9})
    assert (field or "").endswith("likely: spec.mlp_dropout 0.9 instead of the model's own")
    (same,) = watched(reference, [0.1])
    assert "vitkit check DATA" in (same or "")
    older = {name: value for name, value in reference.settings.items() if name != "balance"}
    (same,) = watched(replace(reference, settings=older), [0.1])
    assert "vitkit check DATA" in (same or ""), "a setting that there was not is as usual"


def test_a_longer_run_is_compared_at_the_same_share_of_its_epochs(reference: ReferenceResult):
    scores = [reference.curve[max(1, round(n / 2)) - 1][0] for n in range(1, 21)]
    assert watched(reference, scores, epochs=20) == [None] * 20
    assert EARLY > 1 / 20, "the first epoch of twenty says nothing yet"


def test_reference_results_belong_to_recipes_and_have_their_settings():
    """A recipe that was changed needs a new reference result: `benchmarks/recipes.py NAME`."""
    folder = Path(vitkit.__file__).parent / "training" / "recipes" / "reference_results"
    files = sorted(folder.glob("*.json"))
    assert files
    for file in files:
        stored = json.loads(file.read_text())
        recipe = file.stem
        result = reference_result(recipe)
        assert result is not None
        assert stored["recipe"] == recipe
        assert len(result.curve) == result.settings["epochs"]
        config = TrainConfig(**layered({"data": "-"}, recipe_settings(recipe))).to_json()
        given = layered({"data": "-"}, recipe_settings(recipe))
        for name in given.keys() - {"data", "recipe"}:
            if name != "amp":
                assert result.settings[name] == config[name], (recipe, name)


def test_a_run_with_a_reference_result_says_what_to_expect(tmp_path):
    mine = tmp_path / "mine.yaml"
    mine.write_text("recipe: digits\nepochs: 6\nwarmup_epochs: 1.0\n")
    assert reference_result(str(mine)) == reference_result("digits") is not None
    assert reference_result(str(tmp_path / "gone.yaml")) is None
    run = vitkit.train(
        "digits", recipe=str(mine), lr=2e-5, max_steps=25, output=str(tmp_path / "run"),
        quiet=True, device="cpu", log_examples=False, log_histograms=False, plots=False,
        report=False,
    ).run  # fmt: skip
    log = (run / "train.log").read_text()
    assert "reference runs of digits: test top-1" in log
    assert "behind the reference runs of digits" in log
    assert "lr 2e-05 instead of 0.004" in log
    run = vitkit.train(
        "digits", recipe="digits", val_fraction=0.0, max_steps=1, output=str(tmp_path / "all"),
        quiet=True, device="cpu", plots=False, report=False,
    ).run  # fmt: skip
    log = (run / "train.log").read_text()
    assert "reference runs" not in log, "they had a validation split, so fewer images"
