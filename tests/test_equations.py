"""Eq. 1 to 4 of "An Image is Worth 16x16 Words", restated in plain algebra on the modules' weights.

Nothing here is shared with the library: loops over patches, heads and tokens, and numpy.
"""

import math

import numpy as np
import pytest
import torch
from noise import fill_with_noise

import vitkit

SPEC = vitkit.ViTSpec(
    image_size=(8, 12), patch_size=(4, 2), in_channels=3, num_classes=5, width=12, depth=2,
    num_heads=3, mlp_width=20,
)  # fmt: skip


@pytest.fixture
def model() -> vitkit.ViT:
    model = vitkit.ViT(SPEC).eval()
    fill_with_noise(model, std=0.5)
    return model.double()


def numbers(model: vitkit.ViT) -> dict[str, np.ndarray]:
    return {name: value.detach().numpy() for name, value in model.state_dict().items()}


def layer_norm(z, weight, bias, eps=1e-6):
    mean, variance = z.mean(-1, keepdims=True), z.var(-1, keepdims=True)
    return (z - mean) / np.sqrt(variance + eps) * weight + bias


def gelu(x):
    return x * 0.5 * (1 + np.vectorize(math.erf)(x / math.sqrt(2)))


def equation_1(images, w):
    """[x_class; x_p^1 E; ...; x_p^N E] + E_pos, patch by patch."""
    kernel, bias = w["patch_embed.proj.weight"], w["patch_embed.proj.bias"]
    tokens = [w["cls_token"][0, 0]]
    for row in range(8 // 4):
        for column in range(12 // 2):
            patch = images[:, row * 4 : row * 4 + 4, column * 2 : column * 2 + 2]
            tokens.append((kernel * patch).sum(axis=(1, 2, 3)) + bias)
    return np.stack(tokens) + w["pos_embed"][0]


def msa(z, w, block):
    """Each head by itself: softmax(q k^T / sqrt(h)) v, side by side, then the output matrix."""
    q, k, v = np.split(z @ w[f"{block}.attn.qkv.weight"].T + w[f"{block}.attn.qkv.bias"], 3, axis=1)
    heads, maps = [], []
    for head in range(3):
        part = slice(head * 4, head * 4 + 4)
        scores = q[:, part] @ k[:, part].T / math.sqrt(4)
        weights = np.exp(scores) / np.exp(scores).sum(axis=1, keepdims=True)
        heads.append(weights @ v[:, part])
        maps.append(weights)
    mixed = np.concatenate(heads, axis=1)
    return mixed @ w[f"{block}.attn.proj.weight"].T + w[f"{block}.attn.proj.bias"], np.stack(maps)


def equation_2(z, w, block):
    """z' = MSA(LN(z)) + z."""
    normed = layer_norm(z, w[f"{block}.norm1.weight"], w[f"{block}.norm1.bias"])
    mixed, maps = msa(normed, w, block)
    return mixed + z, maps


def equation_3(z, w, block):
    """z = MLP(LN(z')) + z'."""
    normed = layer_norm(z, w[f"{block}.norm2.weight"], w[f"{block}.norm2.bias"])
    hidden = gelu(normed @ w[f"{block}.mlp.fc1.weight"].T + w[f"{block}.mlp.fc1.bias"])
    return hidden @ w[f"{block}.mlp.fc2.weight"].T + w[f"{block}.mlp.fc2.bias"] + z


def equation_4(z, w):
    """y = LN(z_L^0), then the head."""
    y = layer_norm(z[0], w["norm.weight"], w["norm.bias"])
    return y @ w["head.weight"].T + w["head.bias"]


def test_the_model_is_equations_1_to_4(model):
    images = torch.randn(2, 3, 8, 12, dtype=torch.float64)
    record = vitkit.Record(attention=[0, -1], tokens=[0, 1])
    logits = model(images, record=record)
    w = numbers(model)
    for image in range(2):
        z = equation_1(images[image].numpy(), w)
        for layer in range(2):
            z, maps = equation_2(z, w, f"blocks.{layer}")
            z = equation_3(z, w, f"blocks.{layer}")
            np.testing.assert_allclose(record.attention[layer][image].detach(), maps, atol=1e-12)
            np.testing.assert_allclose(record.tokens[layer][image].detach(), z, atol=1e-12)
        np.testing.assert_allclose(logits[image].detach(), equation_4(z, w), atol=1e-12)


def test_equation_1_numbers_of_the_paper():
    """224 x 224 x 3 in patches of 16: N = HW / P^2 = 196 patches of 16 * 16 * 3 = 768 values."""
    spec = vitkit.ViTSpec()
    assert spec.num_patches == 224 * 224 // 16**2 == 196
    embed = vitkit.PatchEmbedding(in_channels=3, patch_size=16, width=768)
    assert embed(torch.zeros(1, 3, 224, 224)).shape == (1, 196, 768)
    assert sum(p.numel() for p in embed.parameters()) == 590_592
    attention = vitkit.MultiHeadSelfAttention(width=768, num_heads=12)
    assert sum(p.numel() for p in attention.parameters()) == 2_362_368
