"""Deletion and insertion: how the class's probability falls and rises as patches go and come.

Patches are really dropped, as grey ones mislead ("Missingness Bias in Model Debugging", arXiv
2204.08945). The two tests are those of RISE (arXiv 1806.07421), on tokens instead of pixels.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Float, Float64, Int64
from torch import Tensor

from vitkit.explaining.token_subset import drop_in_order
from vitkit.explaining.truth.class_probability import ClassProbability
from vitkit.randomness import hash64, permutation
from vitkit.shapes import Images

STEPS = 10
"""Steps from all patches to one."""
RANDOM_ORDERS = 20
"""Half of them are drawn, the others are their reverses."""
Orders = Int64[Tensor, "B O N"]


@dataclass(frozen=True)
class ReferenceAreas:
    """The areas of random orders and of token occlusion, with which maps are compared; B images.

    Attributes:
        random: the insertion areas of random orders (B, 20); columns 2 i and 2 i + 1 are an order
            and its reverse, so column 2 i + 1 is the deletion area of the order of column 2 i.
        greedy_deletion: the deletion area of the order of token occlusion (B,).
        greedy_insertion: its insertion area (B,).
    """

    random: Float64[np.ndarray, "B 20"]
    greedy_deletion: Float64[np.ndarray, " B"]
    greedy_insertion: Float64[np.ndarray, " B"]

    def normalise(
        self, areas: Float64[np.ndarray, " B"], *, deletion: bool
    ) -> Float64[np.ndarray, " B"]:
        """Return (random - area) / (random - greedy): 0 for chance, 1 for token occlusion.

        NaN marks images on which it cannot be measured: there the greedy order itself is not
        better than the mean of the random orders by at least their standard deviation.

        Args:
            areas: of the maps' orders (B,).
            deletion: whether they are deletion areas (small is good) or insertion areas.
        """
        mean = self.random.mean(axis=1)
        greedy = self.greedy_deletion if deletion else self.greedy_insertion
        # the sign of both differences changes with the test, and their ratio does not
        span = mean - greedy if deletion else greedy - mean
        measurable = span > np.maximum(self.random.std(axis=1), 1e-9)
        score = np.full(len(areas), np.nan)
        np.divide(mean - areas, mean - greedy, out=score, where=measurable)
        return score


def join_references(parts: Sequence[ReferenceAreas]) -> ReferenceAreas:
    """Return the references of several batches of images as those of one batch."""
    return ReferenceAreas(
        np.concatenate([part.random for part in parts]),
        np.concatenate([part.greedy_deletion for part in parts]),
        np.concatenate([part.greedy_insertion for part in parts]),
    )


def reference_areas(
    probability: ClassProbability, keys: Int64[np.ndarray, " B"], *, seed: int = 0
) -> ReferenceAreas:
    """Measure 20 random orders and the greedy order of occlusion.

    Args:
        probability: of the images' classes.
        keys: of the images, as `image_keys` gives them.
        seed: of the random orders, which depend on it and on the image alone.
    """
    random = random_orders(keys, probability.patches, seed)
    greedy = occlusion_order(probability).unsqueeze(1)  # B 1 N
    areas = insertion_areas(probability, torch.cat([random, greedy, greedy.flip(2)], 1))
    return ReferenceAreas(areas[:, :RANDOM_ORDERS], areas[:, -1], areas[:, -2])


def deletion_and_insertion(
    probability: ClassProbability, orders: Int64[Tensor, "B N"]
) -> tuple[Float64[np.ndarray, " B"], Float64[np.ndarray, " B"]]:
    """Return the mean probability while patches are dropped, and while they are added, (B,) each.

    Args:
        probability: of the images' classes.
        orders: the patches of each image, the most important first.
    """
    areas = insertion_areas(probability, torch.stack([orders.flip(1), orders], dim=1))
    return areas[:, 0], areas[:, 1]


def insertion_areas(probability: ClassProbability, orders: Orders) -> Float64[np.ndarray, "B O"]:
    """Return the mean probability of the class while patches are added in an order.

    It is the area under the curve by trapezoids, from 1 patch to all N in ten steps, divided by
    its width. Dropping in an order is adding in its reverse.

    Args:
        probability: of the images' classes.
        orders: O orders of each image, (B, O, N).

    Returns:
        (B, O) in [0, 1].
    """
    batch, count, patches = orders.shape
    image = torch.arange(batch).repeat_interleave(count)
    flat = orders.flatten(0, 1)  # B O, N
    sizes = step_sizes(patches)
    curve = [
        probability.log(drop_in_order(flat, kept, first=True), image).exp() for kept in sizes[:-1]
    ]
    # with all patches, all orders of an image are the same
    full = probability.log(torch.arange(patches).expand(batch, -1)).exp()
    curve.append(full[image])
    heights = torch.stack(curve, dim=1)  # B O, S
    if len(sizes) == 1:
        area = heights[:, 0]
    else:
        across = torch.tensor(sizes, dtype=torch.float64)
        area = torch.trapezoid(heights, across, dim=1) / (sizes[-1] - sizes[0])
    return area.view(batch, count).numpy()


def step_sizes(patches: int) -> list[int]:
    """Return the numbers of patches at each step, from 1 to all of them; each once.

    >>> step_sizes(196)
    [1, 20, 39, 59, 78, 98, 118, 137, 157, 176, 196]
    >>> step_sizes(4)
    [1, 2, 3, 4]
    """
    return sorted({max(1, round(patches * step / STEPS)) for step in range(STEPS + 1)})


def occlusion_order(probability: ClassProbability) -> Int64[Tensor, "B N"]:
    """Order the patches by how far the class's probability falls if one alone is removed."""
    batch, count = probability.images, probability.patches
    if count == 1:
        return torch.zeros(batch, 1, dtype=torch.int64)
    numbers = torch.arange(count)
    # row i is all patches but i
    others = numbers.expand(count, -1)[~torch.eye(count, dtype=torch.bool)].view(count, count - 1)
    image = torch.arange(batch).repeat_interleave(count)
    rest = probability.log(others.repeat(batch, 1), image)
    # the lower the probability without the patch, the more it matters
    return rest.view(batch, count).argsort(dim=1, stable=True)


def random_orders(keys: Int64[np.ndarray, " B"], patches: int, seed: int) -> Orders:
    """Return 10 random orders of each image and their reverses, (B, 20, N).

    With the reverses, the difference of insertion and deletion is symmetric about 0, and each pass
    serves both tests.
    """
    orders = np.empty((len(keys), RANDOM_ORDERS, patches), np.int64)
    for row, key in enumerate(keys):
        for draw in range(0, RANDOM_ORDERS, 2):
            order = permutation(int(hash64(seed, key)), draw, patches)
            orders[row, draw] = order
            orders[row, draw + 1] = order[::-1]
    return torch.from_numpy(orders)


def map_orders(
    grids: Float[Tensor, "B gh gw"], keys: Int64[np.ndarray, " B"], seed: int
) -> Int64[Tensor, "B N"]:
    """Order the patches of each image from the largest value to the smallest.

    Equal values come in a random order that depends on the seed and the image alone: in the order
    of their numbers, a map that is constant would be a map of the top rows.
    """
    values = grids.detach().flatten(1).cpu().double().numpy()
    orders = np.empty(values.shape, np.int64)
    for row, key in enumerate(keys):
        ties = hash64(seed, key, -1, np.arange(values.shape[1]))
        orders[row] = np.lexsort((ties, -values[row]))
    return torch.from_numpy(orders)


def image_keys(images: Images) -> Int64[np.ndarray, " B"]:
    """Return a number for each image that depends on its own pixels alone."""
    numbers = images.detach().cpu().float().contiguous().numpy()
    return np.array([zlib.crc32(image.tobytes()) for image in numbers], np.int64)
