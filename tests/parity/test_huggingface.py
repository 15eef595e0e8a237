"""Ours against transformers: ViT, DeiT, DINOv2 with and without registers; float32."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from peers import (
    Weights,
    assert_parity,
    noisy_vit,
    peer,
    random_images,
    relative,
    renamed,
    split_qkv,
    without_weights,
)

import vitkit

# Sizes: width, heads, depth, MLP width, patch, pixels.
SMALL = (192, 3, 2, 768, 16, 96)
BASE = (768, 12, 12, 3072, 16, 224)
DINO_SMALL = (384, 6, 2, 1536, 14, 98)
DINO_BASE = (768, 12, 12, 3072, 14, 518)
CLASSES = 11

BLOCK = {  # what ViT and DeiT share, below `layers.*`
    "norm1": "layernorm_before",
    "attn.q": "attention.q_proj",
    "attn.k": "attention.k_proj",
    "attn.v": "attention.v_proj",
    "attn.proj": "attention.o_proj",
    "norm2": "layernorm_after",
    "mlp.fc1": "mlp.fc1",
    "mlp.fc2": "mlp.fc2",
}
DINO_BLOCK = BLOCK | {
    "norm1": "norm1",
    "norm2": "norm2",
    "ls1.gamma": "layer_scale1.lambda1",
    "ls2.gamma": "layer_scale2.lambda1",
}
GATED = {"mlp.fc1_g": "mlp.gate_proj", "mlp.fc1_x": "mlp.up_proj", "mlp.fc2": "mlp.down_proj"}


def table(root: str, layers: str, block: dict[str, str], heads: dict[str, str]) -> dict[str, str]:
    """Our keys -> those of a model whose body is called `root`."""
    rows = {
        "cls_token": "embeddings.cls_token",
        "dist_token": "embeddings.distillation_token",
        "reg_token": "embeddings.register_tokens",
        "pos_embed": "embeddings.position_embeddings",
        "patch_embed.proj": "embeddings.patch_embeddings.projection",
        "norm": "layernorm",
    }
    rows |= {f"blocks.*.{ours}": f"{layers}.*.{theirs}" for ours, theirs in block.items()}
    return {ours: f"{root}.{theirs}" for ours, theirs in rows.items()} | heads


VIT = table("vit", "layers", BLOCK, {"head": "classifier"})
DEIT = table("deit", "layers", BLOCK, {"head": "classifier"})
TAUGHT = table(
    "deit",
    "layers",
    BLOCK,
    {"head": "cls_classifier", "head_dist": "distillation_classifier"},
)
DINO = table("dinov2", "encoder.layer", DINO_BLOCK, {"head": "classifier"})
DINO_GATED = table("dinov2", "encoder.layer", DINO_BLOCK | GATED, {"head": "classifier"})
DINO_REGISTERS = table("dinov2_with_registers", "encoder.layer", DINO_BLOCK, {"head": "classifier"})
VIT_SWAPS = [
    ("vit.layers.0.layernorm_before.weight", "vit.layers.0.layernorm_after.weight"),
    ("vit.layers.1.attention.k_proj.weight", "vit.layers.1.attention.v_proj.weight"),
]
DEIT_SWAPS = [tuple(key.replace("vit.", "deit.") for key in pair) for pair in VIT_SWAPS] + [
    ("deit.embeddings.cls_token", "deit.embeddings.distillation_token")
]


def theirs(config: str, model: str, size: tuple[int, ...], **settings: Any) -> torch.nn.Module:
    """A model of theirs without weights, from a config made here."""
    make_config, make_model = peer("transformers", config, model)
    width, heads, depth, mlp_width, patch, pixels = size
    shape = {
        "hidden_size": width,
        "num_attention_heads": heads,
        "num_hidden_layers": depth,
        "patch_size": patch,
        "image_size": pixels,
        "num_labels": CLASSES,
    }
    if "Dinov2" not in config:  # DINOv2's config has a ratio, 4, instead
        shape["intermediate_size"] = mlp_width
    return without_weights(lambda: make_model(make_config(**shape, **settings)))


def ours(size: tuple[int, ...], **changes: Any) -> vitkit.ViT:
    width, heads, depth, mlp_width, patch, pixels = size
    shape = {
        "width": width,
        "num_heads": heads,
        "depth": depth,
        "mlp_width": mlp_width,
        "patch_size": patch,
        "image_size": pixels,
        "num_classes": CLASSES,
        # transformers resamples so at run time, all but DINOv2 with registers
        "position_resampling": "bicubic",
    }
    return noisy_vit(vitkit.ViTSpec(**shape | changes))


def logits_of(output: Any) -> torch.Tensor:
    return output.logits


def copied(model: vitkit.ViT, rows: dict[str, str]) -> Weights:
    return renamed(split_qkv(model.state_dict()), rows)


def check_vit(size: tuple[int, ...]) -> None:
    model = ours(size, norm_eps=1e-12)  # their default, not the published 1e-6
    other = theirs("ViTConfig", "ViTForImageClassification", size)
    assert other.config.layer_norm_eps == model.spec.norm_eps
    images = random_images(2, size[-1])
    assert_parity(model, other, copied(model, VIT), images, swaps=VIT_SWAPS, read=logits_of)


def test_vit():
    check_vit(SMALL)


@pytest.mark.parametrize("act", ["gelu_pytorch_tanh", "quick_gelu", "relu", "silu"])
def test_vit_with_other_activations_and_without_qkv_bias(act):
    model = ours(SMALL, activation=act.replace("pytorch_", ""), qkv_bias=False)
    other = theirs(
        "ViTConfig", "ViTForImageClassification", SMALL, hidden_act=act, qkv_bias=False,
        layer_norm_eps=1e-6,
    )  # fmt: skip
    weights, images = copied(model, VIT), random_images(2, SMALL[-1])
    assert_parity(model, other, weights, images, swaps=VIT_SWAPS, read=logits_of)


def test_vit_at_another_size():
    model = ours(SMALL, norm_eps=1e-12)
    other = theirs("ViTConfig", "ViTForImageClassification", SMALL)
    assert_parity(
        model, other, copied(model, VIT), random_images(2, 128, 80), swaps=VIT_SWAPS,
        read=logits_of, interpolate_pos_encoding=True,
    )  # fmt: skip


def test_vit_s_attention_maps_are_those_of_our_record():
    """Theirs come out of the eager kernel only."""
    model = ours(SMALL, norm_eps=1e-12)
    other = theirs("ViTConfig", "ViTForImageClassification", SMALL, attn_implementation="eager")
    other.load_state_dict(copied(model, VIT), assign=True)
    record, images = vitkit.Record(attention=[0, 1], tokens=[0]), random_images(2, SMALL[-1])
    with torch.inference_mode():
        model(images, record)
        output = other(images, output_attentions=True, output_hidden_states=True)
    for layer, maps in enumerate(output.attentions):
        torch.testing.assert_close(record.attention[layer], maps, rtol=0, atol=1e-6)
    torch.testing.assert_close(record.tokens[0], output.hidden_states[1], rtol=1e-5, atol=1e-5)


def check_distilled(size: tuple[int, ...]) -> None:
    model = ours(size, norm_eps=1e-12, distillation_token=True)
    other = theirs("DeiTConfig", "DeiTForImageClassificationWithTeacher", size)
    weights, images = copied(model, TAUGHT), random_images(2, size[-1])
    swaps = [*DEIT_SWAPS, ("cls_classifier.weight", "distillation_classifier.weight")]
    assert_parity(model, other, weights, images, swaps=swaps, read=logits_of)
    other.load_state_dict(weights, assign=True)
    with torch.inference_mode():
        output, features = other(images), model.forward_features(images)
        heads = model.forward_heads(features)
        assert relative(heads[0], output.cls_logits) <= 1e-5
        assert relative(heads[1], output.distillation_logits) <= 1e-5


def test_deit_with_a_teacher_averages_both_heads():
    check_distilled(SMALL)


def test_deit_without_a_teacher_reads_the_class_token_and_keeps_the_other():
    model = ours(SMALL, norm_eps=1e-12, distillation_token=True, distilled_readout="cls")
    other = theirs("DeiTConfig", "DeiTForImageClassification", SMALL)
    kept = {key: value for key, value in model.state_dict().items() if "head_dist" not in key}
    weights, images = renamed(split_qkv(kept), DEIT), random_images(2, SMALL[-1])
    assert_parity(model, other, weights, images, swaps=DEIT_SWAPS, read=logits_of)


def with_mask_token(weights: Weights, root: str, width: int) -> Weights:
    """DINOv2's mask token, which only pre-training uses: anything at all."""
    return weights | {f"{root}.embeddings.mask_token": random_images(1, 1, width)[0, 0]}


def check_dino(
    size: tuple[int, ...], pixels: tuple[int, int], mlp: str = "plain", count: int = 2
) -> None:
    gated = {"mlp": mlp, "activation": "silu", "mlp_width": 1024} if mlp != "plain" else {}
    model = ours(size, pooling="cls_mean", layer_scale=1.0, **gated)
    other = theirs("Dinov2Config", "Dinov2ForImageClassification", size, use_swiglu_ffn=bool(gated))
    assert other.config.layer_norm_eps == model.spec.norm_eps
    weights = split_qkv(model.state_dict())
    if mlp == "swiglu_packed":
        weights = split_gates(weights)
    weights = renamed(weights, DINO_GATED if gated else DINO)
    weights = with_mask_token(weights, "dinov2", size[0])
    layer = "dinov2.encoder.layer.0"
    swaps = [
        (f"{layer}.norm1.weight", f"{layer}.norm2.weight"),
        (f"{layer}.layer_scale1.lambda1", f"{layer}.layer_scale2.lambda1"),
    ]
    if gated:
        swaps.append((f"{layer}.mlp.gate_proj.weight", f"{layer}.mlp.up_proj.weight"))
    assert_parity(model, other, weights, random_images(count, *pixels), swaps=swaps, read=logits_of)


def split_gates(weights: Weights) -> Weights:
    """A packed SwiGLU's `fc1` as gate and value, in this order."""
    split: Weights = {}
    for key, value in weights.items():
        if ".mlp.fc1." in key:
            parts = zip(("fc1_g", "fc1_x"), value.chunk(2), strict=True)
            split |= {key.replace("fc1", name): part for name, part in parts}
        else:
            split[key] = value
    return split


@pytest.mark.parametrize("mlp", ["plain", "swiglu_packed", "swiglu_split"])
@pytest.mark.parametrize("pixels", [(98, 98), (140, 56)])
def test_dinov2(mlp, pixels):
    check_dino(DINO_SMALL, pixels, mlp)


def check_dino_registers(size: tuple[int, ...], pixels: tuple[int, int], count: int = 2) -> None:
    """Theirs: one table row for the class token, none for registers. Ours: none for either, so
    their class token plus its row is our class token."""
    model = ours(
        size, pooling="cls_mean", layer_scale=1.0, num_registers=4, positions_cover_prefix=False,
        position_resampling="bicubic_antialias",
    )  # fmt: skip
    other = theirs(
        "Dinov2WithRegistersConfig", "Dinov2WithRegistersForImageClassification", size,
        num_register_tokens=4,
    )  # fmt: skip
    weights = copied(model, DINO_REGISTERS)
    root, row = "dinov2_with_registers", 0.02 * random_images(1, 1, size[0])[:, :1, 0]
    places = f"{root}.embeddings.position_embeddings"
    weights[places] = torch.cat([row, weights[places]], dim=1)
    weights[f"{root}.embeddings.cls_token"] = weights[f"{root}.embeddings.cls_token"] - row
    weights = with_mask_token(weights, root, size[0])
    layer = f"{root}.encoder.layer.1"
    swaps = [
        (f"{layer}.norm1.weight", f"{layer}.norm2.weight"),
        (f"{layer}.layer_scale1.lambda1", f"{layer}.layer_scale2.lambda1"),
    ]
    assert_parity(model, other, weights, random_images(count, *pixels), swaps=swaps, read=logits_of)
    # Registers are read by no head: they must show through attention.
    registers = f"{root}.embeddings.register_tokens"
    other.load_state_dict(weights | {registers: -weights[registers]}, assign=True)
    with torch.inference_mode():
        images = random_images(count, *pixels)
        assert relative(model(images), other(images).logits) > 1e-4


@pytest.mark.parametrize("pixels", [(98, 98), (140, 56)])
def test_dinov2_with_registers(pixels):
    check_dino_registers(DINO_SMALL, pixels)


@pytest.mark.soak
def test_full_size_vit():
    check_vit(BASE)


@pytest.mark.soak
def test_full_size_deit():
    check_distilled(BASE)


@pytest.mark.soak
@pytest.mark.parametrize("pixels", [(518, 518), (224, 224)])
def test_full_size_dinov2(pixels):
    check_dino(DINO_BASE, pixels, count=1)
    check_dino_registers(DINO_BASE, pixels, count=1)
