"""LeGrad: each layer's own score, its attention map as a leaf, image by image."""

import plain_pairs
import pytest
import torch
from own_methods import METHODS
from plain_pairs import CLASSES, VARIANTS, noise_images, variant
from torch import Tensor

import vitkit

LEGRAD = METHODS["legrad"].compute


def restated(model: vitkit.ViT, images: Tensor, classes: Tensor) -> Tensor:
    """LeGrad in plain loops: over images, layers, heads and query rows."""
    maps = []
    for image, number in zip(images, classes.tolist(), strict=True):
        z, rotation = plain_pairs.start(model, image)
        total = torch.zeros(6, dtype=torch.float64)
        for layer in range(model.spec.depth):
            wanted = -1 if model.spec.pooling == "map" else layer
            leaves = {}

            def as_leaf(number: int, weights: Tensor, leaves=leaves, wanted=wanted) -> Tensor:
                if number != wanted:
                    return weights
                leaves[number] = weights.detach().requires_grad_()
                return leaves[number]

            logits, _ = plain_pairs.logits(model, (z, z), rotation, as_leaf, layers=layer + 1)
            (gradient,) = torch.autograd.grad(logits[number], leaves[wanted])
            heads, queries, _ = gradient.shape
            for head in range(heads):
                for query in range(queries):
                    row = gradient[head, query][-6:]
                    total += torch.where(row > 0, row, 0.0) / (heads * queries)
        maps.append((total / model.spec.depth).view(2, 3))
    return torch.stack(maps)


@pytest.mark.parametrize("name", VARIANTS)
def test_positive_gradients_of_each_layer_s_score_to_its_attention(name):
    model, images = variant(name), noise_images()
    expected = restated(model, images, CLASSES)
    assert expected.std() > 1e-3 * expected.mean()
    found = LEGRAD(model, images, classes=CLASSES, gradients="plain")
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-7)


def test_a_layer_s_tokens_are_freed_before_the_next(monkeypatch):
    """Memory holds the maps of one layer."""
    model, images = variant("cls", depth=6), noise_images()
    kept = []
    keep = vitkit.Record.keep

    def count(self, layer, tokens):
        kept.append(len(self.attention))
        keep(self, layer, tokens)

    monkeypatch.setattr(vitkit.Record, "keep", count)
    LEGRAD(model, images, classes=CLASSES)
    assert kept == [1] * 6


@pytest.mark.parametrize("method", ["legrad", "gradient-rollout"])
def test_gradients_are_balanced_unless_plain_ones_are_asked_for(method):
    model, images, compute = variant("registers"), noise_images(), METHODS[method].compute
    usual = compute(model, images, classes=CLASSES)
    assert torch.equal(compute(model, images, classes=CLASSES, gradients="balanced"), usual)
    plain = compute(model, images, classes=CLASSES, gradients="plain")
    assert (plain - usual).abs().max() > 1e-3 * usual.max()
    with pytest.raises(vitkit.SettingError, match=r"gradients = 'steep': must be plain"):
        compute(model, images, classes=CLASSES, gradients="steep")
