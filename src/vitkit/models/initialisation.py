"""Initial weights by name: whose code they come from decides what a model starts as."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import get_args

import torch
from torch import Tensor, nn

from vitkit.models.attention import MultiHeadSelfAttention
from vitkit.models.positions import sincos_2d
from vitkit.spec import Initialisation, ViTSpec

TRUNCATED_STD = 0.87962566103423978
"""Standard deviation of N(0, 1) cut at +-2; flax divides by it so that the variance comes out."""


def initialise(model: nn.Module, spec: ViTSpec) -> None:
    """Fill a ViT's parameters in place, from torch's global generator.

    Args:
        model: a `ViT`, whatever its variations; a `backbone` of the caller's is left alone.
        spec: the model's. `spec.initialisation` names one of `INITIALISATIONS`; each function says
            what it does. Registers start at N(0, 0.02) in all: equal ones would stay equal.
    """
    for _, module in _own(model, spec):
        reset = getattr(module, "reset_parameters", None)
        if callable(reset):
            reset()  # norms and LayerScale stay so
    INITIALISATIONS[spec.initialisation](model, spec)


def init_jax(model: nn.Module, spec: ViTSpec) -> None:
    """The published JAX code (google-research/vision_transformer, models_vit).

    patch projection  LeCun normal, truncated at 2 std; bias 0
    class token       0; distillation token too; a MAP head's query Xavier uniform
    positions         N(0, 0.02)
    attention         Xavier uniform on query, key, value and output, each its own matrix; bias 0
    MLP               Xavier uniform; bias N(0, 1e-6)
    norms             1 and 0
    head              0
    """
    _fill_tokens(model, spec, tokens=0.0, positions=0.02)
    for convolution in _convolutions(model, spec):
        _lecun_normal(convolution.weight)
        _zero(convolution.bias)
    for role, linear in _linears(model, spec):
        if role in HEADS:
            nn.init.zeros_(linear.weight)
        else:
            _each(linear, role, nn.init.xavier_uniform_)
        if linear.bias is not None:
            nn.init.normal_(linear.bias, std=1e-6 if role.startswith("fc") else 0.0)


def init_timm(model: nn.Module, spec: ViTSpec) -> None:
    """timm's default: N(0, 0.02) matrices and positions, class token N(0, 1e-6), biases 0.

    Convolutions start as torch starts them.
    """
    _fill_tokens(model, spec, tokens=1e-6, positions=0.02)
    for _, linear in _linears(model, spec):
        nn.init.trunc_normal_(linear.weight, std=0.02)
        _zero(linear.bias)


def init_xavier_normal(model: nn.Module, spec: ViTSpec) -> None:
    """Xavier normal on every projection by itself; tokens and positions N(0, 0.02); biases 0."""
    _fill_tokens(model, spec, tokens=0.02, positions=0.02)
    for convolution in _convolutions(model, spec):
        nn.init.xavier_normal_(convolution.weight.data.flatten(1))
        _zero(convolution.bias)
    for role, linear in _linears(model, spec):
        _each(linear, role, nn.init.xavier_normal_)
        _zero(linear.bias)


def init_xavier_uniform(model: nn.Module, spec: ViTSpec) -> None:
    """Xavier uniform matrices, biases N(0, 1e-6), tokens and positions 0 (jeonsworld's MLP).

    Convolutions start as torch starts them.
    """
    _fill_tokens(model, spec, tokens=0.0, positions=0.0)
    for role, linear in _linears(model, spec):
        _each(linear, role, nn.init.xavier_uniform_)
        if linear.bias is not None:
            nn.init.normal_(linear.bias, std=1e-6)


def init_mimetic(model: nn.Module, spec: ViTSpec) -> None:
    """JAX's, then attention that looks as if it had been trained (arXiv 2305.09828, Sec. 3).

    In each head W_q W_k^T is near 0.7 (Z + I), and over all heads W_v W_proj near 0.4 (Z - I), with
    Z of N(0, 1 / D); learned positions start as sines and cosines. Factors come from an SVD.
    """
    init_jax(model, spec)
    for attention in (m for m in model.modules() if isinstance(m, MultiHeadSelfAttention)):
        _mimic(attention)
    table = getattr(model, "pos_embed", None)
    if table is not None and spec.width % 4 == 0:
        nn.init.zeros_(table)
        with torch.no_grad():
            table[0, table.shape[1] - spec.num_patches :] = sincos_2d(spec.grid, spec.width)


INITIALISATIONS: dict[str, Callable[[nn.Module, ViTSpec], None]] = {
    "jax": init_jax,
    "timm": init_timm,
    "xavier_normal": init_xavier_normal,
    "xavier_uniform": init_xavier_uniform,
    "mimetic": init_mimetic,
}
assert set(INITIALISATIONS) == set(get_args(Initialisation)), "spec.Initialisation lists these"
HEADS = ("head", "head_dist")
FUSED = {"qkv": 3, "kv": 2}
"""Matrices that lie in one; each is initialised by itself."""


def _own(model: nn.Module, spec: ViTSpec) -> Iterator[tuple[str, nn.Module]]:
    """The modules and their names, without a backbone that the caller brought along."""
    theirs = "patch_embed.backbone" if spec.stem == "backbone" else None
    for name, module in model.named_modules():
        if theirs is None or not f"{name}.".startswith(f"{theirs}."):
            yield name, module


def _convolutions(model: nn.Module, spec: ViTSpec) -> Iterator[nn.Conv2d]:
    return (module for _, module in _own(model, spec) if isinstance(module, nn.Conv2d))


def _linears(model: nn.Module, spec: ViTSpec) -> Iterator[tuple[str, nn.Linear]]:
    """The linear layers and the last word of their names."""
    for name, module in _own(model, spec):
        if isinstance(module, nn.Linear):
            yield name.rpartition(".")[2], module


def _fill_tokens(model: nn.Module, spec: ViTSpec, *, tokens: float, positions: float) -> None:
    stds = {"cls_token": tokens, "dist_token": tokens, "reg_token": 0.02, "pos_embed": positions}
    for _, module in _own(model, spec):
        for name, parameter in module.named_parameters(recurse=False):
            if name in stds:
                nn.init.normal_(parameter, std=stds[name])
            elif name == "latent":
                nn.init.xavier_uniform_(parameter)
            elif name in ("q_bias", "v_bias"):
                nn.init.zeros_(parameter)


def _each(linear: nn.Linear, role: str, fill: Callable[[Tensor], Tensor]) -> None:
    for matrix in linear.weight.data.chunk(FUSED.get(role, 1)):
        fill(matrix)


@torch.no_grad()
def _mimic(attention: MultiHeadSelfAttention) -> None:
    width, heads, inner = attention.proj.out_features, attention.num_heads, attention.head_width
    query, key, value = attention.qkv.weight.chunk(3)  # views: (k h, D) each
    identity = torch.eye(width)
    for head in range(heads):
        part = slice(head * inner, (head + 1) * inner)
        target = 0.7 * torch.randn(width, width) / math.sqrt(width) + 0.7 * identity
        query[part], key[part] = _factors(target, inner)
    target = 0.4 * torch.randn(width, width) / math.sqrt(width) - 0.4 * identity
    left, right = _factors(target, heads * inner)
    value.copy_(left)
    attention.proj.weight.copy_(right.T)


def _factors(target: Tensor, rank: int) -> tuple[Tensor, Tensor]:
    """A and B, each (rank, D), with A^T B near `target`: its SVD, the roots on both sides."""
    u, s, v = torch.linalg.svd(target)
    missing = max(rank - len(s), 0)
    root = s[:rank].sqrt()
    left, right = (u[:, :rank] * root).T, root[:, None] * v[:rank]
    pad = (0, 0, 0, missing)
    return nn.functional.pad(left, pad), nn.functional.pad(right, pad)


def _lecun_normal(kernel: Tensor) -> None:
    std = 1.0 / math.sqrt(kernel[0].numel()) / TRUNCATED_STD
    nn.init.trunc_normal_(kernel, std=std, a=-2 * std, b=2 * std)


def _zero(bias: Tensor | None) -> None:
    if bias is not None:
        nn.init.zeros_(bias)
