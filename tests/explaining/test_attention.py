"""Where a model looks: maps laid on the right part of the image."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from noise import fill_with_noise
from own_methods import METHODS

import vitkit
from vitkit import cli
from vitkit.data.images.preprocess import preprocess_images, viewport
from vitkit.explaining.explanation import heatmap_over


def model(**fields) -> vitkit.ViT:
    vit = vitkit.ViT(
        vitkit.ViTSpec(
            image_size=(16, 24), patch_size=8, width=16, depth=2, num_heads=4, mlp_width=16,
            num_classes=3, **fields
        )
    )  # fmt: skip
    fill_with_noise(vit, std=0.6)
    return vit


def test_a_heat_map_lies_where_its_patch_is():
    grid = torch.zeros(2, 3)
    grid[0, 1] = 1.0
    heat = heatmap_over(grid, (20, 30), (0.0, 0.0, 20.0, 30.0))
    assert heat.shape == (20, 30)
    assert (heat.min(), heat.max()) == (0.0, 1.0)
    row, column = np.unravel_index(heat.argmax(), heat.shape)
    assert row < 10
    assert 10 <= column < 20
    assert heat[15, 5] == 0.0


def test_a_centre_crop_leaves_the_rest_of_the_image_cold():
    preprocess = vitkit.Preprocess(image_size=16, crop_ratio=0.5)
    size = (40, 100)
    view = viewport(size, preprocess)
    heat = heatmap_over(torch.ones(2, 2) + torch.eye(2), size, view)
    top, left, height, width = (round(v) for v in view)
    assert (height, width) == (20, 20)
    inside = heat[top : top + height, left : left + width]
    assert inside.max() == 1.0
    assert heat.sum() == inside.sum()


def test_a_flat_map_is_cold_everywhere():
    assert heatmap_over(torch.full((2, 2), 0.25), (8, 8), (0.0, 0.0, 8.0, 8.0)).max() == 0.0


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory) -> vitkit.weights.checkpoint.Checkpoint:
    preprocess = vitkit.Preprocess(image_size=(16, 24), fit="squash")
    path = tmp_path_factory.mktemp("m") / "m.safetensors"
    vitkit.save(path, model(), preprocess=preprocess, classes=("ant", "bee", "cat"))
    return vitkit.load(path)


def test_explain_gives_the_map_the_prediction_and_an_image_of_both(checkpoint, tmp_path):
    image = np.random.default_rng(0).integers(0, 256, (50, 60, 3), dtype=np.uint8)
    made = vitkit.explain(checkpoint, image, method="attention")
    assert made.heatmap.shape == (50, 60)
    (prediction,) = vitkit.Predictor.from_checkpoint(checkpoint)([image])
    assert (made.label, made.probability) == (prediction.label, prediction.probability)
    images = preprocess_images([image], checkpoint.preprocess)
    grid = METHODS["attention"].compute(checkpoint.model, images)[0]
    expected = heatmap_over(grid, (50, 60), (0.0, 0.0, 50.0, 60.0))
    np.testing.assert_array_equal(made.heatmap, expected)
    overlay = np.asarray(made.overlay())
    assert min(overlay.shape[:2]) >= 224  # small images are enlarged for people
    made.save(tmp_path / "a" / "out.png")
    with pytest.raises(vitkit.OutputError, match=r"ends in \.png"):
        made.save(tmp_path / "out.jpg")
    with pytest.raises(vitkit.SettingError, match=r"exist .did you mean 'attention'"):
        vitkit.explain(checkpoint, image, method="atention")


def test_the_overlay_is_hotter_where_the_map_is():
    heat = np.zeros((300, 300), np.float32)
    heat[100:200, 100:200] = 1.0
    grey = np.full((300, 300, 3), 90, np.uint8)
    mixed = np.asarray(vitkit.Explanation(grey, heat).overlay()).astype(int)
    assert mixed[150, 150].sum() > 1.5 * mixed[20, 20].sum()
    assert (mixed[20, 20] > 60).all()  # cold parts stay readable
    for wrong in (-0.1, 1.5, float("nan")):
        with pytest.raises(vitkit.SettingError, match=r"strength = .*: must be from 0 to 1"):
            vitkit.Explanation(grey, heat).overlay(wrong)


def test_the_api_and_the_command_offer_the_methods_of_one_registry(capsys):
    assert cli.run(["explain", "--help"]) == 0
    help_text = capsys.readouterr().out
    for name in METHODS:
        assert name in help_text
    with pytest.raises(vitkit.SettingError, match=f"methods are {', '.join(METHODS)}"):
        vitkit.explain("no.safetensors", "no.png", method="no-such-method")
