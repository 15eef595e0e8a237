"""Files that are wrong, and models that a format cannot hold: one line says what and where."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from weights.round_trips import noisy, without_our_entry, written

import vitkit
from vitkit import CheckpointError

BASE = {"image_size": 32, "patch_size": 8, "width": 128, "depth": 2, "num_heads": 2,
        "mlp_width": 96, "num_classes": 7}  # fmt: skip
FIELDS: dict[str, dict[str, Any]] = {
    "google": {"activation": "gelu_tanh"},
    "lucidrains": {"stem": "normed_linear", "qkv_bias": False, "norm_eps": 1e-5},
    "dinov2": {"num_classes": 0, "layer_scale": 1e-5},
    "jeonsworld": {"stem": "resnet", "resnet_layers": (1, 2, 1), "resnet_variant": "jeonsworld",
                   "image_size": 64, "patch_size": 16},
    "deit": {"distillation_token": True},
    "google hybrid": {"activation": "gelu_tanh", "stem": "resnet", "patch_size": 32,
                      "image_size": 64},
}  # fmt: skip
Tensors = dict[str, Any]
Change = Callable[[Tensors], object]


def model_of(case: str, **fields: Any) -> vitkit.ViT:
    return noisy(vitkit.ViTSpec(**BASE | FIELDS.get(case, {}) | fields))


def spoiled(name: str, folder: Path, change: Change) -> Path:
    """The files of a format after a change of their tensors, by their names."""
    written(name, model_of(name), folder)
    if name == "google":
        with np.load(folder / "model.npz") as file:
            arrays = dict(file)
        change(arrays)
        np.savez(folder / "model.npz", **arrays)
    else:
        file = folder / "model.safetensors"
        without_our_entry(file)
        with safe_open(file, framework="pt") as opened:
            metadata = opened.metadata()
        tensors = load_file(file)
        change(tensors)
        save_file(tensors, file, metadata)
    return folder


def refused(message: str, act: Callable[[], object]) -> None:
    with pytest.raises(CheckpointError, match=message) as caught:
        act()
    assert "\n" not in str(caught.value)


NORMS = {
    "google": "Transformer/encoder_norm/bias", "huggingface": "vit.layernorm.bias",
    "torchvision": "encoder.ln.bias", "jeonsworld": "transformer.encoder.encoder_norm.bias",
    "lucidrains": "transformer.norm.bias", "dinov2": "norm.bias", "deit": "norm.bias",
    "timm": "norm.bias",
}  # fmt: skip
"""The last norm of each format."""


@pytest.mark.parametrize("name", NORMS)
def test_a_tensor_that_is_missing_unknown_or_of_another_shape(tmp_path, name):
    key = NORMS[name]
    short = key.removeprefix("vit.")
    made = np.ones if name == "google" else torch.ones
    faults: dict[str, Change] = {
        f"as {name}: tensor {short} is missing": lambda tensors: tensors.pop(key),
        f"as {name}: 1 unknown tensor: further": lambda t: t.update(further=made(2)),
        rf"as {name}: {short} gives norm.bias the shape \(3,\); the model needs \(128,\)":
            lambda t: t.update({key: made(3)}),
    }  # fmt: skip
    for number, (message, change) in enumerate(faults.items()):
        place = spoiled(name, tmp_path / str(number), change)
        refused(message, lambda: vitkit.load(place))  # noqa: B023


def renamed(old: str, new: str) -> Change:
    return lambda tensors: tensors.update({new: tensors.pop(old)})


def given(**tensors: Any) -> Change:
    names = {name.replace("__", "."): tensor for name, tensor in tensors.items()}
    return lambda old: old.update(names)


ONES = torch.ones(3)
BLOCK = "Transformer/encoderblock_0/"
LAYER = "vit.encoder.layer.1."
BODY = "transformer.embeddings.hybrid_model.body.block2.unit1."
WRONG: list[tuple[str, Change, str]] = [
    ("google", lambda t: t.update({f"{BLOCK}LayerNorm_1/bias": np.ones(128)}), "mixes two layouts"),
    ("google", lambda t: t.update({"Transformer/encoderblock/a": np.ones((2, 3)),
                                   "Transformer/encoderblock/b": np.ones((3, 3))}),
     "2 stacks of different heights"),
    ("huggingface", lambda t: t.update({f"{LAYER}layernorm_before.bias"[4:]: torch.ones(64)}),
     "two generations of names"),
    ("jeonsworld", lambda t: t.pop(f"{BODY}conv1.weight"), "unit1.conv1.weight is missing"),
    ("dinov2", given(pos_embed=torch.zeros(1, 16, 128)), "not a square grid"),
    ("deit", given(blocks__0__norm11__weight=ONES, blocks__0__norm21__weight=2 * ONES), "parallel"),
    ("timm", given(pos_embed=torch.zeros(1, 12, 128)), "not a square grid"),
    ("timm", lambda t: t.pop("blocks.0.mlp.fc2.weight"), "not a valid file"),
    ("timm", given(patch_embed__backbone__conv1__0__weight=torch.zeros(1)), "is not a ResNetV2"),
    ("timm", renamed("blocks.0.norm1.bias", "blocks.3.norm1.bias"), "block 2 is missing"),
    ("lucidrains", lambda t: t.pop("transformer.layers.1.0.to_out.0.weight"),
     "to_out.0.weight is missing"),
    ("lucidrains", given(transformer__layers__0__0__to_qkv__weight=torch.zeros(99, 128)),
     "width 33, .*; pass num_heads"),
    ("lucidrains", given(to_patch_embedding__2__weight=torch.zeros(128, 96)),
     "96 values per patch are not a square of 1 or 3 channels; pass patch_size"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "change", "message"), WRONG)
def test_a_file_that_contradicts_itself(tmp_path, name, change, message):
    place = spoiled(name, tmp_path / "files", change)
    refused(f"{place}.*{message}", lambda: vitkit.load(place))


GIVEN: list[tuple[str, dict[str, Any], str]] = [
    ("google", {"num_heads": 4}, "4 contradicts the kernels, which have 2 heads"),
    ("torchvision", {"image_size": 64}, "the file has positions for 16"),
    ("lucidrains", {"patch_size": 7}, "192 values per patch are not 7 of 1 or 3 channels"),
    ("lucidrains", {"in_channels": 1}, "192 values per patch are not a square"),
    ("lucidrains", {"num_heads": 3}, "width 128, which 42 per head"),
    ("lucidrains", {"pooling": "mean"}, "pooling 'mean_all'"),
]


@pytest.mark.parametrize(("name", "fields", "message"), GIVEN)
def test_what_the_user_says_must_fit_the_file(tmp_path, name, fields, message):
    place = spoiled(name, tmp_path / "files", lambda tensors: None)
    refused(message, lambda: vitkit.load(place, **fields))


CONFIGS: list[tuple[str, dict[str, Any], str]] = [
    ("huggingface", {"hidden_act": "mish"}, "hidden_act 'mish'"),
    ("huggingface", {"num_attention_heads": 5}, "num_heads 5"),
    ("huggingface", {"image_size": 64}, "the file has positions for 16"),
    ("huggingface", {"num_attention_heads": "4"}, "num_heads"),
    ("huggingface", {"id2label": ["one"]}, "id2label must map"),
    ("timm", {"architecture": "vit_base_patch16_224", "model_args": {}}, "a model of width 768"),
    ("timm", {"architecture": "vit_small_patch16_rope_ape_224"}, "rotary positions"),
    ("timm", {"architecture": "x", "global_pool": "max"}, "global_pool 'max'"),
    ("timm", {"architecture": "x", "model_args": {"act_layer": "mish"}}, "act_layer 'mish'"),
]


@pytest.mark.parametrize(("name", "changes", "message"), CONFIGS)
def test_a_config_that_cannot_be_followed(tmp_path, name, changes, message):
    file = written(name, model_of(name), tmp_path / "files") / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))
    refused(message, lambda: vitkit.load(file.parent))


DINO = {"layer_scale": 1.0, "pooling": "cls_mean", "mlp_width": 512}
PLAIN = {"stem": "convolution"}
MEAN = {"class_token": False, "pooling": "mean"}
SIMPLE = MEAN | {"positions": "sincos_2d"}
HELD: list[tuple[str, dict[str, Any], str]] = [
    ("google", {"pooling": "mean"}, "cannot hold pooling = 'mean'"),
    ("google hybrid", {"pooling": "map", "class_token": False}, "cannot hold stem = 'resnet'"),
    ("huggingface", {"num_registers": 2}, "DINOv2's classes have no mlp_width 96"),
    ("huggingface", {"pooling": "map"}, "cannot hold pooling = 'map'"),
    ("huggingface", {"representation_width": 8}, "cannot hold representation_width = 8"),
    ("huggingface", DINO | {"mlp_width": 100}, "whole mlp_ratio, such as 512 for 4"),
    ("huggingface", DINO | {"image_size": (32, 48)}, "assumes a square grid"),
    ("jeonsworld", {"resnet_layers": (1, 1), "patch_size": 8}, "has 3 stages"),
    ("jeonsworld", {"resnet_variant": "published"}, "cannot hold resnet_variant = 'published'"),
    ("dinov2", {"num_classes": 7, "pooling": "mean_all"}, "cannot hold pooling = 'mean_all'"),
    ("dinov2", {"pooling": "cls_mean"}, "without a head return the class token"),
    ("dinov2", {"activation": "silu"}, "cannot hold activation = 'silu'"),
    ("dinov2", {"positions": "rope", "qkv_bias": "no_key"}, "cannot hold positions = 'rope'"),
    ("torchvision", {"positions": "rope", "class_token": False, "pooling": "mean"},
     "cannot hold class_token = False"),
    ("timm", {"positions": "rope"}, "cannot store: qkv_bias: the biases"),
    ("lucidrains", SIMPLE, "attn.proj.bias is not zero"),
    ("lucidrains", {"num_heads": 1}, "attn.proj is not an identity"),
    ("lucidrains", PLAIN | MEAN, "cannot hold"),
    ("lucidrains", {"pooling": "mean_all"}, "cannot hold"),
    ("lucidrains", MEAN | {"norm_before_pool": False}, "cannot hold norm_before_pool = False"),
    ("lucidrains", {"num_registers": 2}, "cannot hold num_registers = 2, only 0"),
    ("lucidrains", PLAIN | {"num_classes": 0}, "ViT of 0.40.2 always has a head"),
]  # fmt: skip


@pytest.mark.parametrize(("case", "fields", "message"), HELD)
def test_what_a_format_has_no_place_for_is_not_written(tmp_path, case, fields, message):
    name = case.partition(" ")[0]
    model = model_of(case, **fields)
    refused(rf"{name}.*{message}", lambda: written(name, model, tmp_path / "out"))
    assert not (tmp_path / "out").exists()


def test_a_simple_vit_always_has_a_head(tmp_path):
    model = model_of("lucidrains", **SIMPLE, num_classes=0)
    for block in model.blocks:
        torch.nn.init.zeros_(block.attn.proj.bias)
    refused("SimpleViT of 1.17.3 always has a head", lambda: written("lucidrains", model, tmp_path))
