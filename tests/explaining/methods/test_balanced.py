"""LeGrad and gradient rollout by balanced gradients, against what a weight carries forward."""

from __future__ import annotations

import plain_pairs
import pytest
import torch
from own_methods import METHODS
from plain_pairs import noise_images, variant
from torch import Tensor

import vitkit

NUMBER = 2


def gradient_to_weights(
    model: vitkit.ViT, image: Tensor, layer: int, layers: int, monkeypatch
) -> Tensor:
    """The gradient (k, Q, T) of a logit to a layer's attention, all constants kept.

    One more of a weight adds its value to the output of its head; this is sent forward.
    """
    z, rotation = plain_pairs.start(model, image)
    attend = plain_pairs.attend
    change: list[Tensor] = []
    shape: list[torch.Size] = []

    def changed(number, attn, qkv, rotation, weights):
        x, dx = attend(number, attn, qkv, rotation, weights)
        if number == layer:
            shape[:] = [torch.Size((*qkv[0][0].shape[:2], qkv[2][0].shape[1]))]
            one = change[0] if change else torch.zeros(shape[0], dtype=x.dtype)
            dx = (one @ qkv[2][0]).transpose(0, 1).flatten(1)
        return x, dx

    monkeypatch.setattr(plain_pairs, "attend", changed)
    with torch.no_grad():
        plain_pairs.logits(model, (z, 0 * z), rotation, layers=layers)
        gradient = torch.zeros(shape[0].numel(), dtype=z.dtype)
        for place in range(len(gradient)):
            one = torch.zeros_like(gradient)
            one[place] = 1
            change[:] = [one.view(shape[0])]
            _, share = plain_pairs.logits(model, (z, 0 * z), rotation, layers=layers)
            gradient[place] = share[NUMBER]
    monkeypatch.setattr(plain_pairs, "attend", attend)
    return gradient.view(shape[0])


@pytest.mark.parametrize("name", ["registers", "mean", "map", "swiglu", "post-norm"])
def test_legrad(name, monkeypatch):
    model, image = variant(name, depth=2), noise_images()[0]
    total = torch.zeros(6, dtype=torch.float64)
    for layer in range(2):
        wanted = -1 if model.spec.pooling == "map" else layer
        gradient = gradient_to_weights(model, image, wanted, layer + 1, monkeypatch)
        total += gradient.clamp(min=0).mean(dim=(0, 1))[-6:] / 2
    compute, classes = METHODS["legrad"].compute, torch.tensor([NUMBER])
    found = compute(model, image[None], classes=classes)
    torch.testing.assert_close(found[0].flatten(), total, rtol=1e-5, atol=1e-7)
    plain = compute(model, image[None], classes=classes, gradients="plain")
    assert (plain - found).abs().max() > 1e-3 * found.max()


@pytest.mark.parametrize("method", ["legrad", "gradient-rollout"])
def test_other_gradients_are_refused(method):
    with pytest.raises(vitkit.SettingError, match=r"gradients = 'steep': must be plain"):
        METHODS[method].compute(
            variant("cls"), noise_images(), classes=plain_pairs.CLASSES, gradients="steep"
        )
