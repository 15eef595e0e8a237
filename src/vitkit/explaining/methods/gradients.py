"""Maps by the gradient of a class's logit, plain or balanced (LibraGrad)."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np
import torch
from einops import reduce
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from vitkit import errors, shapes
from vitkit.explaining.methods.class_scores import (
    Classes,
    Maps,
    at_least_float32,
    check_classes,
    check_layer,
    check_number,
    class_scores,
    gradients_in_eval_mode,
    has_map_head,
    readout_row,
)
from vitkit.models import encoder
from vitkit.models.record import Record
from vitkit.models.vit import Features, ViT


def libragrad(model: ViT, images: shapes.Images, *, classes: Classes) -> Maps:
    """Return the share of each patch token of z_0 in the class's logit.

    Gradient x input by the backward paths of LibraGrad (arXiv 2411.16760), see
    `BalancedGradients`: it is complete, so the sum over all tokens of z_0, prefix tokens included,
    plus the shares of all biases is the logit. A patch's share counts its position embedding, and
    is below 0 where the patch speaks against the class.

    Args:
        model: in any mode, which it keeps; it runs in eval mode.
        images: (B, C, H, W) normalised, on the model's device.
        classes: (B,) class numbers.

    Returns:
        (B, gh, gw), in units of the logit.

    Raises:
        SettingError: a model without a head, or a class that it does not have.
        ShapeError: images that do not fit the model.
    """
    check_classes(model, classes)
    with gradients_in_eval_mode(model):
        with torch.no_grad():
            start, context, grid = model.embed(images)
        tokens = start.requires_grad_()
        with BalancedGradients():
            for block in encoder.block_calls(model.blocks):
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
        if balanced is None:
            return func(*args, **kwargs)
        return balanced(func, *args, **kwargs)


def backward_paths(name: str) -> AbstractContextManager[object]:
    """Return the context of a choice: `plain` gradients, or `balanced` ones.

    Raises:
        SettingError: another name.
    """
    if name not in ("plain", "balanced"):
        raise errors.SettingError.about("gradients", name, "must be plain or balanced")
    if name == "balanced":
        return BalancedGradients()
    return nullcontext()


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
    if bias is None:
        return normed
    return normed + bias


def _rms_norm(
    function: Callable[..., Tensor],
    x: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    eps: float | None = None,
) -> Tensor:
    axes = tuple(range(-len(normalized_shape), 0))
    normed = _scaled(x, axes, torch.finfo(x.dtype).eps if eps is None else eps)
    if weight is None:
        return normed
    return normed * weight


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


def gradient_rollout(
    model: ViT, images: shapes.Images, *, classes: Classes, gradients: str = "balanced"
) -> Maps:
    """Return how far the attention to each patch, through all layers, raises a class's logit.

    "Generic Attention-model Explainability" (arXiv 2103.15679, Chefer et al.), Eq. 5 and 6, by
    default with other gradients than published: with A
    the maps of a layer and grad A the gradient of the class's logit, the mean over the heads of
    relu(grad A * A) is M, and R = I at first, then R + M R in each layer. The result is the row of
    R - I of what the head reads (`readout_rows`): the class token's in the paper; where a mean of
    patches is read, the mean of their rows. I would add the same number to each patch, beside which
    small gradients would be lost by rounding.

    The query of a MAP head attends to the patches as a decoder's does, Eq. 8 to 10: its row is
    M (R' + I), with M of the head's own map and R' = R - I scaled to rows of sum 1. So what a patch
    has read from others counts as much as the patch itself.

    Args:
        model: in any mode; it runs in eval mode, its parameters get no gradient, and it keeps its
            mode. Frozen parameters stay so.
        images: (B, C, H, W) normalised, on the model's device.
        classes: (B,) class numbers.
        gradients: `plain`, as published, or `balanced` (LibraGrad, arXiv 2411.16760; see
            `BalancedGradients`), which finds a patch that decides alone; once it dominates the
            token that is read, the last norm takes out the plain gradient. Balanced maps also have
            the better faithfulness (`docs/benchmarks.md`).

    Returns:
        (B, gh, gw), 0 or more.

    Raises:
        SettingError: a model without a head, a class that does not exist, or other gradients.
        ShapeError: images that do not fit the model.
    """
    check_classes(model, classes)
    record = Record(attention=range(model.spec.depth), pooling=has_map_head(model), gradients=True)
    with gradients_in_eval_mode(model):
        # builds a graph through the maps even if all parameters are frozen
        pixels = images.clone().detach().requires_grad_()
        with backward_paths(gradients):
            features = model.forward_features(pixels, record)
            logits = model.forward_head(features, record)
        score = class_scores(logits, classes).sum()
        maps = [*record.pooling.values(), *reversed(record.attention.values())]
        # Sum over images: each map gets the gradient of its own image's score only.
        found = torch.autograd.grad(score, maps)
    weights = []
    for weight, gradient in zip(maps, found, strict=True):
        # the mean over the heads of relu(grad A * A), Eq. 5
        weights.append(at_least_float32(gradient * weight.detach()).relu().mean(dim=1))
    if record.pooling:
        pooling, *weights = weights
        row = _read_by_query(readout_row(model, features, pooling.unsqueeze(1)), weights)
    else:
        row = _rolled_out(readout_row(model, features, None), weights)
    return row[:, model.spec.num_prefix_tokens :].unflatten(1, features.grid)


def _rolled_out(
    row: Float[Tensor, "B T"], weights: Sequence[Float[Tensor, "B T T"]]
) -> Float[Tensor, "B T"]:
    """Return row (R - I), from the last layer to the first: vectors times matrices alone."""
    gained = torch.zeros_like(row)
    for layer in weights:
        gained = gained + torch.einsum("bn,bnt->bt", row + gained, layer)
    return gained


def _read_by_query(
    row: Float[Tensor, "B T"], weights: Sequence[Float[Tensor, "B T T"]]
) -> Float[Tensor, "B T"]:
    """Return row (R' + I), where R' = R - I with its rows divided by their sums, Eq. 8 and 9."""
    sums = torch.zeros_like(row)
    for layer in reversed(weights):
        sums = sums + torch.einsum("bnt,bt->bn", layer, 1 + sums)
    scaled = torch.where(sums > 0, row / sums, 0.0)  # a row of zeros stays one
    return row + _rolled_out(scaled, weights)


def legrad(
    model: ViT, images: shapes.Images, *, classes: Classes, gradients: str = "balanced"
) -> Maps:
    """Return LeGrad's map: positive gradients of each layer's own score to its attention.

    The tokens after layer l go through the model's last norm, pooling and head, which gives the
    score s^l. The part above 0 of its gradient to the attention map A^l is averaged over heads and
    query rows; columns of patches are kept, and averaged over the layers ("LeGrad", arXiv
    2404.03214, Sec. 3). With a MAP head A^l is the map of its query over the tokens of layer l, as
    in the paper for attentional poolers. The paper's last scaling to [0, 1] is left to the caller.

    By default the gradients are not the published ones: where one patch dominates the token that is
    read, the norm takes out the plain gradient towards it. Balanced gradients (LibraGrad, arXiv
    2411.16760) keep the scale of norms constant; they find a patch that decides alone, and have the
    better deletion score (`docs/benchmarks.md`).

    Args:
        model: in any mode, which it keeps; it runs in eval mode.
        images: (B, C, H, W) normalised, on the model's device.
        classes: (B,) class numbers.
        gradients: `plain`, as published, or `balanced` (see `BalancedGradients`).

    Returns:
        (B, gh, gw), 0 or more.

    Raises:
        SettingError: a model without a head, a class that it does not have, or other gradients.
        ShapeError: images that do not fit the model.
    """
    check_classes(model, classes)
    depth, by_map_head = model.spec.depth, model.spec.pooling == "map"
    layers = () if by_map_head else range(depth)
    record = Record(attention=layers, pooling=by_map_head, gradients=True)
    total: Tensor | float = 0.0
    with gradients_in_eval_mode(model), backward_paths(gradients):
        with torch.no_grad():
            tokens, context, grid = model.embed(images)
        for block in encoder.block_calls(model.blocks, record):
            # s^l depends on A^l through layer l only, so earlier layers are not in the graph
            tokens = block(tokens.detach().requires_grad_(), context)
            features = Features.split(model.norm(tokens), grid, model.spec)
            scores = class_scores(model.forward_head(features, record), classes)
            maps = record.pooling if by_map_head else record.attention
            _, weights = maps.popitem()  # B k Q T; one row, B k 1 N, with a MAP head
            (gradient,) = torch.autograd.grad(scores.sum(), weights)
            total = total + at_least_float32(gradient).relu().mean(dim=(1, 2))  # B T
    assert isinstance(total, Tensor)
    patches = total[:, -grid[0] * grid[1] :] / depth  # without the prefix tokens
    return patches.unflatten(1, grid)


def grad_cam(model: ViT, images: shapes.Images, *, classes: Classes, layer: int = -1) -> Maps:
    """Return where the features of a layer that raise a class's logit are.

    "Grad-CAM" (arXiv 1610.02391), Eq. 1 and 2, with patch tokens for the cells of a feature map:
    each channel's weight is the mean over the patches of the logit's gradient, and the map is
    relu(sum over the channels of weight x activation).

    The activations are the input of a block's attention: the output of the block's first norm where
    norms precede (`pre_norm`, so of nearly all ViTs), and the block's input otherwise. From there
    the patches act on the logit whatever the head reads. After the last block's attention they do
    not where the class token is read: there their gradient is 0, and the map of the last block's
    output would be empty.

    Args:
        model: in any mode; it runs in eval mode, its parameters get no gradient, and it keeps its
            mode. Frozen parameters stay so.
        images: (B, C, H, W) normalised, on the model's device.
        classes: (B,) class numbers.
        layer: block number, from 0; negative ones count from the end.

    Returns:
        (B, gh, gw), 0 or more.

    Raises:
        SettingError: a layer or a class that does not exist, or a model without a head.
        ShapeError: images that do not fit the model.
    """
    check_classes(model, classes)
    layer = check_layer(layer, model)
    read: list[Tensor] = []

    def keep(module: nn.Module, inputs: tuple[Any, ...]) -> None:
        read.append(inputs[0])

    calls = encoder.block_calls(model.blocks)
    reader = model.blocks.get_submodule(f"{layer}.attn")
    with gradients_in_eval_mode(model):
        with torch.no_grad():  # no gradient is wanted so far back
            tokens, context, grid = model.embed(images.clone())
            for block in calls[:layer]:
                tokens = block(tokens, context)
        with reader.register_forward_pre_hook(keep):
            tokens = tokens.detach().requires_grad_()
            for block in calls[layer:]:
                tokens = block(tokens, context)
            logits = model.forward_head(Features.split(model.norm(tokens), grid, model.spec))
            score = class_scores(logits, classes).sum()
            (gradient,) = torch.autograd.grad(score, read)
    prefix = model.spec.num_prefix_tokens
    activations = at_least_float32(read[0].detach()[:, prefix:])  # B N D
    weights = at_least_float32(gradient[:, prefix:]).mean(dim=1)  # B D
    return torch.einsum("bnd,bd->bn", activations, weights).relu().unflatten(1, grid)


def integrated_gradients(
    model: ViT, images: shapes.Images, *, classes: Classes, steps: int = 50
) -> Maps:
    """Return the integrated gradients of the class's logit, summed over each patch's pixels.

    The gradient is integrated on the straight line from a baseline to the image, times their
    difference ("Axiomatic Attribution for Deep Networks", arXiv 1703.01365, Eq. 1), by
    Gauss-Legendre quadrature. The baseline is 0 after normalisation: the dataset's mean colour.
    The sum over all patches approaches the logit of the image minus that of the baseline.

    Args:
        model: in any mode, which it keeps; it runs in eval mode.
        images: (B, C, H, W) normalised, on the model's device.
        classes: (B,) class numbers.
        steps: points on the line, 1 or more.

    Returns:
        (B, gh, gw), in units of the logit.

    Raises:
        SettingError: a model without a head, a class that it does not have, or steps below 1.
        ShapeError: images that do not fit the model.
    """
    check_classes(model, classes)
    count = check_number("steps", steps, 1)
    rows, columns = model.patch_embed.grid(images)
    points, sizes = np.polynomial.legendre.leggauss(count)  # on [-1, 1]
    with gradients_in_eval_mode(model):
        total = at_least_float32(torch.zeros_like(images))
        for point, size in zip(points.tolist(), sizes.tolist(), strict=True):
            part = ((point + 1) / 2 * images.detach()).requires_grad_()
            score = class_scores(model(part), classes).sum()
            (gradient,) = torch.autograd.grad(score, part)
            total += size / 2 * gradient
        pixels = total * images.detach()
    return reduce(pixels, "B C (gh P) (gw Q) -> B gh gw", "sum", gh=rows, gw=columns)
