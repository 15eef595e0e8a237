"""A ViT in plain code, for one image: what the methods of explanation are compared with.

Each quantity is a pair: its value, and the part of it that came from some of the input (without
biases) if every attention weight, norm's scale and gate is a constant.
"""

import math
from collections.abc import Callable

import torch
from noise import fill_with_noise
from torch import Tensor, nn

import vitkit
from vitkit import MLP

Pair = tuple[Tensor, Tensor]
Weights = Callable[[int, Tensor], Tensor]
"""(layer, or -1 for a MAP head; weights (k, Q, T)) -> the weights to go on with."""

SILU = {"activation": "silu"}
VARIANTS: dict[str, dict] = {
    "cls": {},
    "registers": {"num_registers": 2},
    "distilled": {"distillation_token": True},
    "distilled-cls": {"distillation_token": True, "distilled_readout": "cls", "num_registers": 1},
    "mean": {"class_token": False, "pooling": "mean", "positions": "sincos_2d"},
    "mean-registers": {"pooling": "mean", "num_registers": 2, "norm_before_pool": False},
    "mean-all": {"pooling": "mean_all", "embedding_norm": True},
    "cls-mean": {"pooling": "cls_mean", "num_registers": 1},
    "map": {"class_token": False, "pooling": "map", "activation": "gelu_tanh"},
    "map-registers": {"pooling": "map", "num_registers": 2, "norm": "rms"},
    "rope": {"positions": "rope", "num_registers": 1, "qkv_bias": "no_key", "layer_scale": 0.5},
    "swiglu": {"mlp": "swiglu_packed", **SILU, "norm": "rms", "qk_norm": True},
    "swiglu-split": {"mlp": "swiglu_split", **SILU, "layer_scale": 0.5},
    "post-norm": {"block": "post_norm", "activation": "relu", "final_norm": False},
    "res-post-norm": {"block": "res_post_norm", "activation": "quick_gelu"},
    "representation": {"representation_width": 12, **SILU},
    "hybrid": {"stem": "resnet", "resnet_layers": (), "num_registers": 1},
}
"""Fields of small models, one or more for each kind of part."""


def variant(name: str, **fields) -> vitkit.ViT:
    """A model of 2 x 3 patches in double precision and eval mode, with noise as its weights."""
    sizes = {"image_size": (16, 24), "patch_size": 8, "width": 16, "num_heads": 2}
    sizes |= {"mlp_width": 20, "depth": 3, "num_classes": 4}
    model = vitkit.ViT(vitkit.ViTSpec(**{**sizes, **VARIANTS[name], **fields}))
    fill_with_noise(model, std=0.4)
    return model.double().eval()


def noise_images(count: int = 3) -> Tensor:
    generator = torch.Generator().manual_seed(3)
    return torch.randn(count, 3, 16, 24, generator=generator, dtype=torch.float64)


CLASSES = torch.tensor([2, 0, 3])
"""Of the three images."""


def start(model: vitkit.ViT, image: Tensor) -> tuple[Tensor, tuple[Tensor, Tensor] | None]:
    """z_0 (T, D), and sine and cosine (T, h)."""
    with torch.no_grad():
        tokens, context, _ = model.embed(image[None])
    return tokens[0], context.rotation


def keep(model, z, rotation, dropped: set[int]):
    """The same without some patches."""
    prefix = model.spec.num_prefix_tokens
    rows = [row for row in range(len(z)) if row - prefix not in dropped]
    if rotation is not None:
        rotation = (rotation[0][rows], rotation[1][rows])
    return z[rows], rotation


def as_they_are(layer: int, weights: Tensor) -> Tensor:
    return weights


def logits(
    model: vitkit.ViT, z: Pair, rotation=None, weights: Weights = as_they_are, layers=None
) -> Pair:
    """The logits (K,) after the first `layers` blocks and the readout."""
    for layer, block in enumerate(model.blocks[:layers]):
        z = run_block(model.spec.block, layer, block, z, rotation, weights)
    z = norm(model.norm, z)
    heads = [(pool(model, model.spec.pooling, z, weights), model.head)]
    if model.spec.distillation_token:
        heads.append((pool(model, "distillation", z, weights), model.head_dist))
        if model.spec.distilled_readout == "cls":
            heads.pop()
    found = []
    for y, head in heads:
        y = norm(model.fc_norm, y)
        if model.spec.representation_width:
            y = linear(model.pre_logits.fc, y)
            y = times(torch.tanh(y[0]) / y[0], y)
        found.append(linear(head, y))
    return sum(y for y, _ in found) / len(found), sum(dy for _, dy in found) / len(found)


def run_block(kind, layer, block, z, rotation, weights):
    def msa(z):
        mixed = attend(layer, block.attn, split(block.attn, z), rotation, weights)
        return linear(block.attn.proj, mixed)

    if kind == "pre_norm":
        z = add(z, scale(block.ls1, msa(norm(block.norm1, z))))
        return add(z, scale(block.ls2, mlp(block.mlp, norm(block.norm2, z))))
    if kind == "post_norm":
        z = norm(block.norm1, add(z, msa(z)))
        return norm(block.norm2, add(z, mlp(block.mlp, z)))
    z = add(z, norm(block.norm1, msa(z)))
    return add(z, norm(block.norm2, mlp(block.mlp, z)))


def split(attn, z: Pair) -> list[Pair]:
    """Queries, keys and values (k, T, h)."""
    fused = linear(attn.qkv, z)
    thirds = zip(*(part.chunk(3, dim=-1) for part in fused), strict=True)
    q, k, v = (per_head(attn, pair) for pair in thirds)
    return [norm(attn.q_norm, q), norm(attn.k_norm, k), v]


def per_head(attn, z: Pair) -> Pair:
    x, dx = (part.unflatten(-1, (attn.num_heads, -1)).transpose(0, 1) for part in z)
    return x, dx


def attend(layer, attn, qkv, rotation, weights: Weights) -> Pair:
    (q, _), (k, _), (v, dv) = qkv
    if rotation is not None:
        q, k = turn(q, rotation), turn(k, rotation)
    rows = torch.exp(q @ k.mT / math.sqrt(q.shape[-1]))
    rows = weights(layer, rows / rows.sum(-1, keepdim=True))
    x, dx = ((rows @ part).transpose(0, 1).flatten(1) for part in (v, dv))
    return x, dx


def turn(x, rotation):
    sin, cos = rotation
    half = x.shape[-1] // 2
    return x * cos + torch.cat([-x[..., half:], x[..., :half]], -1) * sin


def mlp(module: MLP, z: Pair) -> Pair:
    if type(module) is MLP:
        return linear(module.fc2, gated(module.act, linear(module.fc1, z)))
    if hasattr(module, "fc1_g"):
        gate, value = linear(module.fc1_g, z), linear(module.fc1_x, z)
    else:
        gate, value = zip(*(part.chunk(2, dim=-1) for part in linear(module.fc1, z)), strict=True)
    (u, du), (v, dv) = gated(module.act, gate), value
    return linear(module.fc2, (u * v, (du * v + u * dv) / 2))


def gated(module: nn.Module, z: Pair) -> Pair:
    x = z[0]
    if isinstance(module, nn.SiLU):
        return times(1 / (1 + torch.exp(-x)), z)
    if type(module).__name__ == "QuickGELU":
        return times(1 / (1 + torch.exp(-1.702 * x)), z)
    if isinstance(module, nn.ReLU):
        return times((x > 0).double(), z)
    if module.approximate == "tanh":
        return times((1 + torch.tanh((2 / math.pi) ** 0.5 * (x + 0.044715 * x**3))) / 2, z)
    return times((1 + torch.erf(x / 2**0.5)) / 2, z)


def norm(module: nn.Module, z: Pair) -> Pair:
    if isinstance(module, nn.Identity):
        return z
    centred, dx = z
    if isinstance(module, nn.LayerNorm):
        centred, dx = (part - part.mean(-1, keepdim=True) for part in z)
    std = ((centred**2).mean(-1, keepdim=True) + module.eps) ** 0.5
    shift = getattr(module, "bias", None)
    x = centred / std * module.weight
    return x if shift is None else x + shift, dx / std * module.weight


def pool(model, pooling: str, z: Pair, weights: Weights) -> Pair:
    prefix = model.spec.num_prefix_tokens
    if pooling == "map":
        part = model.attn_pool
        patches = (z[0][prefix:], z[1][prefix:])
        query = (model.attn_pool.latent[0], torch.zeros_like(model.attn_pool.latent[0]))
        k, v = zip(*(side.chunk(2, dim=-1) for side in linear(part.kv, patches)), strict=True)
        qkv = [per_head(part, pair) for pair in (linear(part.q, query), k, v)]
        y = linear(part.proj, attend(-1, part, qkv, None, weights))
        y = add(y, mlp(part.mlp, norm(part.norm, y)))
        return y[0][0], y[1][0]
    summary = {
        "cls": lambda x: x[0],
        "distillation": lambda x: x[1],
        "mean": lambda x: x[prefix:].mean(0),
        "mean_all": lambda x: x.mean(0),
        "cls_mean": lambda x: torch.cat([x[0], x[prefix:].mean(0)]),
    }[pooling]
    return summary(z[0]), summary(z[1])


def linear(module: nn.Linear, z: Pair) -> Pair:
    x, dx = (part @ module.weight.T for part in z)
    if hasattr(module, "q_bias"):
        zero = torch.zeros_like(module.q_bias)
        return x + torch.cat([module.q_bias, zero, module.v_bias]), dx
    return x if module.bias is None else x + module.bias, dx


def scale(module: nn.Module, z: Pair) -> Pair:
    return z if isinstance(module, nn.Identity) else times(module.gamma, z)


def times(factor: Tensor, z: Pair) -> Pair:
    return z[0] * factor, z[1] * factor


def add(a: Pair, b: Pair) -> Pair:
    return a[0] + b[0], a[1] + b[1]
