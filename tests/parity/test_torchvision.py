"""Ours against torchvision's `VisionTransformer`; float32, same weights."""

from __future__ import annotations

import pytest
from peers import assert_parity, noisy_vit, peer, random_images, renamed, without_weights
from torch import nn
from torchvision_vit import LAYER, TABLE, shallow

import vitkit
from vitkit.models.presets import preset

NAMES = {  # theirs -> ours
    "vit_b_16": "vit_base_patch16_224",
    "vit_b_32": "vit_base_patch32_224",
    "vit_l_16": "vit_large_patch16_224",
    "vit_h_14": "vit_huge_patch14_224",
}
SWAPS = [
    (f"{LAYER}.ln_1.weight".replace("*", "0"), f"{LAYER}.ln_2.weight".replace("*", "1")),
    (f"{LAYER}.ln_1.bias".replace("*", "0"), f"{LAYER}.ln_2.bias".replace("*", "0")),
]


def check(spec: vitkit.ViTSpec, theirs: nn.Module, count: int = 2) -> None:
    ours = noisy_vit(spec)
    weights = renamed(ours.state_dict(), TABLE)
    assert_parity(ours, theirs, weights, random_images(count, *spec.image_size), swaps=SWAPS)


@pytest.mark.parametrize("name", NAMES.values())
def test_two_layers(name):
    spec = preset(name, depth=2, num_classes=11)
    check(spec, shallow(spec))


def test_the_representation_before_the_head():
    spec = preset("vit_base_patch32_224", depth=2, num_classes=11, representation_width=32)
    check(spec, shallow(spec))


@pytest.mark.parametrize("name", NAMES)
def test_the_named_models_have_our_keys_and_shapes(name):
    theirs = without_weights(peer("torchvision.models", name))
    ours = without_weights(lambda: vitkit.create_model(NAMES[name]))
    expected = {key: value.shape for key, value in theirs.state_dict().items()}
    made = renamed(ours.state_dict(), TABLE)
    assert {key: value.shape for key, value in made.items()} == expected
    heads = {block.self_attention.num_heads for block in theirs.encoder.layers}
    assert heads == {ours.spec.num_heads}


@pytest.mark.soak
@pytest.mark.parametrize("name", NAMES)
def test_full_size(name):
    check(preset(NAMES[name]), without_weights(peer("torchvision.models", name)), count=1)
