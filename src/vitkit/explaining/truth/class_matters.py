"""Does the class matter? In a mosaic of four classes, the map of a class must point at its cell."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Float, Float64, Int64
from torch import Tensor

from vitkit.evaluation.intervals import wilson_interval
from vitkit.explaining.token_subset import TokenSubsets
from vitkit.explaining.truth.class_probability import ClassProbability
from vitkit.explaining.truth.maps import MapMaker
from vitkit.models.attention import Context
from vitkit.models.interface.intermediates import Embedded
from vitkit.models.layers import eval_mode
from vitkit.models.vit import ViT
from vitkit.shapes import Images

CELLS = 4
"""Images of a mosaic, 2 x 2."""
CHANCE = 1 / CELLS
MOSAICS = 100
AT_A_TIME = 8
"""Mosaics in a batch: each is four images."""


@dataclass(frozen=True)
class ClassMatters:
    """How well maps point at their class in mosaics of 2 x 2 images: shares in [0, 1], chance 0.25.

    Attributes:
        mosaics: their number.
        pointing: share of mosaics in which the class's own cell has the largest sum of values; a
            patch that speaks against the class counts against its cell.
        low: lower end of its 95 % interval (Wilson).
        high: upper end.
        positive_pointing: the same by the positive values alone.
        mass: mean share of the positive values in the class's own cell.
        model_pointing: share of mosaics in which the model's own probability falls furthest without
            the patches of the class's cell, apart from any map. If this is low, the model itself
            mixes the cells up.
    """

    mosaics: int
    pointing: float
    low: float
    high: float
    positive_pointing: float
    mass: float
    model_pointing: float


@dataclass(frozen=True)
class Mosaics:
    """Mosaics with the class to explain in each, and the cell where it is.

    Attributes:
        images: numbers of the images in the four cells, row by row, (M, 4).
        cells: the cell whose class is explained, from 0 to 3, (M,).
    """

    images: Int64[np.ndarray, "M 4"]
    cells: Int64[np.ndarray, " M"]


def class_matters(
    maps: MapMaker,
    model: ViT,
    images: Images,
    labels: Int64[Tensor, " B"],
    *,
    count: int = MOSAICS,
    seed: int = 0,
) -> ClassMatters | None:
    """Explain one class in each of many mosaics of four images of four classes.

    The Focus score of "Focus! Rating XAI Methods and Finding Biases" (arXiv 2109.15035), for each
    mosaic, is the share of the positive values. Beside it the cell with the largest sum of all
    values is counted, as a map with a sign also says what speaks against the class.

    A mosaic has twice the height and width of an image, and the model sees it as a `MosaicViT`.

    Args:
        maps: the method; one that does not depend on the class is expected to score 25 %.
        model: any ViT.
        images: (B, C, H, W) normalised, which the model classifies correctly.
        labels: their classes (B,).
        count: how many mosaics.
        seed: of their choice.

    Returns:
        The shares, or None if the images have fewer than four classes.
    """
    mosaics = choose_mosaics(labels.cpu().numpy(), count, seed)
    if mosaics is None:
        return None
    mosaic_model = MosaicViT(model)
    targets = labels.cpu()[mosaics.images[np.arange(count), mosaics.cells]]
    grids, needed = [], []
    for part in torch.arange(count).split(AT_A_TIME):
        sheets = build_mosaics(images, mosaics.images[part.numpy()])
        grids.append(maps(mosaic_model, sheets, targets[part]))
        needed.append(cell_effects(mosaic_model, sheets, targets[part]))
    return count_hits(torch.cat(grids), np.concatenate(needed), mosaics.cells)


class MosaicViT(ViT):
    """A model that sees an image as four images side by side: each cell has a whole image's tokens.

    Positions that were resampled to the mosaic's grid would be new to the model, which then hardly
    recognises the cells. It shares all weights with the model.

    Args:
        model: any ViT; it stays as it is.
    """

    def __init__(self, model: ViT) -> None:
        # not the constructor of ViT, which would make another model
        self.__dict__.update(model.__dict__)

    def embed(self, images: Images) -> Embedded:
        """Return the tokens of the four cells as one image of (2 gh, 2 gw) patches.

        Args:
            images: (B, C, 2 H, 2 W).
        """
        rows = torch.stack(images.chunk(2, dim=2))  # 2 B C H 2W
        cells = torch.stack(rows.chunk(2, dim=4), dim=1)  # 2 2 B C H W
        tokens, context, (height, width) = super().embed(cells.flatten(0, 2))
        prefix = self.spec.num_prefix_tokens
        patches = tokens[:, prefix:].unflatten(1, (height, width))
        patches = patches.unflatten(0, (2, 2, len(images))).permute(2, 0, 3, 1, 4, 5)
        # prefix tokens are the same in all cells
        tokens = torch.cat([tokens[: len(images), :prefix], patches.flatten(1, 4)], dim=1)
        if context.rotation is not None:
            sin, cos = context.rotation
            tiled = (self._tile(sin, height, width), self._tile(cos, height, width))
            context = Context(tiled)
        return Embedded(tokens, context, (2 * height, 2 * width))

    def _tile(
        self, angles: Float[Tensor, "T h"], height: int, width: int
    ) -> Float[Tensor, "tiled_T h"]:
        prefix = self.spec.num_prefix_tokens
        patches = angles[prefix:].unflatten(0, (height, width)).repeat(2, 2, 1)
        return torch.cat([angles[:prefix], patches.flatten(0, 1)])


def choose_mosaics(labels: Int64[np.ndarray, " B"], count: int, seed: int) -> Mosaics | None:
    """Draw four different classes, an image of each and the cell to explain, `count` times.

    It returns None for fewer than four classes.
    """
    classes = np.unique(labels)
    if len(classes) < CELLS:
        return None
    generator = np.random.default_rng(seed)
    members = {number: np.flatnonzero(labels == number) for number in classes}
    chosen = np.empty((count, CELLS), np.int64)
    for row in range(count):
        for cell, number in enumerate(generator.choice(classes, CELLS, replace=False)):
            chosen[row, cell] = generator.choice(members[number])
    return Mosaics(chosen, generator.integers(0, CELLS, count))


def build_mosaics(
    images: Images, numbers: Int64[np.ndarray, "M 4"]
) -> Float[Tensor, "M C twice_H twice_W"]:
    """Return images (M, C, 2 H, 2 W), each of four images in two rows."""
    rows = [torch.cat([images[numbers[:, i]], images[numbers[:, i + 1]]], dim=3) for i in (0, 2)]
    return torch.cat(rows, dim=2)


def cell_sums(grids: Float[Tensor, "M gh gw"]) -> Float64[np.ndarray, "M 4"]:
    """Return the sums of the values in the four cells of each map, row by row."""
    cells = grids.cpu().double().unflatten(1, (2, -1)).unflatten(3, (2, -1))
    sums: Float64[np.ndarray, "M 4"] = cells.sum(dim=(2, 4)).flatten(1).numpy()
    return sums


def cell_effects(
    model: ViT, sheets: Float[Tensor, "M C twice_H twice_W"], classes: Int64[Tensor, " M"]
) -> Float64[np.ndarray, "M 4"]:
    """Return how much the class needs each cell: minus its log-probability without the cell."""
    with eval_mode(model), torch.inference_mode():
        subsets = TokenSubsets(model, sheets)
        height, width = subsets.grid
        row = torch.arange(height).unsqueeze(1) * 2 // height
        cell = (row * 2 + torch.arange(width) * 2 // width).flatten()  # 0 to 3 of each patch
        probability, rest = ClassProbability(subsets, classes), []
        for number in range(CELLS):
            kept = torch.nonzero(cell != number).squeeze(1).expand(len(sheets), -1)
            rest.append(probability.log(kept))
    effects: Float64[np.ndarray, "M 4"] = -torch.stack(rest, dim=1).numpy()
    return effects


def count_hits(
    grids: Float[Tensor, "M gh gw"],
    effects: Float64[np.ndarray, "M 4"],
    cells: Int64[np.ndarray, " M"],
) -> ClassMatters:
    """Count in how many mosaics the explained cell has the largest sum of values.

    A map without positive values points nowhere: it counts as a miss, with a share of 25 %.
    """
    rows = np.arange(len(cells))
    sums, masses = cell_sums(grids), cell_sums(grids.clamp(min=0))
    total = masses.sum(axis=1)
    share = np.full(len(cells), CHANCE)
    np.divide(masses[rows, cells], total, out=share, where=total > 0)
    points = total > 0
    hits = int(((sums.argmax(axis=1) == cells) & points).sum())
    positive = float(((masses.argmax(axis=1) == cells) & points).mean())
    low, high = wilson_interval(hits, len(cells))
    needed = float((effects.argmax(axis=1) == cells).mean())
    mass = float(share.mean())
    return ClassMatters(len(cells), hits / len(cells), low, high, positive, mass, needed)
