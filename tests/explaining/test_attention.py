"""Where a model looks: maps laid on the right part of the image."""

import numpy as np
import pytest
from noise import fill_with_noise
from own_methods import METHODS

import vitkit


def model(**fields) -> vitkit.ViT:
    vit = vitkit.ViT(
        vitkit.ViTSpec(
            image_size=(16, 24), patch_size=8, width=16, depth=2, num_heads=4, mlp_width=16,
            num_classes=3, **fields
        )
    )  # fmt: skip
    fill_with_noise(vit, std=0.6)
    return vit


def test_a_centre_crop_leaves_the_rest_of_the_image_cold(checkpoint):
    """Of 40 x 100 pixels, the middle 20 x 30 is seen: each of 2 x 3 patches is 10 x 10."""
    cropped = checkpoint.preprocess.replace(fit="crop", crop_ratio=0.5)
    seen = vitkit.Checkpoint(checkpoint.model, cropped, checkpoint.classes)
    image = np.random.default_rng(0).integers(0, 256, (40, 100, 3), dtype=np.uint8)
    made = vitkit.explain(seen, image, method="attention")
    inside = made.heatmap[10:30, 35:65]
    assert (inside.min(), inside.max()) == (0.0, 1.0)
    assert made.heatmap.sum() == inside.sum()
    hottest = np.array(np.unravel_index(inside.argmax(), inside.shape)) // 10
    assert tuple(hottest) == np.unravel_index(made.grid.argmax(), (2, 3))


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory) -> vitkit.Checkpoint:
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
    images = checkpoint.preprocess(image)[None]
    grid = METHODS["attention"].compute(checkpoint.model, images)[0]
    np.testing.assert_allclose(made.grid, grid, rtol=1e-5)
    overlay = np.asarray(made.overlay())
    assert min(overlay.shape[:2]) >= 224  # small images are enlarged for people
    for wrong in (-0.1, 1.5, float("nan")):
        with pytest.raises(vitkit.SettingError, match=r"strength = .*: must be from 0 to 1"):
            made.overlay(wrong)
    made.save(tmp_path / "a" / "out.png")
    with pytest.raises(vitkit.OutputError, match=r"ends in \.png"):
        made.save(tmp_path / "out.jpg")
    with pytest.raises(vitkit.SettingError, match=r"exist .did you mean 'attention'"):
        vitkit.explain(checkpoint, image, method="atention")
