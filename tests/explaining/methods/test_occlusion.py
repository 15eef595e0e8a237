"""Occlusion: the tokens are dropped one by one, in a plain loop."""

import numpy as np
import plain_pairs
import pytest
import torch
from own_methods import METHODS
from plain_pairs import CLASSES, VARIANTS, noise_images, variant
from torch import Tensor

import vitkit

AT_ONCE = "vitkit.explaining.methods.occlusion.ROWS_AT_ONCE"

OCCLUSION = METHODS["occlusion"].compute


@torch.no_grad()
def restated(model: vitkit.ViT, images: Tensor, classes: Tensor, window: int = 1) -> Tensor:
    maps = torch.zeros(len(images), 2, 3, dtype=torch.float64)
    counts = torch.zeros(2, 3)
    for row, (image, number) in enumerate(zip(images, classes.tolist(), strict=True)):
        z, rotation = plain_pairs.start(model, image)
        whole = model(image[None])[0, number]
        for i in range(2 - window + 1):
            for j in range(3 - window + 1):
                cells = [(i + di, j + dj) for di in range(window) for dj in range(window)]
                kept, turned = plain_pairs.keep(model, z, rotation, {3 * a + b for a, b in cells})
                logits, _ = plain_pairs.logits(model, (kept, kept), turned)
                for a, b in cells:
                    maps[row, a, b] += whole - logits[number]
                    counts[a, b] += 1 / len(images)
    return maps / counts


@pytest.mark.parametrize("name", VARIANTS)
def test_the_fall_of_the_logit_without_each_patch(name):
    model, images = variant(name), noise_images()
    found = OCCLUSION(model, images, classes=CLASSES)
    expected = restated(model, images, CLASSES)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)


def test_a_window_of_several_patches(monkeypatch):
    model, images = variant("rope"), noise_images()
    expected = restated(model, images, CLASSES, window=2)
    for rows in (64, 5, 1):  # passes of any size
        monkeypatch.setattr(AT_ONCE, rows)
        found = OCCLUSION(model, images, classes=CLASSES, window=2)
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.usefixtures("wrong_types_come_in")
@pytest.mark.parametrize("window", [0, 3, -1, True, 1.0, np.int64(3)])
def test_a_window_leaves_some_patch(window):
    with pytest.raises(vitkit.SettingError, match=r"window = .*: must be .* from 1 to 2"):
        OCCLUSION(variant("cls"), noise_images(), classes=CLASSES, window=window)
    square = torch.zeros(1, 3, 16, 16, dtype=torch.float64)
    with pytest.raises(vitkit.SettingError, match=r"from 1 to 1$"):
        OCCLUSION(variant("cls"), square, classes=CLASSES[:1], window=2)


def test_images_of_one_patch_are_refused():
    one = torch.zeros(1, 3, 8, 8, dtype=torch.float64)
    with pytest.raises(vitkit.SettingError, match=r"a single one; other methods: attention"):
        OCCLUSION(variant("cls"), one, classes=CLASSES[:1])
