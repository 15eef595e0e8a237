"""Similarity of what the head reads, or of one patch, to every patch: cosines of features."""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn import functional as F

from vitkit.explaining.class_scores import (
    at_least_float32,
    check_layer,
    check_patch,
    has_map_head,
    pooling_map,
    readout_row,
)
from vitkit.models.layers import eval_mode
from vitkit.models.record import Record
from vitkit.models.vit import ViT
from vitkit.shapes import Images


def similarity(
    model: ViT, images: Images, *, layer: int = -1, query: int | None = None
) -> Float[Tensor, "B gh gw"]:
    """Return the cosine of the class token, or of one patch, and each patch.

    The features are a block's tokens after the model's last norm, as DINOv2's
    `get_intermediate_layers` gives them (arXiv 2304.07193). Where the head does not read the class
    token, the mean of the tokens that it reads takes its place: of the patches, or of the patches
    with the weights of a MAP head (`readout_rows`).

    Args:
        model: in any mode; it runs in eval mode and without gradients, and keeps its mode.
        images: (B, C, H, W) normalised, on the model's device.
        layer: block number, from 0; negative ones count from the end.
        query: one patch, from 0, row by row, to which the others are compared.

    Returns:
        (B, gh, gw) in [-1, 1]; the patch `query` itself has 1.

    Raises:
        SettingError: a layer or a patch that does not exist.
        ShapeError: images that do not fit the model.
    """
    layer = check_layer(layer, model)
    prefix = model.spec.num_prefix_tokens
    by_map_head = query is None and has_map_head(model)
    record = Record(tokens=[layer], pooling=by_map_head)
    with eval_mode(model), torch.inference_mode():
        features = model.forward_features(images, record)
        tokens = at_least_float32(model.norm(record.tokens[layer]))  # B T D
        if query is not None:
            compared = tokens[:, prefix + check_patch(query, features.grid)]
        else:
            pooling = pooling_map(model, features, record) if by_map_head else None
            row = readout_row(model, features, pooling)
            compared = torch.einsum("bt,btd->bd", row, tokens)
        cosine = F.cosine_similarity(tokens[:, prefix:], compared.unsqueeze(1), dim=-1)  # B N
    return cosine.unflatten(1, features.grid)
