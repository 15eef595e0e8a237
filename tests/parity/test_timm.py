"""Ours against timm's `VisionTransformer`, same weights, same pictures, float32."""

from __future__ import annotations

import pytest
import timm
import torch
from noise import fill_with_noise

import vitkit

TOLERANCE = 1e-5
NAMES = [
    "vit_tiny_patch16_224",
    "vit_small_patch32_224",
    "vit_small_patch8_224",
    "vit_base_patch32_384",
    "vit_large_patch14_224",
    "vit_huge_patch14_224",
]


def relative(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    return ((ours - theirs).abs().max() / theirs.abs().max()).item()


@pytest.mark.parametrize("name", NAMES)
def test_logits_equal_timm_s_with_our_weights(name):
    ours = vitkit.create_model(name, depth=2, num_classes=11).eval()
    theirs = timm.create_model(name, depth=2, num_classes=11).eval()
    fill_with_noise(ours)
    theirs.load_state_dict(ours.state_dict(), strict=True)
    images = torch.randn(2, 3, *ours.spec.image_size)
    with torch.inference_mode():
        expected = theirs(images)
        assert relative(ours(images), expected) <= TOLERANCE
        # The control: two keys swapped must show.
        state = ours.state_dict()
        state["blocks.0.norm1.weight"], state["blocks.0.norm2.weight"] = (
            state["blocks.0.norm2.weight"],
            state["blocks.0.norm1.weight"],
        )
        theirs.load_state_dict(state)
        assert relative(theirs(images), expected) > 10 * TOLERANCE


def test_their_weights_load_into_ours_and_another_size_agrees():
    theirs = timm.create_model("vit_tiny_patch16_224", depth=2, dynamic_img_size=True).eval()
    ours = vitkit.create_model("vit_tiny_patch16_224", depth=2).eval()
    fill_with_noise(theirs)
    ours.load_state_dict(theirs.state_dict(), strict=True)
    with torch.inference_mode():
        for size in ((224, 224), (256, 192)):
            images = torch.randn(2, 3, *size)
            assert relative(ours(images), theirs(images)) <= TOLERANCE


def test_mean_pooling_equals_timm_s_without_fc_norm():
    theirs = timm.create_model(
        "vit_tiny_patch16_224", depth=2, class_token=False, global_pool="avg", fc_norm=False
    ).eval()
    ours = vitkit.create_model(
        "vit_tiny_patch16_224", depth=2, class_token=False, pooling="mean"
    ).eval()
    fill_with_noise(theirs)
    ours.load_state_dict(theirs.state_dict(), strict=True)
    images = torch.randn(2, 3, 224, 224)
    with torch.inference_mode():
        assert relative(ours(images), theirs(images)) <= TOLERANCE


@pytest.mark.soak
@pytest.mark.parametrize("name", ["vit_base_patch16_224", "vit_large_patch16_224"])
def test_full_size(name):
    ours, theirs = vitkit.create_model(name).eval(), timm.create_model(name).eval()
    fill_with_noise(ours)
    theirs.load_state_dict(ours.state_dict(), strict=True)
    images = torch.randn(1, 3, 224, 224)
    with torch.inference_mode():
        assert relative(ours(images), theirs(images)) <= TOLERANCE
