"""LeGrad: how a class's score reacts to the attention of each layer."""

from __future__ import annotations

import torch
from jaxtyping import Float, Int64
from torch import Tensor

from vitkit.explaining.class_scores import (
    at_least_float32,
    check_classes,
    class_scores,
    gradients_in_eval_mode,
)
from vitkit.explaining.methods import METHODS
from vitkit.explaining.methods.libragrad import backward_paths
from vitkit.models.encoder import block_calls
from vitkit.models.readout import Features
from vitkit.models.record import Record
from vitkit.models.vit import ViT
from vitkit.shapes import Images


def legrad(
    model: ViT, images: Images, *, classes: Int64[Tensor, " B"], gradients: str = "balanced"
) -> Float[Tensor, "B gh gw"]:
    """Return LeGrad's map: positive gradients of each layer's own score to its attention.

    The tokens after layer l go through the model's last norm, pooling and head, which gives the
    score s^l. The part above 0 of its gradient to the attention map A^l is averaged over heads and
    query rows; columns of patches are kept, and averaged over the layers ("LeGrad: An
    Explainability Method for Vision Transformers via Feature Formation Sensitivity", arXiv
    2404.03214, Sec. 3). With a MAP head A^l is the map of its query over the tokens of layer l, as
    in the paper for attentional poolers. The paper's last scaling to [0, 1] is left to the caller.

    By default the gradients are not the published ones: where one patch dominates the token that is
    read, the norm takes out the plain gradient towards it. Balanced gradients (LibraGrad, arXiv
    2411.16760) keep the scale of norms constant; they find a patch that decides alone, and have the
    better deletion score (`docs/benchmarks.md`). Layers are computed one by one, so that memory
    holds the maps of one layer.

    Args:
        model: in any mode; it runs in eval mode, gets no gradients, and keeps its mode.
        images: (B, C, H, W) normalised, on the model's device.
        classes: (B,) class numbers.
        gradients: `plain`, as published, or `balanced` (see `BalancedGradients`).

    Returns:
        (B, gh, gw), 0 or more.

    Raises:
        SettingError: a model without a head, a class that it does not have, or other gradients.
        ShapeError: images that do not fit the model.
    """
    check_classes(model, classes, METHODS)
    depth, by_map_head = model.spec.depth, model.spec.pooling == "map"
    layers = () if by_map_head else range(depth)
    record = Record(attention=layers, pooling=by_map_head, gradients=True)
    total: Tensor | float = 0.0
    with gradients_in_eval_mode(model), backward_paths(gradients):
        with torch.no_grad():
            tokens, context, grid = model.embed(images)
        for block in block_calls(model.blocks, record):
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
