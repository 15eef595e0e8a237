"""First-layer filters: the principal components of the patch embedding."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from jaxtyping import Float, Float64
from torch import Tensor, nn

from vitkit.errors import CheckpointError
from vitkit.models.embedding import HybridEmbedding, NormedPatchEmbedding
from vitkit.models.hybrid import StdConv2d, standardise
from vitkit.models.vit import ViT

MOST_FILTERS = 28
"""Components that are shown; as many as in Fig. 7 of the paper."""


@dataclass(frozen=True)
class Filters:
    """Principal components of the filters that a model applies to pixels first.

    Attributes:
        components: (n, P, Q, C), each of length 1, the one of the largest variance first; P and Q
            are the filter's height and width in pixels, C is 1 for grey images and 3 for RGB.
        shares: (n,) share of the variance of each, in [0, 1].
        layer: the layer whose filters these are, in words.
        missing: why there are none, as a sentence; else empty.
    """

    components: Float64[np.ndarray, "n P Q C"]
    shares: Float64[np.ndarray, " n"]
    layer: str = "patch embedding"
    missing: str = ""


def first_layer_filters(model: ViT, count: int = MOST_FILTERS) -> Filters:
    """Return the principal components of the first-layer filters.

    "An Image is Worth 16x16 Words" (arXiv 2010.11929), Fig. 7 left. The D filters of the patch
    embedding are D points in the space of C * P * Q pixel values; the components are the directions
    of largest variance around the filters' mean. The sign of a component is chosen so that its
    largest weight is positive. Weights apply to normalised pixels. A patch embedding that begins
    with a norm counts with that norm's scale. In a hybrid the filters are those of the backbone's
    first convolution, standardised where the convolution standardises them.

    Args:
        model: any ViT; only its weights are used.
        count: components at most; those without variance are left out.

    Raises:
        CheckpointError: weights that are not finite.
    """
    found = _pixel_kernel(model)
    if found is None:
        return _no_filters(model, "The backbone has no convolution that takes the image.")
    kernel, layer = found
    weights = kernel.detach().double().cpu().numpy()  # D C P Q
    if not np.isfinite(weights).all():
        raise CheckpointError(
            f"the weights of the {layer} are not finite (NaN or infinity); use an earlier model"
        )
    rows = weights.reshape(len(weights), -1)
    rows = rows - rows.mean(axis=0)
    # right singular vectors of the centred filters are the components, largest variance first
    _, sizes, directions = np.linalg.svd(rows, full_matrices=False)
    variances = sizes**2
    # components without variance, as with few filters, are rounding errors
    rank = int((sizes > sizes[0] * max(rows.shape) * np.finfo(np.float64).eps).sum())
    if not rank:
        return _no_filters(model, "All first-layer filters are equal, so they have no components.")
    shares = variances / variances.sum()
    directions = directions[: min(count, rank)]
    largest = np.abs(directions).argmax(axis=1)
    # The sign of a singular vector is arbitrary; a fixed rule makes figures repeatable.
    signs = np.sign(directions[np.arange(len(directions)), largest])
    components = (directions * signs[:, None]).reshape(-1, *weights.shape[1:])
    return Filters(components.transpose(0, 2, 3, 1), shares[: len(directions)], layer)


def _no_filters(model: ViT, reason: str) -> Filters:
    empty = np.zeros((0, 0, 0, model.spec.in_channels))
    return Filters(empty, np.zeros(0), missing=reason)


def _pixel_kernel(model: ViT) -> tuple[Float[Tensor, "D C P Q"], str] | None:
    """Return the weights that are applied to pixels first, and the name of their layer."""
    stem = model.patch_embed
    if isinstance(stem, HybridEmbedding):
        for part in stem.backbone.modules():
            if isinstance(part, StdConv2d):
                return standardise(part.weight, part.variant), "first convolution"
            if isinstance(part, nn.Conv2d) and part.weight.shape[1] == model.spec.in_channels:
                return part.weight, "first convolution"
        return None
    weight = stem.proj.weight
    if isinstance(stem, NormedPatchEmbedding):
        weight = weight * stem.norm_patches.weight  # D (C P Q)
    return weight.reshape(len(weight), stem.in_channels, *stem.patch_size), "patch embedding"
