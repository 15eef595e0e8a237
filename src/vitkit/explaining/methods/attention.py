"""Attention of the readout in one layer, and attention rollout: all layers, multiplied."""

from collections.abc import Callable
from numbers import Real
from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor

from vitkit import errors, shapes
from vitkit.explaining.methods.class_scores import (
    Maps,
    at_least_float32,
    check_layer,
    check_number,
    check_patch,
    has_map_head,
    pooling_map,
    readout_row,
    token_weights,
)
from vitkit.models.layers import eval_mode
from vitkit.models.record import Record
from vitkit.models.vit import ViT

HeadFusion = Literal["mean", "max", "min"]
FUSIONS: dict[str, Callable[..., Tensor]] = {
    "mean": torch.mean,
    "max": torch.amax,
    "min": torch.amin,
}


def attention(
    model: ViT,
    images: shapes.Images,
    *,
    layer: int = -1,
    head: int | None = None,
    query: int | None = None,
) -> Maps:
    """Return the attention of the readout to each patch, in one layer, or of one patch to all.

    The rows of the layer's map are averaged as the model's pooling averages the tokens: the class
    token's row, the mean over the patches' rows, or both. With a MAP head, whose own query has no
    layer, the last layer means that query and other layers the mean of the patches. Attention to
    prefix tokens is left out, and the rest sums to 1 over the patches ("An Image is Worth 16x16
    Words", arXiv 2010.11929, Fig. 6, one layer of it).

    Args:
        model: in any mode, which it keeps; it runs in eval mode.
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
        heads=None if head is None else [check_number("head", head, 0, model.spec.num_heads - 1)],
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


def attention_of_heads(model: ViT, images: shapes.Images) -> Float[Tensor, "B L k gh gw"]:
    """Return the map of the method `attention` for every layer and head, by one forward pass.

    Args:
        model: in any mode, which it keeps; it runs in eval mode.
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


@torch.inference_mode()
def rollout(
    model: ViT,
    images: shapes.Images,
    *,
    discard_ratio: float = 0.0,
    head_fusion: HeadFusion = "mean",
) -> Maps:
    """Return the share of each patch in what the head reads, if attention were the only operation.

    "Quantifying Attention Flow in Transformers" (arXiv 2005.00928), Eq. 1: with A the mean over a
    layer's heads and half of each token passed on by the residual connection, the product over the
    layers of (A + I) / 2, its rows normalised. The row of the readout is taken (`readout_rows`; a
    MAP head's is its own map), and the prefix tokens are dropped at the end, as they pass on what
    they read.

    Rollout is blind to the class: it knows nothing of the head's weights, nor of the values and
    MLPs, and is the same map whatever class is asked about.

    Args:
        model: in any mode, which it keeps; it runs in eval mode.
        images: (B, C, H, W) normalised, on the model's device.
        discard_ratio: the share of the smallest weights that each token's row of A loses, in
            [0, 1); the paper has 0. At least one weight stays.
        head_fusion: mean over the heads as in the paper, or their largest or smallest weight.

    Returns:
        (B, gh, gw), 0 or more; each image's patches sum to 1 less the share of the prefix tokens.

    Raises:
        SettingError: a ratio outside [0, 1), or another fusion.
        ShapeError: images that do not fit the model.
    """
    if not isinstance(discard_ratio, Real) or not 0 <= discard_ratio < 1:
        raise errors.SettingError.about(
            "discard_ratio", discard_ratio, "must be at least 0 and below 1"
        )
    if head_fusion not in FUSIONS:
        raise errors.SettingError.about(
            "head_fusion", head_fusion, f"must be one of {', '.join(FUSIONS)}"
        )
    record = Record(attention=range(model.spec.depth), pooling=has_map_head(model))
    with eval_mode(model):
        features = model.forward_features(images, record)
        row = readout_row(model, features, pooling_map(model, features, record))
    fuse = FUSIONS[head_fusion]
    # from the last layer to the first, a row times a matrix: no product of two matrices
    for maps in reversed(record.attention.values()):
        fused = fuse(at_least_float32(maps), dim=1)
        tokens = fused.shape[-1]
        smallest = int(discard_ratio * tokens)
        if smallest:
            # stable: among equal weights the same ones are dropped on every machine
            least = fused.argsort(dim=-1, stable=True)[..., :smallest]
            fused = fused.scatter(-1, least, 0.0)
        mixed = (fused + torch.eye(tokens, dtype=fused.dtype, device=fused.device)) / 2
        share = mixed / mixed.sum(dim=-1, keepdim=True)  # (A + I) / 2 with rows of sum 1
        row = torch.einsum("bn,bnt->bt", row, share)
    return row[:, model.spec.num_prefix_tokens :].unflatten(1, features.grid)
