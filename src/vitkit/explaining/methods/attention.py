"""Attention of the readout, or of one patch, to the patches in one layer."""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

from vitkit.explaining.class_scores import (
    at_least_float32,
    check_layer,
    check_number,
    check_patch,
    has_map_head,
    pooling_map,
    token_weights,
)
from vitkit.models.layers import eval_mode
from vitkit.models.record import Record
from vitkit.models.vit import ViT
from vitkit.shapes import Images


def attention(
    model: ViT,
    images: Images,
    *,
    layer: int = -1,
    head: int | None = None,
    query: int | None = None,
) -> Float[Tensor, "B gh gw"]:
    """Return the attention of the readout to each patch, in one layer, or of one patch to all.

    The rows of the layer's map are averaged as the model's pooling averages the tokens: the class
    token's row, the mean over the patches' rows, or both. With a MAP head, whose own query has no
    layer, the last layer means that query and other layers the mean of the patches. Attention to
    prefix tokens is left out, and the rest sums to 1 over the patches ("An Image is Worth 16x16
    Words", arXiv 2010.11929, Fig. 6, one layer of it).

    Args:
        model: in any mode; it runs in eval mode and without gradients, and keeps its mode.
        images: (B, C, H, W) normalised, on the model's device.
        layer: block number, from 0; negative ones count from the end.
        head: one head; default the mean over heads.
        query: one patch, from 0, row by row: its row of the layer's map, not the readout's.

    Returns:
        (B, gh, gw), each image's patches summing to 1.

    Raises:
        SettingError: a layer, a head or a patch that does not exist.
        ShapeError: images that do not fit the model.
    """
    layer = check_layer(layer, model)
    grid = model.patch_embed.grid(images)
    prefix = model.spec.num_prefix_tokens
    weights = token_weights(model, grid)
    if query is not None:
        weights = torch.zeros_like(weights)
        weights[prefix + check_patch(query, grid)] = 1
    by_map_head = query is None and has_map_head(model) and layer == model.spec.depth - 1
    queries = weights.nonzero().flatten().tolist()
    record = Record(
        attention=[] if by_map_head else [layer],
        pooling=by_map_head,
        heads=None if head is None else [check_number("head", head)],
        queries=None if by_map_head else queries,  # a MAP head has one row
    )
    with eval_mode(model), torch.inference_mode():
        features = model.forward_features(images, record)
        pooling = pooling_map(model, features, record) if by_map_head else None
    if pooling is not None:
        return at_least_float32(pooling).mean(dim=(1, 2)).unflatten(1, grid)
    maps = at_least_float32(record.attention[layer]).mean(dim=1)  # B Q T
    patches = (weights[queries] @ maps)[:, prefix:]  # B N
    return (patches / patches.sum(dim=1, keepdim=True)).unflatten(1, grid)


def attention_of_heads(model: ViT, images: Images) -> Float[Tensor, "B L k gh gw"]:
    """Return the map of the method `attention` for every layer and head, by one forward pass.

    Args:
        model: in any mode; it runs in eval mode and without gradients, and keeps its mode.
        images: (B, C, H, W) normalised, on the model's device.

    Returns:
        (B, L, k, gh, gw), the patches of each map summing to 1.
    """
    spec, grid = model.spec, model.patch_embed.grid(images)
    weights = token_weights(model, grid)
    queries = weights.nonzero().flatten().tolist()
    is_map = has_map_head(model)
    record = Record(
        attention=range(spec.depth), pooling=is_map, queries=None if is_map else queries
    )
    with eval_mode(model), torch.inference_mode():
        features = model.forward_features(images, record)
        pooling = pooling_map(model, features, record)
    layers = []
    for maps in record.attention.values():  # B k Q T
        rows = at_least_float32(maps[:, :, queries] if is_map else maps)
        patches = (weights[queries] @ rows)[..., spec.num_prefix_tokens :]  # B k N
        layers.append(patches / patches.sum(dim=-1, keepdim=True))
    if pooling is not None:  # as the method: the last map is that of the head's own query
        layers[-1] = at_least_float32(pooling).mean(dim=2)
    return torch.stack(layers, dim=1).unflatten(-1, grid)
