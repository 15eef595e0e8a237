"""Integrated gradients: a plain sum over the points of the quadrature, and completeness."""

import numpy as np
import pytest
import torch
from own_methods import METHODS
from plain_pairs import CLASSES, VARIANTS, noise_images, variant
from torch import Tensor

import vitkit

COMPUTE = METHODS["integrated-gradients"].compute


def restated(model: vitkit.ViT, images: Tensor, classes: Tensor, steps: int) -> Tensor:
    points, sizes = np.polynomial.legendre.leggauss(steps)  # on [-1, 1]
    maps = torch.zeros(len(images), 2, 3, dtype=torch.float64)
    for row, (image, number) in enumerate(zip(images, classes.tolist(), strict=True)):
        total = torch.zeros_like(image)
        for point, size in zip(points, sizes, strict=True):
            part = ((point + 1) / 2 * image).requires_grad_()
            (gradient,) = torch.autograd.grad(model(part[None])[0, number], part)
            total += size / 2 * gradient
        for i in range(2):
            for j in range(3):
                patch = (slice(None), slice(8 * i, 8 * i + 8), slice(8 * j, 8 * j + 8))
                maps[row, i, j] = (total * image)[patch].sum()
    return maps


@pytest.mark.parametrize("name", VARIANTS)
def test_the_sum_over_the_points(name):
    model, images = variant(name), noise_images()
    expected = restated(model, images, CLASSES, 7)
    found = COMPUTE(model, images, classes=CLASSES, steps=7)
    scale = expected.abs().max().item()
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6 * scale)


@pytest.mark.parametrize("name", ["cls", "mean", "map", "swiglu"])
def test_a_map_sums_to_the_difference_from_the_mean_image(name):
    model, images = variant(name, depth=1), noise_images() / 4
    found = COMPUTE(model, images, classes=CLASSES).sum(dim=(1, 2))
    with torch.no_grad():
        logits = model(images) - model(torch.zeros_like(images))
    expected = logits.gather(1, CLASSES[:, None])[:, 0]
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.usefixtures("wrong_types_come_in")
@pytest.mark.parametrize("steps", [0, -3, True, 2.0])
def test_steps_are_one_or_more(steps):
    with pytest.raises(vitkit.SettingError, match=r"steps = .*: must be a whole number, 1 or more"):
        COMPUTE(variant("cls"), noise_images(), classes=CLASSES, steps=steps)
