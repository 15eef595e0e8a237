"""What all methods of a class have in common: batches, modes and gradients."""

from __future__ import annotations

import pytest
import torch
from plain_pairs import CLASSES, VARIANTS, noise_images, variant

from vitkit.explaining.methods import METHODS

NAMES = ("legrad", "libragrad", "integrated-gradients", "occlusion")


@pytest.mark.parametrize("method", NAMES)
@pytest.mark.parametrize("name", VARIANTS)
def test_an_image_s_map_does_not_depend_on_its_batch(method, name):
    model, images = variant(name), noise_images()
    compute = METHODS[method].compute
    together = compute(model, images, classes=CLASSES)
    assert together.shape == (3, 2, 3)
    assert not together.requires_grad
    for row in range(3):
        alone = compute(model, images[row : row + 1], classes=CLASSES[row : row + 1])
        torch.testing.assert_close(alone[0], together[row], rtol=1e-5, atol=1e-6)
    other = compute(model, images, classes=CLASSES.roll(1))
    assert not torch.allclose(other, together)  # the class matters


@pytest.mark.parametrize("method", NAMES)
def test_modes_stay_and_no_parameter_gets_a_gradient(method):
    model, images = variant("registers", mlp_dropout=0.5, patch_dropout=0.5), noise_images()
    compute = METHODS[method].compute
    expected = compute(model, images, classes=CLASSES)
    model.train()
    model.blocks[0].eval()
    before = [module.training for module in model.modules()]
    torch.testing.assert_close(compute(model, images, classes=CLASSES), expected)
    assert [module.training for module in model.modules()] == before
    assert all(parameter.grad is None for parameter in model.parameters())
    assert all(parameter.requires_grad for parameter in model.parameters())
    assert images.grad is None
    assert not images.requires_grad
    with torch.inference_mode():
        torch.testing.assert_close(compute(model, images.clone(), classes=CLASSES), expected)
    model.requires_grad_(False)  # frozen
    with torch.no_grad():
        torch.testing.assert_close(compute(model, images, classes=CLASSES), expected)
