"""Initial weights of the published JAX code (google-research/vision_transformer, models_vit)."""

from __future__ import annotations

import math

from torch import Tensor, nn

TRUNCATED_STD = 0.87962566103423978
"""Standard deviation of N(0, 1) cut at +-2; flax divides by it so that the variance comes out."""


def init_jax(model: nn.Module) -> None:
    """Fill a ViT's parameters in place, from torch's global generator.

    patch projection  LeCun normal, truncated at 2 std; bias 0
    class token       0
    positions         N(0, 0.02)
    attention         Xavier uniform on query, key, value and output, each its own matrix; bias 0
    MLP               Xavier uniform; bias N(0, 1e-6)
    norms             1 and 0
    head              0
    """
    for name, module in model.named_modules():
        if isinstance(module, nn.Conv2d):
            _lecun_normal(module.weight)
            _zero(module.bias)
        elif isinstance(module, nn.LayerNorm):
            module.reset_parameters()
        elif isinstance(module, nn.Linear):
            _init_linear(name, module)
    for name, parameter in model.named_parameters(recurse=False):
        nn.init.normal_(parameter, std=0.02 if name == "pos_embed" else 0.0)


def _init_linear(name: str, linear: nn.Linear) -> None:
    role = name.rpartition(".")[2]
    if role == "head":
        nn.init.zeros_(linear.weight)
        _zero(linear.bias)
    elif role == "qkv":
        for matrix in linear.weight.data.chunk(3):
            nn.init.xavier_uniform_(matrix)
        _zero(linear.bias)
    else:
        nn.init.xavier_uniform_(linear.weight)
        nn.init.normal_(linear.bias, std=1e-6 if role in ("fc1", "fc2") else 0.0)


def _lecun_normal(kernel: Tensor) -> None:
    std = 1.0 / math.sqrt(kernel[0].numel()) / TRUNCATED_STD
    nn.init.trunc_normal_(kernel, std=std, a=-2 * std, b=2 * std)


def _zero(bias: Tensor | None) -> None:
    if bias is not None:
        nn.init.zeros_(bias)
