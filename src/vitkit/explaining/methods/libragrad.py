"""LibraGrad: gradient x input, with backward paths that make it complete."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from jaxtyping import Float, Int64
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from vitkit.errors import SettingError
from vitkit.explaining.class_scores import (
    at_least_float32,
    check_classes,
    class_scores,
    gradients_in_eval_mode,
)
from vitkit.explaining.methods import METHODS
from vitkit.models.encoder import block_calls
from vitkit.models.readout import Features
from vitkit.models.vit import ViT
from vitkit.shapes import Images


def libragrad(
    model: ViT, images: Images, *, classes: Int64[Tensor, " B"]
) -> Float[Tensor, "B gh gw"]:
    """Return the share of each patch token of z_0 in the class's logit.

    Gradient x input by the backward paths of LibraGrad (arXiv 2411.16760), see
    `BalancedGradients`: it is complete, so the sum over all tokens of z_0, prefix tokens included,
    plus the shares of all biases is the logit. A patch's share counts its position embedding, and
    is below 0 where the patch speaks against the class.

    Args:
        model: in any mode; it runs in eval mode, gets no gradients, and keeps its mode.
        images: (B, C, H, W) normalised, on the model's device.
        classes: (B,) class numbers.

    Returns:
        (B, gh, gw), in units of the logit.

    Raises:
        SettingError: a model without a head, or a class that it does not have.
        ShapeError: images that do not fit the model.
    """
    check_classes(model, classes, METHODS)
    with gradients_in_eval_mode(model):
        with torch.no_grad():
            start, context, grid = model.embed(images)
        tokens = start.requires_grad_()
        with BalancedGradients():
            for block in block_calls(model.blocks):
                tokens = block(tokens, context)
            features = Features.split(model.norm(tokens), grid, model.spec)
            scores = class_scores(model.forward_head(features), classes)
        (gradient,) = torch.autograd.grad(scores.sum(), start)
    shares = (at_least_float32(gradient) * start.detach()).sum(dim=-1)  # B T
    return shares[:, model.spec.num_prefix_tokens :].unflatten(1, grid)


# LibraGrad's backward paths: gradients of a network that is linearised at its input.
#
# "LibraGrad: Balancing Gradient Flow for Universally Better Vision Transformer Attributions" (arXiv
# 2411.16760) prunes and scales backward paths until gradient x input is complete: its sum over the
# inputs and over all biases is the output. The forward pass does not change.


class BalancedGradients(TorchFunctionMode):
    """A context in which torch's functions have the backward paths of LibraGrad.

    Each function is written as a matrix times its input, plus a bias, and the matrix is a constant:

        attention   the weights of the softmax
        norm        the scale 1 / std (the mean is linear)
        GELU, SiLU  x times a gate f(x) / x, such as Phi(x); tanh alike
        u * v       half of the gradient to each factor, if both depend on the input

    The values are those of torch's functions but for rounding. Linear layers, ReLU and means are
    linear already.

    >>> x = torch.tensor([0.5, -2.0], requires_grad=True)
    >>> with BalancedGradients():
    ...     y = F.gelu(x)
    >>> (gradient,) = torch.autograd.grad(y.sum(), x)
    >>> torch.allclose(gradient * x, y)
    True
    """

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Run a function of torch, or its balanced version."""
        kwargs = kwargs or {}
        balanced = BALANCED.get(func)
        return func(*args, **kwargs) if balanced is None else balanced(func, *args, **kwargs)


def backward_paths(name: str) -> AbstractContextManager[object]:
    """Return the context of a choice: `plain` gradients, or `balanced` ones.

    Raises:
        SettingError: another name.
    """
    if name not in ("plain", "balanced"):
        raise SettingError.about("gradients", name, "must be plain or balanced")
    return BalancedGradients() if name == "balanced" else nullcontext()


def _gate_alone(function: Callable[..., Tensor], *args: Any, **settings: Any) -> Tensor:
    """Compute a gate, through which no gradient flows."""
    return function(*args, **settings).detach()


def _weights(function: Callable[..., Tensor], *args: Any, **settings: Any) -> Tensor:
    """Compute attention weights: no gradient flows through them, but a gradient to them exists."""
    return function(*args, **settings).detach().requires_grad_()


def _attend(
    function: Callable[..., Tensor], q: Tensor, k: Tensor, v: Tensor, *args: Any, **settings: Any
) -> Tensor:
    """Run the fused kernel with constant weights, which depend on q and k alone."""
    return function(q.detach(), k.detach(), v, *args, **settings)


def _gate(function: Callable[..., Tensor], x: Tensor, **settings: Any) -> Tensor:
    """Write f(x) as x times the constant f(x) / x; f(0) must be 0."""
    point = x.detach()
    # at 0 the quotient has no value, and its limit is that of a small number
    point = torch.where(point == 0, torch.finfo(x.dtype).eps, point)
    return x * (function(point, **settings) / point)


def _layer_norm(
    function: Callable[..., Tensor],
    x: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
) -> Tensor:
    axes = tuple(range(-len(normalized_shape), 0))
    # The mean is linear in x and keeps its gradient; the scale is a constant.
    normed = _scaled(x - x.mean(axes, keepdim=True), axes, eps)
    if weight is not None:
        normed = normed * weight
    return normed if bias is None else normed + bias


def _rms_norm(
    function: Callable[..., Tensor],
    x: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    eps: float | None = None,
) -> Tensor:
    axes = tuple(range(-len(normalized_shape), 0))
    normed = _scaled(x, axes, torch.finfo(x.dtype).eps if eps is None else eps)
    return normed if weight is None else normed * weight


def _scaled(x: Tensor, axes: tuple[int, ...], eps: float) -> Tensor:
    """Divide by the root of the mean square, a constant; in float32 at least, as torch does."""
    wide = x.detach().to(torch.promote_types(x.dtype, torch.float32))
    scale = (wide.square().mean(axes, keepdim=True) + eps).rsqrt()
    return (x * scale).to(x.dtype)


def _product(function: Callable[..., Tensor], left: Any, right: Any, **settings: Any) -> Tensor:
    """Multiply; where both factors depend on the input, each gets half of the gradient."""
    if not (_depends_on_input(left) and _depends_on_input(right)):
        return function(left, right, **settings)
    # u v is counted twice, once through each factor.
    halves = function(left, right.detach(), **settings) + function(left.detach(), right, **settings)
    return halves / 2


def _depends_on_input(factor: Any) -> bool:
    """Return True for a tensor with a gradient that is no parameter, such as LayerScale's gamma."""
    is_tensor = isinstance(factor, Tensor) and not isinstance(factor, nn.Parameter)
    return is_tensor and factor.requires_grad


BALANCED: dict[Callable[..., Any], Callable[..., Tensor]] = {
    F.layer_norm: _layer_norm,
    F.rms_norm: _rms_norm,
    F.scaled_dot_product_attention: _attend,
    **dict.fromkeys((Tensor.softmax, torch.softmax, F.softmax), _weights),
    **dict.fromkeys((Tensor.sigmoid, torch.sigmoid), _gate_alone),  # the gate of QuickGELU
    **dict.fromkeys((F.gelu, F.silu, torch.tanh, Tensor.tanh), _gate),
    **dict.fromkeys((Tensor.mul, torch.mul), _product),
}
"""torch functions -> their replacements."""
