"""SaCo: do patches with more salience also have more effect on the prediction?"""

from __future__ import annotations

import numpy as np
import torch
from jaxtyping import Float, Float64, Int64
from torch import Tensor

from vitkit.explaining.truth.class_probability import ClassProbability

GROUPS = 10
"""Groups of patches, as in the paper."""


def saco(
    probability: ClassProbability,
    grids: Float[Tensor, "B gh gw"],
    orders: Int64[Tensor, "B N"],
) -> Float64[np.ndarray, " B"]:
    """Return the salience-guided faithfulness coefficient of each image (arXiv 2404.01415, Alg. 1).

    The patches are cut into ten groups by salience. Each pair of groups counts with the difference
    of their saliences: positively if dropping the more salient one lowers the probability at least
    as much, else negatively. The sum is divided by the sum of the differences. Here a group's
    patches are dropped instead of being replaced by the image's mean; and its salience is the mean
    over its patches instead of their sum, as the sizes of groups may differ by one.

    Args:
        probability: of the images' classes.
        grids: the maps, larger = more important.
        orders: their patches, the most important first.

    Returns:
        (B,) in [-1, 1]; NaN for a map of equal values, which claims nothing, and where no group has
        an effect, as with a single class.
    """
    salience, rest = _group_effects(probability, grids, orders)
    # the difference of each pair, the more salient group first: B G G above the diagonal
    weights = np.triu(salience[:, :, None] - salience[:, None, :], k=1)
    # the less is left of the probability, the larger the effect
    agree = np.where(rest[:, :, None] <= rest[:, None, :], 1.0, -1.0)
    total = weights.sum(axis=(1, 2))
    scores = np.full(len(total), np.nan)
    measurable = (total > 0) & (np.ptp(rest, axis=1) > 0)
    np.divide((weights * agree).sum(axis=(1, 2)), total, out=scores, where=measurable)
    return scores


def _group_effects(
    probability: ClassProbability,
    grids: Float[Tensor, "B gh gw"],
    orders: Int64[Tensor, "B N"],
) -> tuple[Float64[np.ndarray, "B G"], Float64[np.ndarray, "B G"]]:
    """Return the mean salience of each group, and the class's probability without the group.

    The only group of an image of one patch stays.
    """
    count = orders.shape[1]
    values = grids.detach().flatten(1).cpu().double().gather(1, orders)
    salience, rest = [], []
    groups = np.array_split(np.arange(count), min(GROUPS, count))  # sizes differ by one at most
    for group in groups:
        salience.append(values[:, group].mean(dim=1))
        kept = np.setdiff1d(np.arange(count), group) if len(groups) > 1 else group
        rest.append(probability.log(orders[:, kept].sort(dim=1).values).exp())
    return torch.stack(salience, dim=1).numpy(), torch.stack(rest, dim=1).numpy()
