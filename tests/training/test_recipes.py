"""Every recipe runs on a folder of images, and has the settings that its figures were made with."""

import json
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

import vitkit
from vitkit import TrainConfig
from vitkit.training.config.merging import layered
from vitkit.training.recipes import RECIPES, recipe_settings

REFERENCES = sorted((Path(__file__).parents[2] / "benchmarks" / "results").glob("reference-*.json"))
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
        assert "Command:" in recipe["about"], name
        assert f"--recipe {name}" in recipe["about"], name
        assert "Expected:" in recipe["about"], name


@pytest.mark.parametrize("file", REFERENCES, ids=lambda file: file.stem)
def test_a_reference_result_has_the_settings_of_its_recipe(file):
    """A recipe that was changed needs a new reference result: `benchmarks/recipes.py NAME`."""
    stored = json.loads(file.read_text())
    given = layered({"data": "-"}, recipe_settings(stored["recipe"]))
    config = TrainConfig(**given).to_json()
    assert len(stored["curve"]) == stored["settings"]["epochs"]
    for name in given.keys() - {"data", "recipe", "amp"}:
        assert stored["settings"][name] == config[name], name
