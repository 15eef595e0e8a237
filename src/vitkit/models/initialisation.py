"""Initial weights by name: each scheme is that of a published implementation."""

import math
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple, get_args

import torch
from torch import Tensor, nn
from torch.nn import init

from vitkit.models.attention import MultiHeadSelfAttention
from vitkit.models.embedding import sincos_2d
from vitkit.spec import Initialisation, ViTSpec

TRUNCATED_STD = 0.87962566103423978
"""Standard deviation of N(0, 1) cut at +-2; flax divides by it so that the variance comes out."""
HEADS = ("head", "head_dist")
FUSED = {"qkv": 3, "kv": 2}
"""Matrices stacked in one weight; each is initialised separately."""


def _lecun_normal(kernel: Tensor) -> Tensor:
    std = 1.0 / math.sqrt(kernel[0].numel()) / TRUNCATED_STD
    return init.trunc_normal_(kernel, std=std, a=-2 * std, b=2 * std)


def _xavier_patch(kernel: Tensor) -> Tensor:
    return init.xavier_normal_(kernel.flatten(1))


class Scheme(NamedTuple):
    """The initial values of parameters; norms and LayerScale keep those of their constructors.

    `kernel` fills convolutions (None: as torch does), `matrix` linear layers (q, k and v apart);
    `bias` (of layers named fc; others 0), `tokens` and `positions` are standard deviations.
    """

    kernel: Callable[[Tensor], Tensor] | None
    matrix: Callable[[Tensor], Tensor]
    bias: float
    tokens: float
    positions: float
    zero_head: bool


JAX = Scheme(_lecun_normal, init.xavier_uniform_, 1e-6, 0.0, 0.02, True)
SCHEMES = {
    "jax": JAX,  # google-research/vision_transformer, models_vit
    "timm": Scheme(None, partial(init.trunc_normal_, std=0.02), 0.0, 1e-6, 0.02, False),
    "xavier_normal": Scheme(_xavier_patch, init.xavier_normal_, 0.0, 0.02, 0.02, False),
    "xavier_uniform": Scheme(None, init.xavier_uniform_, 1e-6, 0.0, 0.0, False),  # jeonsworld's MLP
    "mimetic": JAX,  # and then `mimetic_init`
}
assert set(SCHEMES) == set(get_args(Initialisation)), "spec.Initialisation lists these"


@torch.no_grad()
def initialise(model: nn.Module, spec: ViTSpec) -> None:
    """Fill parameters in place by `spec.initialisation`, from torch's global generator.

    A `backbone` of the caller's is left alone, and so is a model on `meta`.
    """
    if next(model.parameters()).is_meta:
        return
    scheme = SCHEMES[spec.initialisation]
    # Registers with equal initial values would stay equal.
    tokens = {"cls_token": scheme.tokens, "dist_token": scheme.tokens, "reg_token": 0.02}
    for name, module in _own(model, spec):
        role = name.rpartition(".")[2]
        if isinstance(module, nn.Linear):
            _fill_linear(module, role, scheme, spec.head_bias)
        elif isinstance(module, nn.Conv2d) and scheme.kernel is not None:
            scheme.kernel(module.weight)
            if module.bias is not None:
                init.zeros_(module.bias)
    for name, parameter in model.named_parameters():
        if name in tokens or name == "pos_embed":
            init.normal_(parameter, std=tokens.get(name, scheme.positions))
        elif name == "attn_pool.latent":
            init.xavier_uniform_(parameter)
    if spec.initialisation == "mimetic":
        mimetic_init(model, spec)


def is_of_head(name: str) -> bool:
    """Return whether a parameter, such as `head.weight`, belongs to a head."""
    return name.partition(".")[0] in HEADS


def fresh_heads(spec: ViTSpec) -> dict[str, nn.Module]:
    """Return untrained heads by name, made on the CPU, so that every device has the same ones.

    They have the scheme of `spec.initialisation`, from torch's global generator, and the bias
    `spec.head_bias`; without classes they are `Identity`.
    """
    names = HEADS if spec.distillation_token else HEADS[:1]
    if spec.num_classes == 0:
        return {name: nn.Identity() for name in names}
    linear: dict[str, Any] = {"device": "cpu", "dtype": torch.float32}
    heads = nn.ModuleDict(
        {name: nn.Linear(spec.head_inputs, spec.num_classes, **linear) for name in names}
    )
    initialise(heads, spec)
    return dict(heads)


def _fill_linear(linear: nn.Linear, role: str, scheme: Scheme, head_bias: float) -> None:
    fill = init.zeros_ if role in HEADS and scheme.zero_head else scheme.matrix
    for matrix in linear.weight.chunk(FUSED.get(role, 1)):
        fill(matrix)
    if linear.bias is None:
        return
    if role in HEADS:
        init.constant_(linear.bias, head_bias)
    elif role in FUSED:
        init.zeros_(linear.bias)
    else:  # drawn also with deviation 0, so that the generator advances as it always did
        init.normal_(linear.bias, std=scheme.bias if role.startswith("fc") else 0.0)


def _own(model: nn.Module, spec: ViTSpec) -> Iterator[tuple[str, nn.Module]]:
    theirs = "patch_embed.backbone." if spec.stem == "backbone" else "\0"  # as no name begins
    return ((n, m) for n, m in model.named_modules() if not f"{n}.".startswith(theirs))


def mimetic_init(model: nn.Module, spec: ViTSpec) -> None:
    """Initialise attention as if it had been trained: mimetic initialisation (arXiv 2305.09828).

    In each head W_q W_k^T is near 0.7 (Z + I), and over all heads W_v W_proj near 0.4 (Z - I), with
    Z of N(0, 1 / D), by factors from an SVD; learned positions start as sines and cosines.
    """
    noise, identity = partial(torch.randn, spec.width, spec.width), torch.eye(spec.width)
    for attention in (m for m in model.modules() if isinstance(m, MultiHeadSelfAttention)):
        heads, h = attention.num_heads, attention.head_width
        query, key, value = attention.qkv.weight.chunk(3)  # views: (k h, D) each
        for part in (slice(head * h, head * h + h) for head in range(heads)):
            target = 0.7 * (noise() / math.sqrt(spec.width) + identity)
            query[part], key[part] = _factors(target, h)
        left, right = _factors(0.4 * (noise() / math.sqrt(spec.width) - identity), heads * h)
        value.copy_(left)
        attention.proj.weight.copy_(right.T)
    table = getattr(model, "pos_embed", None)
    if table is not None and spec.width % 4 == 0:
        init.zeros_(table)[0, -spec.num_patches :] = sincos_2d(spec.grid, spec.width)


def _factors(target: Tensor, rank: int) -> tuple[Tensor, Tensor]:
    """Return A and B, each (rank, D), with A^T B near `target`: its SVD, roots on both sides."""
    u, s, v = torch.linalg.svd(target)
    root, pad = s[:rank].sqrt(), (0, 0, 0, max(rank - len(s), 0))
    left, right = (u[:, :rank] * root).T, root[:, None] * v[:rank]
    return nn.functional.pad(left, pad), nn.functional.pad(right, pad)
