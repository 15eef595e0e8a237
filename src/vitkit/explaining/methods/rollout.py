"""Attention rollout: the attention of all layers, multiplied (arXiv 2005.00928)."""

from __future__ import annotations

from collections.abc import Callable
from numbers import Real
from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor

from vitkit.errors import SettingError
from vitkit.explaining.class_scores import at_least_float32
from vitkit.explaining.readout_rows import has_map_head, pooling_map, readout_row
from vitkit.models.layers import eval_mode
from vitkit.models.record import Record
from vitkit.models.vit import ViT
from vitkit.shapes import AttentionMaps, Images

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
    if not isinstance(discard_ratio, Real) or not 0 <= discard_ratio < 1:
        raise SettingError.about("discard_ratio", discard_ratio, "must be at least 0 and below 1")
    if head_fusion not in FUSIONS:
        raise SettingError.about("head_fusion", head_fusion, f"must be one of {', '.join(FUSIONS)}")
    record = Record(attention=range(model.spec.depth), pooling=has_map_head(model))
    with eval_mode(model), torch.inference_mode():
        features = model.forward_features(images, record)
        row = readout_row(model, features, pooling_map(model, features, record))
        # From the last layer to the first, a row times a matrix: no product of two matrices.
        for maps in reversed(record.attention.values()):
            row = torch.einsum(
                "bn,bnt->bt", row, _layer_share(at_least_float32(maps), discard_ratio, head_fusion)
            )
    return row[:, model.spec.num_prefix_tokens :].unflatten(1, features.grid)


def _layer_share(
    maps: AttentionMaps, discard_ratio: float, head_fusion: HeadFusion
) -> Float[Tensor, "B T T"]:
    """Return (A + I) / 2 with rows that sum to 1."""
    fused = FUSIONS[head_fusion](maps, dim=1)
    tokens = fused.shape[-1]
    smallest = int(discard_ratio * tokens)
    if smallest:
        least = fused.argsort(dim=-1, stable=True)[..., :smallest]
        fused = fused.scatter(-1, least, 0.0)
    mixed = (fused + torch.eye(tokens, dtype=fused.dtype, device=fused.device)) / 2
    return mixed / mixed.sum(dim=-1, keepdim=True)
