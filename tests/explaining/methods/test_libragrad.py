"""LibraGrad: shares of the logit, which are complete; backward paths against a forward pass."""

import plain_pairs
import pytest
import torch
from own_methods import METHODS
from plain_pairs import CLASSES, VARIANTS, noise_images, variant
from torch import Tensor

import vitkit
from vitkit import Features
from vitkit.explaining.methods.gradients import BalancedGradients

LIBRAGRAD = METHODS["libragrad"].compute


def restated(model: vitkit.ViT, images: Tensor, classes: Tensor) -> Tensor:
    """Each patch token alone, sent forward through the network with its constants."""
    rows = []
    prefix = model.spec.num_prefix_tokens
    for image, number in zip(images, classes.tolist(), strict=True):
        z, rotation = plain_pairs.start(model, image)
        for patch in range(prefix, len(z)):
            alone = torch.zeros_like(z)
            alone[patch] = z[patch]
            with torch.no_grad():
                value, share = plain_pairs.logits(model, (z, alone), rotation)
                torch.testing.assert_close(value, model(image[None])[0])
            rows.append(share[number])
    return torch.stack(rows).view(len(images), 2, 3)


@pytest.mark.parametrize("name", VARIANTS)
def test_a_patch_s_share_is_what_its_token_carries_forward(name):
    model, images = variant(name), noise_images()
    expected = restated(model, images, CLASSES)
    assert expected.std() > 1e-3
    found = LIBRAGRAD(model, images, classes=CLASSES)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", VARIANTS)
def test_shares_of_tokens_and_biases_sum_to_the_logit(name):
    model, images = variant(name), noise_images()
    biases = [
        parameter
        for key, parameter in model.named_parameters()
        if key.endswith("bias") and not key.startswith(("patch_embed", "norm_pre"))
    ]
    with torch.no_grad():
        tokens, context, grid = model.embed(images)
    z = start = tokens.requires_grad_()
    with BalancedGradients():
        for block in model.blocks:
            z = block(z, context)
        logits = model.forward_head(Features.split(model.norm(z), grid, model.spec))
    torch.testing.assert_close(logits, model(images))
    for row, number in enumerate(CLASSES.tolist()):
        logit = logits[row, number]
        gradients = torch.autograd.grad(
            logit, [start, *biases], retain_graph=True, materialize_grads=True
        )
        sums = [
            (value * gradient).sum()
            for value, gradient in zip([start, *biases], gradients, strict=True)
        ]
        torch.testing.assert_close(sum(sums), logit, rtol=1e-4, atol=0)
        found = LIBRAGRAD(model, images, classes=CLASSES)[row].sum()
        patches = (start * gradients[0])[row, model.spec.num_prefix_tokens :].sum()
        torch.testing.assert_close(found, patches, rtol=1e-5, atol=1e-6)


def test_float32_gives_the_same_shares():
    model, images = variant("registers"), noise_images()
    expected = LIBRAGRAD(model, images, classes=CLASSES)
    found = LIBRAGRAD(model.float(), images.float(), classes=CLASSES)
    torch.testing.assert_close(found.double(), expected, rtol=1e-4, atol=1e-5)


def test_an_input_of_zero_has_a_gate():
    x = torch.zeros(3, dtype=torch.float64, requires_grad=True)
    for function, slope in (
        (torch.nn.functional.gelu, 0.5),
        (torch.nn.functional.silu, 0.5),
        (torch.tanh, 1.0),
    ):
        with BalancedGradients():
            y = function(x)
        (gradient,) = torch.autograd.grad(y.sum(), x)
        torch.testing.assert_close(gradient, torch.full_like(x, slope))
        assert y.tolist() == [0, 0, 0]
