"""jeonsworld's files: their library cannot be installed, so its forward is restated here."""

from __future__ import annotations

import math

import pytest
import torch
from peers import relative
from torch import Tensor
from torch.nn import functional as F
from weights.round_trips import same_bits, stored, written

import vitkit

Weights = dict[str, Tensor]
WIDTH, HEADS, DEPTH, HIDDEN, CLASSES = 128, 2, 2, 192, 7
EMBEDDINGS, LAYER = "transformer.embeddings", "transformer.encoder.layer"
SWAPPED = (f"{LAYER}.0.attn.query.weight", f"{LAYER}.0.attn.key.weight")


def their_weights(units: tuple[int, ...] = (), seed: int = 0) -> Weights:
    """A `state_dict()` of theirs, with or without a hybrid stem, every number a random one."""
    generator = torch.Generator().manual_seed(seed)
    made: Weights = {}

    def add(name: str, *shape: int, around: float = 0.0) -> None:
        made[name] = around + 0.05 * torch.randn(shape, generator=generator)

    def norm(name: str, width: int) -> None:
        add(f"{name}.weight", width, around=1.0)
        add(f"{name}.bias", width)

    def linear(name: str, inputs: int, outputs: int) -> None:
        add(f"{name}.weight", outputs, inputs)
        add(f"{name}.bias", outputs)

    channels, cells = 3, 8
    if units:
        root, channels, cells = f"{EMBEDDINGS}.hybrid_model", 64, 1
        add(f"{root}.root.conv.weight", 64, 3, 7, 7)
        norm(f"{root}.root.gn", 64)
        for stage, (count, width) in enumerate(zip(units, (256, 512, 1024), strict=True), 1):
            for unit in range(1, count + 1):
                name = f"{root}.body.block{stage}.unit{unit}"
                inner = width // 4
                shapes = ((inner, channels, 1, 1), (inner, inner, 3, 3), (width, inner, 1, 1))
                for k, shape in enumerate(shapes, 1):
                    add(f"{name}.conv{k}.weight", *shape)
                    norm(f"{name}.gn{k}", shape[0])
                if unit == 1:
                    add(f"{name}.downsample.weight", width, channels, 1, 1)
                    norm(f"{name}.gn_proj", width)
                channels = width
    add(f"{EMBEDDINGS}.cls_token", 1, 1, WIDTH)
    add(f"{EMBEDDINGS}.position_embeddings", 1, 17, WIDTH)
    add(f"{EMBEDDINGS}.patch_embeddings.weight", WIDTH, channels, cells, cells)
    add(f"{EMBEDDINGS}.patch_embeddings.bias", WIDTH)
    for layer in range(DEPTH):
        for name in ("attention_norm", "ffn_norm"):
            norm(f"{LAYER}.{layer}.{name}", WIDTH)
        for name in ("query", "key", "value", "out"):
            linear(f"{LAYER}.{layer}.attn.{name}", WIDTH, WIDTH)
        linear(f"{LAYER}.{layer}.ffn.fc1", WIDTH, HIDDEN)
        linear(f"{LAYER}.{layer}.ffn.fc2", HIDDEN, WIDTH)
    norm("transformer.encoder.encoder_norm", WIDTH)
    linear("head", WIDTH, CLASSES)
    return made


def their_logits(w: Weights, images: Tensor) -> Tensor:
    """`VisionTransformer.forward` on weights by their names, one operation after another."""

    def norm(name: str, x: Tensor) -> Tensor:
        return F.layer_norm(x, x.shape[-1:], w[f"{name}.weight"], w[f"{name}.bias"], 1e-6)

    def linear(name: str, x: Tensor) -> Tensor:
        return x @ w[f"{name}.weight"].T + w[f"{name}.bias"]

    def heads(x: Tensor) -> Tensor:
        return x.view(len(x), -1, HEADS, WIDTH // HEADS).transpose(1, 2)

    hybrid = f"{EMBEDDINGS}.hybrid_model.root.conv.weight" in w
    maps = their_stem(w, images) if hybrid else images
    kernel = w[f"{EMBEDDINGS}.patch_embeddings.weight"]
    maps = F.conv2d(maps, kernel, w[f"{EMBEDDINGS}.patch_embeddings.bias"], kernel.shape[-2:])
    token = w[f"{EMBEDDINGS}.cls_token"].expand(len(images), -1, -1)
    x = torch.cat((token, maps.flatten(2).transpose(-1, -2)), dim=1)
    x = x + w[f"{EMBEDDINGS}.position_embeddings"]
    for layer in range(DEPTH):
        block = f"{LAYER}.{layer}"
        y = norm(f"{block}.attention_norm", x)
        q, k, v = (heads(linear(f"{block}.attn.{name}", y)) for name in ("query", "key", "value"))
        weights = (q @ k.transpose(-1, -2) / math.sqrt(WIDTH // HEADS)).softmax(dim=-1)
        x = x + linear(f"{block}.attn.out", (weights @ v).transpose(1, 2).flatten(2))
        y = F.gelu(linear(f"{block}.ffn.fc1", norm(f"{block}.ffn_norm", x)))
        x = x + linear(f"{block}.ffn.fc2", y)
    return linear("head", norm("transformer.encoder.encoder_norm", x)[:, 0])


def their_stem(w: Weights, x: Tensor) -> Tensor:
    """`ResNetV2.forward`: symmetric padding, none before the pool, sqrt(var + 1e-5)."""
    root = f"{EMBEDDINGS}.hybrid_model"

    def conv(name: str, x: Tensor, stride: int = 1, padding: int = 0) -> Tensor:
        kernel = w[f"{root}.{name}.weight"]
        variance, mean = torch.var_mean(kernel, dim=(1, 2, 3), keepdim=True, correction=0)
        return F.conv2d(x, (kernel - mean) / (variance + 1e-5).sqrt(), None, stride, padding)

    def norm(name: str, x: Tensor, groups: int = 32, eps: float = 1e-6) -> Tensor:
        weight, bias = (w[f"{root}.{name}.{kind}"] for kind in ("weight", "bias"))
        return F.group_norm(x, groups, weight, bias, eps)

    x = F.max_pool2d(norm("root.gn", conv("root.conv", x, 2, 3)).relu(), 3, 2)
    for stage in (1, 2, 3):
        unit = 1
        while f"{root}.body.block{stage}.unit{unit}.conv1.weight" in w:
            name, residual = f"body.block{stage}.unit{unit}", x
            stride = 2 if stage > 1 and unit == 1 else 1
            if unit == 1:
                residual = conv(f"{name}.downsample", x, stride)
                residual = norm(f"{name}.gn_proj", residual, residual.shape[1], 1e-5)
            x = norm(f"{name}.gn1", conv(f"{name}.conv1", x)).relu()
            x = norm(f"{name}.gn2", conv(f"{name}.conv2", x, stride, 1)).relu()
            x = (residual + norm(f"{name}.gn3", conv(f"{name}.conv3", x))).relu()
            unit += 1
    return x


def saved(weights: Weights, path):
    torch.save(weights, path)
    return vitkit.load(path, trust_pickle=True)


@torch.inference_mode()
@pytest.mark.parametrize(("units", "side"), [((), 32), ((1, 2, 1), 64)])
def test_their_file_is_computed_as_they_do(tmp_path, units, side):
    weights, images = their_weights(units), torch.randn(2, 3, side, side)
    checkpoint = saved(weights, tmp_path / "cifar10_checkpoint.bin")
    expected = their_logits(weights, images)
    assert checkpoint.format == "jeonsworld"
    assert checkpoint.model.spec.resnet_layers == units
    assert checkpoint.model.spec.num_heads == HEADS
    assert relative(checkpoint.model(images), expected) <= 1e-5
    same_bits(weights, stored(written("jeonsworld", checkpoint.model, tmp_path / "again")))
    one, other = SWAPPED
    swapped = weights | {one: weights[other], other: weights[one]}
    assert relative(their_logits(swapped, images), expected) > 1e-4


def test_images_are_squashed_to_the_range_from_minus_one(tmp_path):
    checkpoint = saved(their_weights(), tmp_path / "theirs.bin")
    preprocess = checkpoint.preprocess
    assert (preprocess.fit, preprocess.interpolation) == ("squash", "bilinear")
    assert preprocess.mean == preprocess.std == (0.5, 0.5, 0.5)
    assert checkpoint.metadata["sure"]["num_heads"] == "usual"
    assert checkpoint.metadata["sure"]["width"] == "shapes"
