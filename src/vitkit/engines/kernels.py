"""Faster kernels of attention and linear layers than those of torch's modules.

On a processor they are chosen by measurement. torch multiplies float32 matrices by MKL, which on
some processors that are not Intel's takes slower instructions than the processor has. oneDNN, which
is part of torch too, chooses by what the processor can do, and takes weights in an order that suits
it. On a GPU the GELU of an MLP is computed by the matrix product before it (`GeluLinear`).
"""

from __future__ import annotations

import copy
import functools
import time
from collections.abc import Callable

import torch
from torch import Tensor, nn

from vitkit.models.attention import AttentionKernel, use_attention
from vitkit.models.mlp import MLP
from vitkit.models.vit import ViT

ROUNDS = 7
"""Turns in which kernels are timed, one after the other; the fastest turn of each counts."""
GAIN = 1.1
"""Ratio of times from which another kernel is used: equal ones differ by up to 5 % by chance."""


class PackedLinear(nn.Module):
    """A linear layer by oneDNN, (..., D) -> (..., E), with its weight in oneDNN's own order.

    Args:
        linear: the layer; it stays as it is.
        rows: number of tokens of a call for which the order is best; any other works too.
    """

    def __init__(self, linear: nn.Linear, rows: int) -> None:
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.rows = rows
        weight = linear.weight.detach()
        self.register_buffer("weight", torch.ops.mkldnn._reorder_linear_weight(weight, rows))
        self.bias = linear.bias

    def forward(self, x: Tensor) -> Tensor:
        """Return W x + b."""
        product: Tensor = torch.ops.mkldnn._linear_pointwise(
            x, self.weight, self.bias, "none", [], ""
        )
        return product


def can_pack(dtype: torch.dtype) -> bool:
    """Return True if oneDNN's linear layers exist here for a dtype."""
    try:
        torch.ops.mkldnn._reorder_linear_weight(torch.zeros(16, 16, dtype=dtype), 1)
    except (AttributeError, RuntimeError):  # no oneDNN, or a processor without the instructions
        return False
    return True


def fastest_kernels(model: ViT, batch_size: int) -> None:
    """Choose the kernels of a model on a CPU by timing its first block; changed in place.

    The whole block is timed: a layer that is faster alone may slow the ones after it.

    Args:
        model: in eval mode, without gradients.
        batch_size: images per batch.
    """
    spec = model.spec
    like = next(model.parameters())
    count = spec.num_patches + spec.num_prefix_tokens
    tokens = torch.randn(batch_size, count, spec.width, dtype=like.dtype)
    block = model.blocks[0]
    if spec.positions == "rope":
        return  # a single block gets no rotary angles
    with torch.inference_mode():
        kernels: tuple[AttentionKernel, ...] = ("fused", "plain")
        times = in_turns(
            {kernel: _attention_call(model, block, kernel, tokens) for kernel in kernels}
        )
        use_attention(model, "plain" if times["fused"] > GAIN * times["plain"] else "fused")
        if can_pack(like.dtype) and _is_packing_faster(block, tokens):
            _pack(model.blocks, batch_size * count)


def _attention_call(
    model: ViT, block: nn.Module, kernel: AttentionKernel, tokens: Tensor
) -> Callable[[], object]:
    def call() -> object:
        use_attention(model, kernel)
        return block(tokens)

    return call


def _is_packing_faster(block: nn.Module, tokens: Tensor) -> bool:
    """Return True if a block is worth having oneDNN's linear layers."""
    packed = copy.deepcopy(block)
    _pack(packed, tokens.shape[0] * tokens.shape[1])
    times = in_turns({"torch": lambda: block(tokens), "onednn": lambda: packed(tokens)})
    return times["torch"] > GAIN * times["onednn"]


def _pack(module: nn.Module, rows: int) -> None:
    """Replace torch's linear layers by oneDNN's."""
    for parent in list(module.modules()):
        for name, child in list(parent.named_children()):
            if type(child) is nn.Linear:
                setattr(parent, name, PackedLinear(child, rows))


def in_turns(calls: dict[str, Callable[[], object]], rounds: int = ROUNDS) -> dict[str, float]:
    """Return the fastest time of each call in seconds, measured in turns after a warm-up.

    Args:
        calls: name -> function without arguments.
        rounds: rounds of all calls.
    """
    fastest = dict.fromkeys(calls, float("inf"))
    for call in calls.values():
        call()
    for _ in range(rounds):
        for name, call in calls.items():
            start = time.perf_counter()
            call()
            fastest[name] = min(fastest[name], time.perf_counter() - start)
    return fastest


class GeluLinear(nn.Module):
    """GELU(W x + b) by one kernel on a GPU: (..., D) -> (..., E).

    A GELU of its own reads and writes the widest tensor of a block once more. cuBLASLt applies it
    to the product before that is written, in the tanh form of "Gaussian Error Linear Units" (arXiv
    1606.08415), Sec. 2. The forms differ by at most 5e-4, so this is for bfloat16: rounding to that
    moves values above 0.25 by as much.

    Args:
        linear: the layer, with a bias; it stays as it is.
    """

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.weight, self.bias = linear.weight, linear.bias
        _define_gelu_linear()

    def forward(self, x: Tensor) -> Tensor:
        """Return GELU(W x + b)."""
        product: Tensor = torch.ops.vitkit.gelu_linear(x, self.weight, self.bias)
        return product


@functools.cache
def _define_gelu_linear() -> None:
    """Define the operator `vitkit::gelu_linear` once: a compiler may decompose torch's own."""

    @torch.library.custom_op(
        "vitkit::gelu_linear",
        mutates_args=(),
        schema="(Tensor x, Tensor weight, Tensor bias) -> Tensor",
    )
    def gelu_linear(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        rows = x.reshape(-1, x.shape[-1])
        product: Tensor = torch._addmm_activation(bias, rows, weight.t(), use_gelu=True)
        return product.unflatten(0, x.shape[:-1])

    @gelu_linear.register_fake
    def _shape(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return x.new_empty((*x.shape[:-1], weight.shape[0]))


def fuse_gelu(model: ViT) -> None:
    """Put `GeluLinear` in place of the first layer and the GELU of each plain MLP.

    Layers that are not vitkit's own, such as adapters, and layers with hooks stay as they are.

    Args:
        model: on a GPU, in bfloat16, for inference; changed in place.
    """
    for block in model.blocks:
        mlp = getattr(block, "mlp", None)
        if type(mlp) is not MLP or type(mlp.fc1) is not nn.Linear or type(mlp.act) is not nn.GELU:
            continue
        if not (has_hooks(mlp.fc1) or has_hooks(mlp.act)):
            parts: nn.Module = mlp
            parts.fc1, parts.act = GeluLinear(mlp.fc1), nn.Identity()


def has_hooks(module: nn.Module) -> bool:
    """Return True if something is called before or after the module's own forward pass."""
    return bool(module._forward_hooks or module._forward_pre_hooks)
