"""Gradient rollout: attention of all layers, weighted by its gradient (arXiv 2103.15679)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from jaxtyping import Float, Int64
from torch import Tensor

from vitkit.explaining.class_scores import (
    at_least_float32,
    check_classes,
    class_scores,
    gradients_in_eval_mode,
    has_map_head,
    readout_row,
)
from vitkit.explaining.methods import METHODS
from vitkit.explaining.methods.libragrad import backward_paths
from vitkit.models.record import Record
from vitkit.models.vit import ViT
from vitkit.shapes import AttentionMaps, Images


def gradient_rollout(
    model: ViT, images: Images, *, classes: Int64[Tensor, " B"], gradients: str = "balanced"
) -> Float[Tensor, "B gh gw"]:
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
    check_classes(model, classes, METHODS)
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
    weights = [_weighted(*pair) for pair in zip(maps, found, strict=True)]
    if record.pooling:
        pooling, *weights = weights
        row = _read_by_query(readout_row(model, features, pooling.unsqueeze(1)), weights)
    else:
        row = _rolled_out(readout_row(model, features), weights)
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


def _weighted(maps: AttentionMaps, gradient: AttentionMaps) -> Float[Tensor, "B Q T"]:
    """Return the mean over the heads of relu(grad A * A), Eq. 5."""
    return at_least_float32(gradient * maps.detach()).relu().mean(dim=1)
