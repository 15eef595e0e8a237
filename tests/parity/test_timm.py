"""Ours against timm, same weights, same images, float32; tests/weights has each kind of model."""

from typing import Any

import pytest
import torch
from noise import fill_with_noise
from peers import Weights, assert_parity, peer, random_images
from torch import nn
from weights.test_timm_files import KINDS

import vitkit
from vitkit.models.presets import preset, table

timm = peer("timm")


EVA_KEYS = {"ls1.gamma": "gamma_1", "ls2.gamma": "gamma_2", "attn.qkv.q_bias": "attn.q_bias",
            "attn.qkv.v_bias": "attn.v_bias"}  # fmt: skip


def in_their_words(ours: nn.Module, theirs: nn.Module) -> Weights:
    weights = dict(ours.state_dict())
    if type(theirs).__name__ != "Eva":
        return weights
    for our_name, their_name in EVA_KEYS.items():
        weights = {key.replace(our_name, their_name): value for key, value in weights.items()}
    return weights


def build_both(name: str, **theirs: Any) -> tuple[vitkit.ViT, nn.Module]:
    """Ours full of noise, theirs with its buffers, which no state dict holds."""
    depth = {name: value for name, value in theirs.items() if name == "depth"}
    ours = vitkit.create_model(name, num_classes=11, **depth)
    fill_with_noise(ours)
    return ours.eval(), timm.create_model(name, num_classes=11, **theirs).eval()


def check(ours: nn.Module, theirs: nn.Module, images: torch.Tensor) -> None:
    weights = in_their_words(ours, theirs)
    swaps = [("blocks.0.norm1.weight", "blocks.1.norm2.weight")]
    assert_parity(ours, theirs, weights, images, swaps=swaps)


@pytest.mark.parametrize(
    "name",
    [
        "deit_tiny_distilled_patch16_224", "vit_small_patch14_reg4_dinov2",
        "vit_base_patch16_siglip_224", "vit_small_patch16_dinov3",
        "vit_small_plus_patch16_dinov3_qkvb",
    ],
)  # fmt: skip
def test_another_image_size(name):
    patch = preset(name).patch_size[0]
    ours, theirs = build_both(name, dynamic_img_size=True, depth=2)
    base = preset(name).grid[0]
    for rows, columns in ((3, 7), (base // 2, base * 2), (5, 2)):
        check(ours, theirs, random_images(1, rows * patch, columns * patch))


def test_every_family_that_timm_knows_has_a_case():
    known = {line.family for name, line in table().items() if timm.is_model(name)}
    assert known - {table()[name].family for name in KINDS} == {
        "Larger ViTs",  # as ViT, with other numbers
        "Models for tests",  # the same
    }


FULL_SIZE = [
    "vit_base_patch16_224", "vit_large_patch16_224", "vit_base_patch14_dinov2",
    "vit_large_patch14_clip_336", "vit_so400m_patch14_siglip_378", "vit_base_r50_s16_384",
    "deit3_large_patch16_384", "vit_large_patch16_dinov3_qkvb",
]  # fmt: skip


@pytest.mark.soak
@pytest.mark.parametrize("name", FULL_SIZE)
def test_full_size(name):
    ours, theirs = build_both(name)
    images = random_images(1, *ours.spec.image_size)
    if ours.spec.resnet_layers:  # a ResNet's stages turn float32's rounding into 1e-5
        ours, images = ours.double(), images.double()
    check(ours, theirs, images)
