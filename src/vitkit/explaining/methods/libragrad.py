"""LibraGrad: gradient x input, with backward paths that make it complete."""

from __future__ import annotations

import torch
from jaxtyping import Float, Int64
from torch import Tensor

from vitkit.explaining.balanced_gradients import BalancedGradients
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
