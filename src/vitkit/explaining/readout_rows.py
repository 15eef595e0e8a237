"""Weights of the tokens in the head's input: the row with which a relevance map begins."""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn import functional as F

from vitkit.explaining.class_scores import at_least_float32
from vitkit.models.readout import Features
from vitkit.models.record import Record
from vitkit.models.vit import ViT
from vitkit.shapes import Grid


def token_weights(model: ViT, grid: Grid) -> Float[Tensor, " T"]:
    """Return the weight of each token in the head's input, the same for all images.

    It is found by pooling one-hot tokens, so it is what the model's own pooling does: 1 for the
    class token; a half each for the class and the distillation token of a model that takes the mean
    of its two heads; 1 / N for each patch under `mean`, 1 / T for each token under `mean_all`; a
    half for the class token and the rest for the patches under `cls_mean`. A MAP head has weights
    of its own for each image; here its patches have the same weight.

    Args:
        model: any ViT.
        grid: (gh, gw) of the patches.

    Returns:
        (T,) on the model's device, float32 at least, of sum 1.
    """
    spec = model.spec
    prefix = spec.num_prefix_tokens
    like = at_least_float32(next(model.parameters()).detach()[:0])
    patches = grid[0] * grid[1]
    if spec.pooling == "map":
        weights = like.new_zeros(prefix + patches)
        weights[prefix:] = 1 / patches
        return weights
    eye = torch.eye(prefix + patches, dtype=like.dtype, device=like.device)
    one_hot = Features.split(eye.unsqueeze(0), grid, spec)  # 1 T T: the widths number the tokens
    rows = [model.attn_pool(one_hot)]
    if model.dist_pool is not None and spec.distilled_readout == "mean":
        rows.append(model.dist_pool(one_hot))
    # `cls_mean` pools two vectors side by side, which weigh the same
    return torch.cat(rows, dim=1).unflatten(1, (-1, len(eye))).mean(dim=(0, 1))


def readout_row(
    model: ViT, features: Features, pooling: Float[Tensor, "B k 1 N"] | None = None
) -> Float[Tensor, "B T"]:
    """Return the weight of each token in the head's input, for each image.

    Args:
        model: any ViT.
        features: features of the images.
        pooling: (B, k, 1, N), weights of a MAP head over the patches, such as its recorded map; the
            mean over the heads is the row. Other models need none.

    Returns:
        (B, T); see `token_weights` for models without a MAP head. Without a MAP head each row has
        the sum 1.
    """
    if pooling is None:
        return token_weights(model, features.grid).expand(len(features.patches), -1)
    patches = at_least_float32(pooling).mean(dim=(1, 2))  # B N
    return F.pad(patches, (model.spec.num_prefix_tokens, 0))


def pooling_map(model: ViT, features: Features, record: Record) -> Float[Tensor, "B k 1 N"] | None:
    """Return the recorded map (B, k, 1, N) of a MAP head's query, `None` for other models.

    Args:
        model: any ViT.
        features: features of the forward pass of this record.
        record: requested with `pooling=has_map_head(model)`.
    """
    if not has_map_head(model):
        return None
    model.forward_head(features, record)
    return record.pooling[0]


def has_map_head(model: ViT) -> bool:
    """Return True if the model pools by attention, with a query of its own."""
    return model.spec.pooling == "map"
