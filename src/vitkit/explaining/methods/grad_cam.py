"""Grad-CAM on tokens: channels of one layer, weighted by their mean gradient (arXiv 1610.02391)."""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Float, Int64
from torch import Tensor, nn

from vitkit.explaining.class_scores import (
    at_least_float32,
    check_classes,
    check_layer,
    class_scores,
    gradients_in_eval_mode,
)
from vitkit.explaining.methods import METHODS
from vitkit.models.encoder import block_calls
from vitkit.models.readout import Features
from vitkit.models.vit import ViT
from vitkit.shapes import Images


def grad_cam(
    model: ViT, images: Images, *, classes: Int64[Tensor, " B"], layer: int = -1
) -> Float[Tensor, "B gh gw"]:
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
    check_classes(model, classes, METHODS)
    layer = check_layer(layer, model)
    read: list[Tensor] = []

    def keep(module: nn.Module, inputs: tuple[Any, ...]) -> None:
        read.append(inputs[0])

    calls = block_calls(model.blocks)
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
