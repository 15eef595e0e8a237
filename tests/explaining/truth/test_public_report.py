"""`vitkit.truth_report`: the truth of a method on images of any kind."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from noise import fill_with_noise
from PIL import Image

import vitkit
from vitkit.data.images.preprocess import preprocess_images
from vitkit.errors import ImageError, SettingError
from vitkit.explaining.methods import METHODS
from vitkit.explaining.truth.measure import measure_truth

PREPROCESS = vitkit.Preprocess(image_size=(16, 24), fit="squash")
CLASSES = ("ant", "bee", "cat", "dog", "eel")


@pytest.fixture(scope="module")
def checkpoint() -> vitkit.Checkpoint:
    spec = vitkit.ViTSpec(
        image_size=(16, 24), patch_size=8, width=16, depth=2, num_heads=2, mlp_width=16,
        num_classes=5,
    )  # fmt: skip
    model = vitkit.ViT(spec)
    fill_with_noise(model, std=0.4)
    return vitkit.Checkpoint(model.eval(), PREPROCESS, CLASSES)


@pytest.fixture(scope="module")
def photos(tmp_path_factory):
    folder = tmp_path_factory.mktemp("photos")
    generator = np.random.default_rng(0)
    pixels = [generator.integers(0, 256, (20, 30, 3), dtype=np.uint8) for _ in range(6)]
    for number, image in enumerate(pixels):
        Image.fromarray(image).save(folder / f"{number}.png")
    return folder, pixels


@pytest.mark.usefixtures("wrong_types_come_in")  # labels in an array
def test_it_is_the_measurement_of_the_preprocessed_images(checkpoint, photos):
    folder, pixels = photos
    report = vitkit.truth_report(checkpoint, folder, mosaics=10)
    images = preprocess_images(pixels, PREPROCESS)
    expected = measure_truth(
        METHODS["libragrad"], checkpoint.model, images, preprocess=PREPROCESS, mosaics=10
    )
    assert report == expected
    assert isinstance(report, vitkit.TruthReport)
    assert vitkit.truth_report(checkpoint, pixels, mosaics=10) == report
    assert json.loads(json.dumps(report.as_json()))["method"] == "libragrad"
    labels = vitkit.truth_report(
        checkpoint, pixels, labels=["bee", 2, "ant", "4", 0, 1], parts=["fit"]
    )
    assert labels.model_fit.labelled
    with torch.no_grad():
        right = checkpoint.model(images).argmax(1) == torch.tensor([1, 2, 0, 4, 0, 1])
    numbers = np.array([1, 2, 0, 4, 0, 1])
    for same in (numbers, torch.from_numpy(numbers)):
        assert vitkit.truth_report(checkpoint, pixels, labels=same, parts=["fit"]) == labels
    assert labels.model_fit.full == pytest.approx(right.double().mean().item())
    assert labels.stability is None
    layer = vitkit.truth_report(checkpoint, pixels, layer=np.int64(0), parts=())
    assert (layer.method, layer.options) == ("attention", {"layer": 0})
    assert json.loads(json.dumps(layer.as_json()))["options"] == {"layer": 0}


@pytest.mark.usefixtures("wrong_types_come_in")
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"method": "libragard"}, "did you mean 'libragrad'"),
        ({"method": "pca"}, "its maps are colours"),
        ({"layer": 7}, "layer 7 does not exist; layers are 0 to 1"),
        ({"parts": ["speed"]}, "parts = 'speed': must be of weights, class"),
        ({"labels": ["ant"]}, "1 labels for 6 images; expected one each"),
        ({"labels": ["fly"] * 6}, "fly.* is not a class of this model"),
        ({"labels": np.full(6, 9)}, "class_name = .*9.*: is not a class of this model"),
        ({"mosaics": 0}, "mosaics = 0: must be 1 or more"),
        ({"seed": -1}, "seed = -1: must be 0 or more"),
    ],
)
def test_what_does_not_fit_is_named(checkpoint, photos, arguments, message):
    with pytest.raises(SettingError, match=message):
        vitkit.truth_report(checkpoint, photos[1], **arguments)


def test_broken_and_missing_images_are_named(checkpoint, photos, tmp_path):
    with pytest.raises(SettingError, match="cannot be measured without images"):
        vitkit.truth_report(checkpoint, [])
    broken = tmp_path / "broken.png"
    broken.write_bytes(b"words")
    with pytest.raises(ImageError, match=r"broken\.png: not an image"):
        vitkit.truth_report(checkpoint, [photos[1][0], broken])


def test_classes_of_methods_that_need_none_are_checked_too(checkpoint, photos):
    images = preprocess_images(photos[1], PREPROCESS)
    with pytest.raises(SettingError, match="class 9 does not exist; classes are 0 to 4"):
        measure_truth(
            METHODS["rollout"], checkpoint.model, images, classes=torch.full((6,), 9), parts=()
        )
