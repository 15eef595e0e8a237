"""Parts that several methods share: class scores, weights of the readout, checks of options."""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TypeAlias

import torch
from jaxtyping import Float, Int64
from torch import Tensor
from torch.nn import functional as F

from vitkit import errors, shapes
from vitkit.explaining.methods import METHODS, whole_number
from vitkit.models import layers
from vitkit.models.record import Record
from vitkit.models.vit import Features, ViT

Classes: TypeAlias = Int64[Tensor, " B"]
"""Class numbers of B images, from 0."""
Maps: TypeAlias = Float[Tensor, "B gh gw"]
"""A value for each patch of B images, larger = more important."""


@contextmanager
def gradients_in_eval_mode(model: ViT) -> Iterator[None]:
    """Run a `with` block in eval mode with gradients enabled, whatever the caller's settings."""
    with layers.eval_mode(model), torch.inference_mode(False), torch.enable_grad():
        yield


def check_classes(model: ViT, classes: Classes) -> None:
    """Check that the model has these classes.

    Args:
        model: any ViT.
        classes: (B,) class numbers, from 0.

    Raises:
        SettingError: a model without a head, or a class that it does not have.
    """
    count = model.spec.num_classes
    if not count:
        able = [method.name for method in METHODS.values() if not method.by_class]
        raise errors.SettingError(
            "the model has no head, so it has no class to explain; methods that need none: "
            f"{', '.join(able)}"
        )
    for number in classes.tolist():
        if not 0 <= number < count:
            raise errors.SettingError(
                f"class {number} does not exist; classes are 0 to {count - 1}"
            )


def check_finite(logits: shapes.Logits) -> shapes.Logits:
    """Return logits (B, K) that are numbers.

    Raises:
        CheckpointError: logits of a model whose weights are broken, or overflow.
    """
    if not torch.isfinite(logits).all():
        raise errors.CheckpointError(
            "the model's logits are not finite (NaN or infinity), so no class can be explained; "
            "check its weights, or use the model in float32"
        )
    return logits


def class_scores(logits: shapes.Logits, classes: Classes) -> Float[Tensor, " B"]:
    """Return the logit of each row's class: (B, K), (B,) -> (B,)."""
    # a copy: a graph cannot keep the predicted classes of `torch.inference_mode`
    return logits.gather(1, classes.to(logits.device).clone()[:, None])[:, 0]


def at_least_float32(values: Float[Tensor, "..."]) -> Float[Tensor, "..."]:
    """Return half precision as float32, for sums; other dtypes unchanged."""
    return values.to(torch.promote_types(values.dtype, torch.float32))


def token_weights(model: ViT, grid: shapes.Grid) -> Float[Tensor, " T"]:
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
    model: ViT, features: Features, pooling: Float[Tensor, "B k 1 N"] | None
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


def check_number(name: str, value: object, least: int, most: int | None = None) -> int:
    """Return an option as a whole number of a range; NumPy's numbers are taken, too.

    Raises:
        SettingError: not one whole number, or one outside of the range.
    """
    number = whole_number(value)
    if number is None or number < least or (most is not None and number > most):
        bounds = f", {least} or more" if most is None else f" from {least} to {most}"
        raise errors.SettingError.about(name, value, f"must be a whole number{bounds}")
    return number


def check_layer(layer: object, model: ViT) -> int:
    """Return the number of a block, from 0; negative ones count from the end.

    Raises:
        SettingError: not one whole number, or a block that the model does not have.
    """
    depth = model.spec.depth
    return check_number("layer", layer, -depth, depth - 1) % depth


def check_patch(query: object, grid: shapes.Grid) -> int:
    """Return the number of a patch, from 0, row by row.

    Raises:
        SettingError: not one whole number, or a patch that the images do not have.
    """
    return check_number("query", query, 0, math.prod(grid) - 1)
