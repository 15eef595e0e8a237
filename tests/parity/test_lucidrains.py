"""Ours against lucidrains' vit-pytorch: `ViT` and `SimpleViT`; float32, same weights."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from einops import rearrange
from peers import (
    Weights,
    assert_parity,
    noisy_vit,
    peer,
    random_images,
    relative,
    renamed,
    without_weights,
)
from torch import Tensor, nn

import vitkit

SMALL = {"image_size": (64, 96), "patch_size": (16, 8), "width": 192, "depth": 2, "num_heads": 3,
         "head_width": 64, "mlp_width": 384, "num_classes": 11}  # fmt: skip
NOTEBOOK = {"image_size": 256, "patch_size": 32, "width": 1024, "depth": 6, "num_heads": 16,
            "head_width": 64, "mlp_width": 2048, "num_classes": 1000}  # fmt: skip
STYLE = {"stem": "normed_linear", "qkv_bias": False, "norm_eps": 1e-5}
STYLES = {
    "cls": STYLE | {"pooling": "cls"},
    "mean": STYLE | {"pooling": "mean", "class_token": False},
    "simple": STYLE | {"pooling": "mean", "class_token": False, "positions": "sincos_2d"},
}

TABLE = {  # ours -> theirs
    "cls_token": "cls_token",
    "pos_embed": "pos_embedding",
    "patch_embed.norm_patches": "to_patch_embedding.1",
    "patch_embed.proj": "to_patch_embedding.2",
    "patch_embed.norm": "to_patch_embedding.3",
    "blocks.*.norm1": "transformer.layers.*.0.norm",
    "blocks.*.attn.qkv": "transformer.layers.*.0.to_qkv",
    "blocks.*.attn.proj": "transformer.layers.*.0.to_out.0",
    "blocks.*.norm2": "transformer.layers.*.1.net.0",
    "blocks.*.mlp.fc1": "transformer.layers.*.1.net.1",
    "blocks.*.mlp.fc2": "transformer.layers.*.1.net.4",
    "norm": "transformer.norm",
    "head": "mlp_head",
}
SIMPLE_TABLE = TABLE | {
    "blocks.*.attn.proj": "transformer.layers.*.0.to_out",  # no dropout, so not in a Sequential
    "blocks.*.mlp.fc2": "transformer.layers.*.1.net.3",
    "head": "linear_head",
}
SWAPS = [
    ("transformer.layers.0.0.norm.weight", "transformer.layers.0.1.net.0.weight"),
    ("to_patch_embedding.3.weight", "transformer.norm.weight"),
    ("to_patch_embedding.1.weight", "to_patch_embedding.1.bias"),
]


def channel_fastest(spec: vitkit.ViTSpec, values: Tensor) -> Tensor:
    """The last axis from our order of a patch's values to theirs, (p1 p2 c)."""
    rows, columns = spec.patch_size
    return rearrange(values, "... (C P Q) -> ... (P Q C)", P=rows, Q=columns)


def copied(ours: vitkit.ViT) -> Weights:
    """Our weights under their names, in their shapes and order of values."""
    spec, weights = ours.spec, ours.state_dict()
    for name in ("cls_token", "pos_embed"):
        if name in weights:
            weights[name] = weights[name][0]  # theirs have no batch axis
    if not spec.class_token and spec.positions == "learned":
        weights["cls_token"] = torch.zeros(0, spec.width)
    for name in ("norm_patches.weight", "norm_patches.bias", "proj.weight"):
        key = f"patch_embed.{name}"
        weights[key] = channel_fastest(spec, weights[key])
    if spec.positions == "learned":
        return renamed(weights, TABLE)
    kept = {key: value for key, value in weights.items() if not key.endswith("attn.proj.bias")}
    return renamed(kept, SIMPLE_TABLE)


def theirs(sizes: dict[str, Any], style: str) -> nn.Module:
    """Their model without weights; a fixed table of positions is computed in place."""
    module, name = ("simple_vit", "SimpleViT") if style == "simple" else ("vit", "ViT")
    make = peer(f"vit_pytorch.{module}", name)
    arguments = {
        "image_size": sizes["image_size"],
        "patch_size": sizes["patch_size"],
        "num_classes": sizes["num_classes"],
        "dim": sizes["width"],
        "depth": sizes["depth"],
        "heads": sizes["num_heads"],
        "dim_head": sizes["head_width"],
        "mlp_dim": sizes["mlp_width"],
    }
    if style == "simple":
        return make(**arguments).eval()
    return without_weights(lambda: make(**arguments, pool=style))


def ours(sizes: dict[str, Any], style: str) -> vitkit.ViT:
    model = noisy_vit(vitkit.ViTSpec(**sizes, **STYLES[style]))
    if style == "simple":  # their output projection has no bias
        for block in model.blocks:
            nn.init.zeros_(block.attn.proj.bias)
    return model


def check(sizes: dict[str, Any], style: str) -> None:
    model = ours(sizes, style)
    images = random_images(2, *model.spec.image_size)
    assert_parity(model, theirs(sizes, style), copied(model), images, swaps=SWAPS)


@pytest.mark.parametrize("style", STYLES)
def test_two_layers(style):
    check(SMALL, style)


@pytest.mark.parametrize("style", STYLES)
def test_the_order_of_a_patch_s_values_shows(style):
    """The control of the permutation: our order, unchanged, gives other logits."""
    model, other = ours(SMALL, style), theirs(SMALL, style)
    weights = copied(model)
    weights["to_patch_embedding.2.weight"] = model.patch_embed.proj.weight.detach()
    other.load_state_dict(weights, assign=True)
    images = random_images(2, *model.spec.image_size)
    with torch.inference_mode():
        assert relative(model(images), other(images)) > 0.01


def test_heads_wider_than_the_width():
    check(SMALL | {"head_width": 80}, "cls")


@pytest.mark.parametrize(("heads", "parameters"), [(16, 54_630_376), (8, 42_047_464)])
def test_the_notebook_s_models_have_their_count(heads, parameters):
    """The README's ViT, and `DistillableViT` with 8 heads of 64."""
    sizes = NOTEBOOK | {"num_heads": heads}
    spec = vitkit.ViTSpec(**sizes, **STYLES["cls"])
    for model in (without_weights(lambda: vitkit.ViT(spec)), theirs(sizes, "cls")):
        assert sum(p.numel() for p in model.parameters()) == parameters


@pytest.mark.soak
@pytest.mark.parametrize("style", STYLES)
def test_full_size(style):
    check(NOTEBOOK, style)
