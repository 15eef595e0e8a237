"""`preprocess(image)` gives the very tensors that a prediction gives its model."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from PIL import Image

import vitkit
from vitkit import ImageError, SettingError

RNG = np.random.default_rng(0)
COLOUR = RNG.integers(0, 256, (40, 57, 3), np.uint8)
GREY = RNG.integers(0, 256, (40, 57), np.uint8)


@pytest.fixture
def files(tmp_path):
    for number, pixels in enumerate((COLOUR, GREY, COLOUR[::-1])):
        Image.fromarray(pixels).save(tmp_path / f"{number}.png")
    return sorted(tmp_path.iterdir())


@pytest.mark.parametrize("mean", [(0.5, 0.4, 0.3), (0.5,)])
@pytest.mark.parametrize("fit", ["crop", "squash"])
def test_preprocess_gives_what_a_predictor_gives_its_model(files, mean, fit):
    preprocess = vitkit.Preprocess(image_size=32, mean=mean, std=mean, fit=fit)
    received = []

    def forward(images):
        received.append(images)
        return images.mean((2, 3))

    vitkit.Predictor(forward, preprocess)(files)
    (batch,) = received
    assert torch.equal(preprocess([*files]), batch)
    for row, file in zip(batch, files, strict=True):
        assert torch.equal(preprocess(file), row)
        assert torch.equal(preprocess(str(file)), row)
        assert torch.equal(preprocess(Image.open(file)), row)
        assert torch.equal(preprocess(file.read_bytes()), row)
    assert torch.equal(preprocess(GREY), preprocess(GREY[..., None]))
    assert preprocess(COLOUR).shape == (len(mean), 32, 32)


@pytest.mark.parametrize(
    ("image", "error", "words"),
    [
        ([], SettingError, "empty list"),
        (np.zeros((4, 4, 3), np.float32), ImageError, "uint8, got \\(4, 4, 3\\) float32"),
        (["a.png", COLOUR], ImageError, "a.png: missing"),
        (
            Image.new("RGB", (5, 0)),
            ImageError,
            "image: damaged: 0 x 5 pixels; expected",
        ),
        ([COLOUR, Image.new("L", (0, 5))], ImageError, "image 1: damaged: 5 x 0 pixels"),
    ],
)
def test_what_is_no_image_is_refused_by_its_number(image, error, words):
    with pytest.raises(error, match=words):
        vitkit.Preprocess(image_size=32)(image)
