"""SaCo: do patches with more salience also have more effect on the prediction?"""

from __future__ import annotations

import numpy as np
import torch
from jaxtyping import Float, Float64, Int64
from torch import Tensor

from vitkit.explaining.token_subset import TokenSubsets
from vitkit.explaining.truth.deletion import ROWS, class_log_probabilities

GROUPS = 10
"""Groups of patches, as in the paper."""


def saco(
    subsets: TokenSubsets,
    grids: Float[Tensor, "B gh gw"],
    orders: Int64[Tensor, "B N"],
    classes: Int64[Tensor, " B"],
    *,
    rows: int = ROWS,
) -> Float64[np.ndarray, " B"]:
    """Return the salience-guided faithfulness coefficient of each image (arXiv 2404.01415, Alg. 1).

    The patches are cut into ten groups by salience. Each pair of groups counts with the difference
    of their saliences: positively if dropping the more salient one lowers the probability at least
    as much, else negatively. The sum is divided by the sum of the differences. Here a group's
    patches are dropped instead of being replaced by the image's mean; and its salience is the mean
    over its patches instead of their sum, as the sizes of groups may differ by one.

    Args:
        subsets: of the images; without gradients, and the model in eval mode.
        grids: the maps, larger = more important.
        orders: their patches, the most important first.
        classes: the class whose probability is measured, of each image.
        rows: forward passes at a time.

    Returns:
        (B,) in [-1, 1]; NaN for a map of equal values, which claims nothing.
    """
    salience, rest = group_effects(subsets, grids, orders, classes, rows)
    # the difference of each pair, the more salient group first: B G G above the diagonal
    weights = np.triu(salience[:, :, None] - salience[:, None, :], k=1)
    # the less is left of the probability, the larger the effect
    agree = np.where(rest[:, :, None] <= rest[:, None, :], 1.0, -1.0)
    total = weights.sum(axis=(1, 2))
    scores = np.full(len(total), np.nan)
    np.divide((weights * agree).sum(axis=(1, 2)), total, out=scores, where=total > 0)
    return scores


def group_effects(
    subsets: TokenSubsets,
    grids: Float[Tensor, "B gh gw"],
    orders: Int64[Tensor, "B N"],
    classes: Int64[Tensor, " B"],
    rows: int = ROWS,
) -> tuple[Float64[np.ndarray, "B G"], Float64[np.ndarray, "B G"]]:
    """Return the mean salience of each group, and the class's probability without the group.

    Arguments as for `saco`. The only group of an image of one patch stays.
    """
    batch, count = orders.shape
    values = grids.detach().flatten(1).cpu().double().gather(1, orders)
    image = torch.arange(batch)
    salience, rest = [], []
    groups = np.array_split(np.arange(count), min(GROUPS, count))  # sizes differ by one at most
    for group in groups:
        salience.append(values[:, group].mean(dim=1))
        kept = np.setdiff1d(np.arange(count), group) if len(groups) > 1 else group
        others = orders[:, kept].sort(dim=1).values
        rest.append(class_log_probabilities(subsets, others, image, classes, rows).exp())
    return torch.stack(salience, dim=1).numpy(), torch.stack(rest, dim=1).numpy()
