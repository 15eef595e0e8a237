"""Attention rollout: the attention of all layers, multiplied (arXiv 2005.00928)."""

from __future__ import annotations

from collections.abc import Callable
from numbers import Real
from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor

from vitkit.errors import SettingError
from vitkit.explaining.class_scores import at_least_float32, has_map_head, pooling_map, readout_row
from vitkit.models.layers import eval_mode
from vitkit.models.record import Record
from vitkit.models.vit import ViT
from vitkit.shapes import AttentionMaps, Grid, Images

HeadFusion = Literal["mean", "max", "min"]
FUSIONS: dict[str, Callable[..., Tensor]] = {
    "mean": torch.mean,
    "max": torch.amax,
    "min": torch.amin,
}


def rollout(
    model: ViT, images: Images, *, discard_ratio: float = 0.0, head_fusion: HeadFusion = "mean"
) -> Float[Tensor, "B gh gw"]:
    """Return the share of each patch in what the head reads, if attention were the only operation.

    "Quantifying Attention Flow in Transformers" (arXiv 2005.00928), Eq. 1: with A the mean over a
    layer's heads and half of each token passed on by the residual connection, the product over the
    layers of (A + I) / 2, its rows normalised. The row of the readout is taken (`readout_rows`; a
    MAP head's is its own map), and the prefix tokens are dropped at the end, as they pass on what
    they read.

    Rollout is blind to the class: it knows nothing of the head's weights, nor of the values and
    MLPs, and is the same map whatever class is asked about.

    Args:
        model: in any mode; it runs in eval mode and without gradients, and keeps its mode.
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
    row, maps, grid = _record(model, images, discard_ratio, head_fusion)
    # From the last layer to the first, a row times a matrix: no product of two matrices.
    for weights in reversed(maps):
        row = _pass_on(row, _layer_share(weights, discard_ratio, head_fusion))
    return row[:, model.spec.num_prefix_tokens :].unflatten(1, grid)


def rollout_over_depth(
    model: ViT, images: Images, *, discard_ratio: float = 0.0, head_fusion: HeadFusion = "mean"
) -> Float[Tensor, "L B gh gw"]:
    """Return the rollout of the first layer alone, then of the first two, at last of all.

    Args:
        model: as for `rollout`.
        images: as for `rollout`.
        discard_ratio: as for `rollout`.
        head_fusion: as for `rollout`.

    Returns:
        (L, B, gh, gw); the last is `rollout`. Each begins with the weights of the tokens in what
        the head reads; a MAP head's are those after the last layer.

    Raises:
        SettingError, ShapeError: as for `rollout`.
    """
    row, maps, grid = _record(model, images, discard_ratio, head_fusion)
    shares = [_layer_share(weights, discard_ratio, head_fusion) for weights in maps]
    rows = []
    for depth in range(1, len(shares) + 1):
        through = row
        for share in reversed(shares[:depth]):
            through = _pass_on(through, share)
        rows.append(through[:, model.spec.num_prefix_tokens :].unflatten(1, grid))
    return torch.stack(rows)


def _record(
    model: ViT, images: Images, discard_ratio: float, head_fusion: HeadFusion
) -> tuple[Float[Tensor, "B T"], list[AttentionMaps], Grid]:
    """Return the tokens' weights in the head's input, the maps of all layers, and the grid."""
    if not isinstance(discard_ratio, Real) or not 0 <= discard_ratio < 1:
        raise SettingError.about("discard_ratio", discard_ratio, "must be at least 0 and below 1")
    if head_fusion not in FUSIONS:
        raise SettingError.about("head_fusion", head_fusion, f"must be one of {', '.join(FUSIONS)}")
    record = Record(attention=range(model.spec.depth), pooling=has_map_head(model))
    with eval_mode(model), torch.inference_mode():
        features = model.forward_features(images, record)
        row = readout_row(model, features, pooling_map(model, features, record))
    return row, [*record.attention.values()], features.grid


@torch.inference_mode()
def _pass_on(row: Float[Tensor, "B T"], share: Float[Tensor, "B T T"]) -> Float[Tensor, "B T"]:
    return torch.einsum("bn,bnt->bt", row, share)


@torch.inference_mode()
def _layer_share(
    maps: AttentionMaps, discard_ratio: float, head_fusion: HeadFusion
) -> Float[Tensor, "B T T"]:
    """Return (A + I) / 2 with rows that sum to 1."""
    fused = FUSIONS[head_fusion](at_least_float32(maps), dim=1)
    tokens = fused.shape[-1]
    smallest = int(discard_ratio * tokens)
    if smallest:
        # Stable: among equal weights the same ones are dropped on every machine.
        least = fused.argsort(dim=-1, stable=True)[..., :smallest]
        fused = fused.scatter(-1, least, 0.0)
    mixed = (fused + torch.eye(tokens, dtype=fused.dtype, device=fused.device)) / 2
    return mixed / mixed.sum(dim=-1, keepdim=True)
