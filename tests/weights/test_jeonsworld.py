"""jeonsworld's files: their library cannot be installed, so its forward is restated here."""

import math

import pytest
import torch
from peers import relative
from torch import Tensor
from torch.nn import functional as F
from weights.round_trips import noisy, stored, written

import vitkit

Weights = dict[str, Tensor]
WIDTH, HEADS, DEPTH = 128, 2, 2
SMALL = {"image_size": 32, "patch_size": 8, "width": WIDTH, "depth": DEPTH, "num_heads": HEADS,
         "mlp_width": 192, "num_classes": 7, "position_resampling": "bilinear_aligned"}  # fmt: skip
HYBRID = SMALL | {"stem": "resnet", "resnet_variant": "jeonsworld", "resnet_layers": (1, 2, 1),
                  "image_size": 64, "patch_size": 16}  # fmt: skip
EMBEDDINGS, LAYER = "transformer.embeddings", "transformer.encoder.layer"
SWAPPED = (f"{LAYER}.0.attn.query.weight", f"{LAYER}.0.attn.key.weight")


class Noted(dict[str, Tensor]):
    """Weights that note which of them are read."""

    def __init__(self, weights: Weights) -> None:
        super().__init__(weights)
        self.read = set[str]()

    def __getitem__(self, name: str) -> Tensor:
        self.read.add(name)
        return super().__getitem__(name)


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


@torch.inference_mode()
@pytest.mark.parametrize("fields", [SMALL, HYBRID], ids=["plain", "hybrid"])
def test_our_files_and_theirs_are_computed_as_they_do(tmp_path, fields):
    """Their forward reads each tensor of the file, and no other."""
    model = noisy(vitkit.ViTSpec(**fields))
    weights = Noted(stored(written("jeonsworld", model, tmp_path / "ours")))
    images = torch.randn(2, 3, *model.spec.image_size)
    expected = their_logits(weights, images)
    assert weights.read == weights.keys()
    assert relative(model(images), expected) <= 1e-5
    torch.save(dict(weights), tmp_path / "cifar10_checkpoint.bin")
    checkpoint = vitkit.load(tmp_path / "cifar10_checkpoint.bin", trust_pickle=True)
    assert checkpoint.format == "jeonsworld"
    assert torch.equal(checkpoint.model(images), model(images))
    preprocess, sure = checkpoint.preprocess, checkpoint.metadata["sure"]
    assert (preprocess.fit, preprocess.interpolation) == ("squash", "bilinear")
    assert preprocess.mean == preprocess.std == (0.5, 0.5, 0.5)
    assert (sure["num_heads"], sure["width"]) == ("usual", "shapes")
    one, other = SWAPPED
    swapped = weights | {one: weights[other], other: weights[one]}
    assert relative(their_logits(swapped, images), expected) > 1e-4
