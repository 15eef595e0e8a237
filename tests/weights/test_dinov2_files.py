"""DINOv2's own files, and DINOv3's for reading: against timm's own readers of them."""

import re
from functools import partial

import pytest
import torch
from peers import peer, relative
from torch import Tensor, nn
from weights.round_trips import same_bits, stored, written

import vitkit
from vitkit import CheckpointError

Weights = dict[str, Tensor]
WIDTH, DEPTH, HEADS, SIDE = 128, 2, 2, 56
HIDDEN = {"plain": 512, "swiglu_packed": 344, "swiglu_split": 344}
SWAPPED = ("blocks.0.norm1.weight", "blocks.0.norm2.weight")
SCALES = ("blocks.1.ls1.gamma", "blocks.1.ls2.gamma")


def their_weights(
    mlp: str = "plain", registers: int = 0, *, third: bool = False, mask: bool = True
) -> Weights:
    """A backbone's `state_dict()` by their names, of random numbers; `third`: of DINOv3."""
    generator = torch.Generator().manual_seed(0)
    made: Weights = {}

    def add(name: str, *shape: int, around: float = 0.0) -> None:
        made[name] = around + 0.05 * torch.randn(shape, generator=generator)

    def linear(name: str, inputs: int, outputs: int) -> None:
        add(f"{name}.weight", outputs, inputs)
        add(f"{name}.bias", outputs)

    patch, hidden = (16 if third else 14), HIDDEN[mlp]
    add("cls_token", 1, 1, WIDTH)
    add("mask_token", 1, WIDTH)
    add("patch_embed.proj.weight", WIDTH, 3, patch, patch)
    add("patch_embed.proj.bias", WIDTH)
    if registers:
        add("storage_tokens" if third else "register_tokens", 1, registers, WIDTH)
    if third:
        count = WIDTH // HEADS // 4
        made["rope_embed.periods"] = 100.0 ** (2 * torch.arange(count) / (2 * count))
    else:
        add("pos_embed", 1, 17, WIDTH)
    layers = {"plain": [("fc1", 1), ("fc2", 0)], "swiglu_packed": [("w12", 2), ("w3", 0)],
              "swiglu_split": [("w1", 1), ("w2", 1), ("w3", 0)]}[mlp]  # fmt: skip
    for i in range(DEPTH):
        for name in ("norm1", "norm2"):
            add(f"blocks.{i}.{name}.weight", WIDTH, around=1.0)
            add(f"blocks.{i}.{name}.bias", WIDTH)
        linear(f"blocks.{i}.attn.qkv", WIDTH, 3 * WIDTH)
        if third and mask:
            kept = torch.ones(3, WIDTH)
            kept[1] = 0
            made[f"blocks.{i}.attn.qkv.bias_mask"] = kept.flatten()
        linear(f"blocks.{i}.attn.proj", WIDTH, WIDTH)
        for name in ("ls1", "ls2"):
            add(f"blocks.{i}.{name}.gamma", WIDTH, around=1.0)
        for name, parts in layers:
            sizes = (WIDTH, parts * hidden) if parts else (hidden, WIDTH)
            linear(f"blocks.{i}.mlp.{name}", *sizes)
    add("norm.weight", WIDTH, around=1.0)
    add("norm.bias", WIDTH)
    return made


def in_timm(weights: Weights) -> nn.Module:
    """timm's DINOv2, filled by timm's own reader of these files."""
    make, read = peer("timm.models.vision_transformer", "VisionTransformer", "checkpoint_filter_fn")
    settings: dict[str, object] = {"mlp_ratio": 4}
    if "blocks.0.mlp.w12.weight" in weights:
        packed = peer("timm.layers", "SwiGLUPacked")
        hidden = weights["blocks.0.mlp.w12.weight"].shape[0]
        settings = {"mlp_layer": packed, "act_layer": nn.SiLU, "mlp_ratio": hidden / WIDTH}
    if "register_tokens" in weights:
        settings |= {"reg_tokens": 4, "no_embed_class": True}
    model = make(
        img_size=SIDE, patch_size=14, embed_dim=WIDTH, depth=DEPTH, num_heads=HEADS,
        init_values=1e-5, num_classes=0, **settings,
    ).eval()  # fmt: skip
    model.load_state_dict(read(dict(weights), model), strict=True)
    return model


def in_timm_third(weights: Weights, gated: bool, bias: bool = True) -> nn.Module:
    """timm's DINOv3, filled by timm's own reader of these files."""
    make, read = peer("timm.models.eva", "Eva", "checkpoint_filter_fn")
    settings: dict[str, object] = {"mlp_ratio": 344 / WIDTH if gated else 4}
    if gated:
        settings |= {"swiglu_mlp": True, "swiglu_align_to": 8}
    model = make(
        img_size=64, patch_size=16, embed_dim=WIDTH, depth=DEPTH, num_heads=HEADS, num_classes=0,
        global_pool="token", qkv_bias=bias, init_values=1e-5, rope_type="dinov3",
        rope_temperature=100, rope_rotate_half=True, use_rot_pos_emb=True, use_abs_pos_emb=False,
        num_reg_tokens=4, use_fc_norm=False, dynamic_img_size=True,
        norm_layer=partial(nn.LayerNorm, eps=1e-5), **settings,
    ).eval()  # fmt: skip
    model.load_state_dict(read(dict(weights), model), strict=True)
    return model


def saved(weights, path, **overrides):
    torch.save(weights, path)
    return vitkit.load(path, trust_pickle=True, **overrides)


CASES = [("plain", 0), ("swiglu_packed", 0), ("plain", 4), ("swiglu_packed", 4)]


@torch.inference_mode()
@pytest.mark.parametrize("overrides", [{}, {"positions_cover_prefix": False}], ids=str)
@pytest.mark.parametrize(("mlp", "registers"), CASES)
def test_their_file_is_computed_as_timm_does(tmp_path, mlp, registers, overrides):
    weights, images = their_weights(mlp, registers), torch.randn(2, 3, SIDE, SIDE)
    checkpoint = saved(weights, tmp_path / "dinov2.pth", **overrides)
    spec, features = checkpoint.model.spec, checkpoint.model(images)
    assert checkpoint.format == "dinov2"
    assert (spec.num_registers, spec.mlp, spec.num_heads) == (registers, mlp, HEADS)
    assert spec.position_resampling == ("bicubic_antialias" if registers else "bicubic_offset")
    assert any(note.startswith("mask_token: ") for note in checkpoint.metadata["notes"])
    expected = in_timm(weights)(images)
    assert relative(features, expected) <= 1e-5
    for one, other in (SWAPPED, SCALES):
        swapped = weights | {one: weights[other], other: weights[one]}
        assert relative(in_timm(swapped)(images), expected) > 1e-4


@torch.inference_mode()
def test_the_hub_s_linear_classifier(tmp_path):
    weights, images = their_weights("plain", 4), torch.randn(2, 3, SIDE, SIDE)
    head = {"linear_head.weight": torch.randn(7, 2 * WIDTH), "linear_head.bias": torch.randn(7)}
    wrapped = {f"backbone.{name}": tensor for name, tensor in weights.items()} | head
    checkpoint = saved(wrapped, tmp_path / "lc.pth")
    tokens = in_timm(weights).forward_features(images)
    read = torch.cat([tokens[:, 0], tokens[:, 5:].mean(dim=1)], dim=1)
    expected = read @ head["linear_head.weight"].T + head["linear_head.bias"]
    assert relative(checkpoint.model(images), expected) <= 1e-5
    again = stored(written("dinov2", checkpoint.model, tmp_path / "again"))
    assert sorted(again) == sorted(wrapped)
    wrapped["linear_head.weight"] = torch.randn(7, 5 * WIDTH)
    with pytest.raises(CheckpointError, match="use the one-layer classifier, which reads 256"):
        saved(wrapped, tmp_path / "lc4.pth")


@pytest.mark.parametrize("who", ["teacher", "student"])
def test_training_runs_whole_and_sharded(tmp_path, who):
    weights = their_weights()
    plain = saved(weights, tmp_path / "plain.pth").model.state_dict()
    run = {f"backbone.{re.sub(r'^blocks.', 'blocks.0.', name)}": t for name, t in weights.items()}
    assert "backbone.blocks.0.1.norm1.weight" in run
    run["dino_head.mlp.0.weight"] = torch.zeros(3, WIDTH)
    checkpoint = saved({who: run, "iteration": 12}, tmp_path / "run.pth")
    same_bits(plain, checkpoint.model.state_dict())
    notes = checkpoint.metadata["notes"]
    assert "dino_head.mlp.0.weight: the head of self-supervised training" in notes
    twice = weights | {"blocks.0.0.norm1.weight": torch.zeros(WIDTH)}
    with pytest.raises(CheckpointError, match="a block occurs twice"):
        saved(twice, tmp_path / "twice.pth")


@torch.inference_mode()
@pytest.mark.parametrize("mlp", ["plain", "swiglu_split"])
@pytest.mark.parametrize("side", [64, 96])
def test_dinov3_is_computed_as_timm_does(tmp_path, mlp, side):
    weights, images = their_weights(mlp, 4, third=True), torch.randn(2, 3, side, side)
    weights["local_cls_norm.weight"] = torch.ones(WIDTH)
    checkpoint = saved(weights, tmp_path / "dinov3.pth")
    spec = checkpoint.model.spec
    assert (spec.qkv_bias, spec.positions, spec.norm_eps) == ("no_key", "rope", 1e-5)
    assert (spec.num_heads, spec.num_registers, spec.image_size) == (HEADS, 4, (224, 224))
    del weights["local_cls_norm.weight"]
    expected = in_timm_third(weights, mlp != "plain")(images)
    assert relative(checkpoint.model(images), expected) <= 1e-5


@torch.inference_mode()
def test_dinov3_without_biases_and_with_all_of_them(tmp_path):
    weights = their_weights("plain", 4, third=True, mask=False)
    images = torch.randn(2, 3, 64, 64)
    whole = saved(weights, tmp_path / "whole.pth").model
    assert whole.spec.qkv_bias is True
    bare = {n: t for n, t in weights.items() if "qkv.bias" not in n}
    model = saved(bare, tmp_path / "bare.pth").model
    assert model.spec.qkv_bias is False
    expected = in_timm_third(weights, gated=False, bias=False)(images)
    assert relative(model(images), expected) <= 1e-5


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_rounded_periods_are_noted(tmp_path, dtype):
    weights = their_weights("plain", 4, third=True)
    exact = saved(weights, tmp_path / "exact.pth").metadata["notes"]
    weights["rope_embed.periods"] = weights["rope_embed.periods"].bfloat16().to(dtype)
    rounded = saved(weights, tmp_path / "rounded.pth").metadata["notes"]
    (warning,) = set(rounded) - set(exact)
    assert "periods are rounded to bfloat16" in warning


@pytest.mark.parametrize(
    ("name", "tensor", "message"),
    [
        ("rope_embed.periods", torch.arange(1.0, 17.0), "do not match rope_temperature 100"),
        ("blocks.0.attn.qkv.bias_mask", torch.ones(3 * WIDTH), "keeps a bias of the keys"),
        ("cls_norm.weight", torch.ones(WIDTH), "unknown tensor: cls_norm"),
    ],
)
def test_a_dinov3_that_is_wrong_is_refused_in_one_line(tmp_path, name, tensor, message):
    weights = their_weights("plain", 4, third=True) | {name: tensor}
    with pytest.raises(CheckpointError, match=message) as caught:
        saved(weights, tmp_path / "wrong.pth")
    assert "\n" not in str(caught.value)
