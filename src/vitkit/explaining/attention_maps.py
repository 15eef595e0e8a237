"""Attention of the readout to the patches: of the class token, or of the mean query."""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

from vitkit.errors import SettingError
from vitkit.models.layers import eval_mode
from vitkit.models.record import Record
from vitkit.models.vit import ViT
from vitkit.shapes import Images


def attention_grid(
    model: ViT, images: Images, *, layer: int = -1, head: int | None = None
) -> Float[Tensor, "B gh gw"]:
    """Return the attention of the readout's query to each patch, in one layer.

    The query is the class token where the model pools the class token, and the mean over the patch
    queries where it pools their mean; with a MAP head, whose own query has no layer, the last layer
    means that query and other layers the mean. Attention to prefix tokens is left out, and the rest
    sums to 1 over the patches ("An Image is Worth 16x16 Words", Fig. 6, one layer of it).

    Args:
        model: in any mode; it runs in eval mode and without gradients, and keeps its mode.
        images: (B, C, H, W) normalised, on the model's device.
        layer: block number, from 0; negative ones count from the end.
        head: one head; default the mean over heads.

    Returns:
        (B, gh, gw), each image's patches summing to 1.

    Raises:
        SettingError: a layer or a head that the model does not have.
        ShapeError: images that do not fit the model.
    """
    _check_number("layer", layer)
    heads = None
    if head is not None:
        _check_number("head", head)
        heads = [head]
    by_class_token = model.spec.pooling in ("cls", "cls_mean")
    by_map_head = model.spec.pooling == "map" and layer in (-1, model.spec.depth - 1)
    record = Record(
        attention=[layer],
        pooling=by_map_head,
        heads=heads,
        queries=[0] if by_class_token else None,  # the class token alone, or all
    )
    with eval_mode(model), torch.inference_mode():
        features = model.forward_features(images, record)
        if by_map_head:
            model.forward_head(features, record)
    if by_map_head:
        return record.pooling[0].mean(dim=(1, 2)).unflatten(1, features.grid)  # B k 1 N
    (maps,) = record.attention.values()  # B k Q T
    prefix = model.spec.num_prefix_tokens
    if not by_class_token:
        maps = maps[:, :, prefix:]  # queries of patches
    patches = maps.mean(dim=(1, 2))[:, prefix:]  # B N
    patches = patches / patches.sum(dim=1, keepdim=True)
    return patches.unflatten(1, features.grid)


def _check_number(name: str, number: object) -> None:
    if not isinstance(number, int):
        raise SettingError(
            f"{name} {number!r} must be one whole number; for the maps of several use vitkit.Record"
        )
