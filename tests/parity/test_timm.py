"""Ours against timm, same weights, same images, float32: plain models, then every variation."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from noise import fill_with_noise
from peers import TOLERANCE, Weights, assert_parity, peer, random_images, relative, without_weights
from torch import nn

import vitkit
from vitkit.models.presets import preset, table

timm = peer("timm")
NAMES = [
    "vit_tiny_patch16_224",
    "vit_small_patch32_224",
    "vit_small_patch8_224",
    "vit_base_patch32_384",
    "vit_large_patch14_224",
    "vit_huge_patch14_224",
]


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


Swap = tuple[str, str]
NORMS: Swap = ("blocks.0.norm1.weight", "blocks.1.norm2.weight")
SCALES: Swap = ("blocks.0.ls1.gamma", "blocks.1.ls2.gamma")
GATES: Swap = ("blocks.0.mlp.fc1_g.weight", "blocks.0.mlp.fc1_x.weight")
BIASES: Swap = ("blocks.0.attn.qkv.q_bias", "blocks.1.attn.qkv.v_bias")
QK_NORMS: Swap = ("blocks.0.attn.q_norm.bias", "blocks.0.attn.k_norm.bias")
STAGE = "patch_embed.backbone.stages.1.blocks.0"
STAGE_NORMS: Swap = (f"{STAGE}.norm1.weight", f"{STAGE}.norm2.weight")
SHORTCUT: Swap = (f"{STAGE}.norm3.weight", f"{STAGE}.downsample.norm.weight")


@dataclass(frozen=True)
class Case:
    """A preset that timm knows, and what else both are built with.

    Attributes:
        name: theirs and ours.
        swap: the control: two of our keys of one shape.
        ours: fields of our spec.
        theirs: keywords of their model, to the same effect.
        dtype: of weights and images.
    """

    name: str
    swap: Swap = NORMS
    ours: dict[str, Any] = field(default_factory=dict)
    theirs: dict[str, Any] = field(default_factory=dict)
    dtype: torch.dtype = torch.float32

    def __str__(self) -> str:
        return "-".join([self.name, *self.ours])


CASES = [
    Case("vit_base_patch8_224"),
    Case("vit_base_patch16_224_miil"),
    Case("vit_tiny_patch16_224", ours={"qkv_bias": False}, theirs={"qkv_bias": False}),
    Case("vit_tiny_patch16_224", QK_NORMS, {"qk_norm": True}, {"qk_norm": True}),
    Case("vit_tiny_patch16_224", ours={"positions": "none"}, theirs={"pos_embed": "none"}),
    Case(
        "vit_tiny_patch16_224",
        ours={"pooling": "mean_all"},
        theirs={"global_pool": "avg", "fc_norm": False, "pool_include_prefix": True},
    ),
    Case("vit_small_patch16_36x1_224", SCALES),
    # hybrids; a ResNet's stages turn float32's rounding into 1e-5, timm's against itself as well
    Case("vit_tiny_r_s16_p8_224", ("patch_embed.backbone.norm.weight",
                                   "patch_embed.backbone.norm.bias")),
    Case("vit_small_r26_s32_224", STAGE_NORMS, dtype=torch.float64),
    Case("vit_base_r50_s16_224", SHORTCUT, dtype=torch.float64),
    # DeiT
    Case("deit_small_patch16_224"),
    Case("deit_tiny_distilled_patch16_224", ("cls_token", "dist_token")),
    Case("deit_small_distilled_patch16_224", ("head.weight", "head_dist.weight")),
    Case("deit3_small_patch16_224", SCALES),
    # CLIP and SigLIP
    Case("vit_xsmall_patch16_clip_224", ("norm_pre.weight", "norm.weight")),
    Case("vit_base_patch32_clip_quickgelu_224", ("norm_pre.bias", "norm.bias")),
    Case("vit_base_patch16_siglip_224", ("attn_pool.norm.weight", "norm.weight")),
    Case("vit_base_patch32_siglip_256", ("attn_pool.q.weight", "attn_pool.proj.weight")),
    Case("vit_base_patch16_siglip_gap_224"),
    Case("vit_base_patch32_siglip_gap_256"),
    # DINO
    Case("vit_small_patch14_dinov2", SCALES),
    Case("vit_small_patch14_reg4_dinov2", SCALES),
    Case("vit_giant_patch14_dinov2", SCALES),
    Case("vit_small_patch16_dinov3", SCALES),
    Case("vit_small_plus_patch16_dinov3", GATES),
    Case("vit_small_patch16_dinov3_qkvb", BIASES),
    Case("vit_small_patch16_lingbot", BIASES),
    # means of the patches, registers, norms elsewhere
    Case("vit_medium_patch16_gap_256", SCALES),
    Case("vit_base_patch16_gap_224"),
    Case("vit_wee_patch16_reg1_gap_256", SCALES),
    Case("vit_base_patch16_reg4_gap_256"),
    Case("vit_so150m_patch16_reg4_gap_256"),
    Case("vit_so150m_patch16_reg4_map_256", ("attn_pool.norm.weight", "norm.weight")),
    Case("vit_so150m2_patch16_reg1_gap_256", SCALES),
    Case("vit_base_patch16_rpn_224"),
    Case("eva_large_patch14_196"),
    Case("eva_giant_patch14_224", BIASES),
    Case("flexivit_small"),
    Case("vit_base_patch14_reg1_tipsv2", SCALES),
    Case("vit_intern300m_patch14_448", SCALES),
    Case("vit_base_patch16_radio_v3", SCALES),
    Case("test_vit4", SCALES),
]  # fmt: skip
EVA_KEYS = {"ls1.gamma": "gamma_1", "ls2.gamma": "gamma_2", "attn.qkv.q_bias": "attn.q_bias",
            "attn.qkv.v_bias": "attn.v_bias"}  # fmt: skip


def in_eva_s_words(key: str) -> str:
    """Our key in timm's class `Eva`."""
    for ours, theirs in EVA_KEYS.items():
        key = key.replace(ours, theirs)
    return key


def build_theirs(name: str, **settings: Any) -> nn.Module:
    """Their model, without weights; with its buffers, which no state dict holds."""
    model = without_weights(lambda: timm.create_model(name, **settings))
    return timm.create_model(name, **settings).eval() if list(model.buffers()) else model


def build_both(name: str, ours: dict[str, Any], **theirs: Any) -> tuple[vitkit.ViT, nn.Module]:
    """Ours full of noise, theirs empty."""
    model = without_weights(lambda: vitkit.ViT(preset(name, **ours))).to_empty(device="cpu")
    fill_with_noise(model)
    return model, build_theirs(name, **theirs)


def in_their_words(ours: nn.Module, theirs: nn.Module) -> Weights:
    eva = type(theirs).__name__ == "Eva"
    return {in_eva_s_words(key) if eva else key: value for key, value in ours.state_dict().items()}


def check(ours: nn.Module, theirs: nn.Module, swap: Swap, images: torch.Tensor) -> None:
    if type(theirs).__name__ == "Eva":
        swap = in_eva_s_words(swap[0]), in_eva_s_words(swap[1])
    assert_parity(ours, theirs, in_their_words(ours, theirs), images, swaps=[swap])


@pytest.mark.parametrize("case", CASES, ids=str)
def test_every_variation(case):
    patch = preset(case.name).patch_size[0]
    size = {"depth": 2, "num_classes": 11}
    image = (4 * patch, 6 * patch)  # not square: an exchange of the sides shows
    ours, theirs = build_both(
        case.name,
        {"image_size": image} | size | case.ours,
        img_size=image,
        **size,
        **case.theirs,
    )
    check(ours.to(case.dtype), theirs, case.swap, random_images(2, *image).to(case.dtype))


def test_every_family_that_timm_knows_has_a_case():
    known = {line.family for name, line in table().items() if timm.is_model(name)}
    assert known - {table()[name].family for name in [*NAMES, *(case.name for case in CASES)]} == {
        "Larger ViTs",  # as ViT, with other numbers
        "Models for tests",  # the same
    }


@pytest.mark.parametrize(
    "name",
    [
        "deit_tiny_distilled_patch16_224",
        "vit_small_patch14_reg4_dinov2",
        "vit_base_patch16_siglip_224",
        "vit_small_patch16_dinov3",
        "vit_small_plus_patch16_dinov3_qkvb",
    ],
)
def test_another_image_size(name):
    size = {"depth": 2, "num_classes": 11}
    patch = preset(name).patch_size[0]
    ours, theirs = build_both(name, size, dynamic_img_size=True, **size)
    base = preset(name).grid[0]
    for rows, columns in ((3, 7), (base // 2, base * 2), (5, 2)):
        check(ours, theirs, NORMS, random_images(1, rows * patch, columns * patch))


@pytest.mark.soak
@pytest.mark.parametrize("name", ["vit_base_patch16_224", "vit_large_patch16_224"])
def test_full_size(name):
    ours, theirs = vitkit.create_model(name).eval(), timm.create_model(name).eval()
    fill_with_noise(ours)
    theirs.load_state_dict(ours.state_dict(), strict=True)
    images = torch.randn(1, 3, 224, 224)
    with torch.inference_mode():
        assert relative(ours(images), theirs(images)) <= TOLERANCE


FULL_SIZE = [
    Case("vit_base_patch14_dinov2", SCALES),
    Case("vit_large_patch14_clip_336", ("norm_pre.weight", "norm.weight")),
    Case("vit_so400m_patch14_siglip_378", ("attn_pool.norm.weight", "norm.weight")),
    Case("vit_base_r50_s16_384", STAGE_NORMS, dtype=torch.float64),
    Case("deit3_large_patch16_384", SCALES),
    Case("vit_large_patch16_dinov3_qkvb", BIASES),
]


@pytest.mark.soak
@pytest.mark.parametrize("case", FULL_SIZE, ids=str)
def test_varied_models_at_full_size(case):
    ours, theirs = build_both(case.name, {"num_classes": 11}, num_classes=11)
    images = random_images(1, *ours.spec.image_size).to(case.dtype)
    check(ours.to(case.dtype), theirs, case.swap, images)
