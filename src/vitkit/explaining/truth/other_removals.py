"""A second and a third opinion on deletion: patches turn grey, or blurred, instead of dropped."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Float, Int64
from torch import Tensor
from torch.nn import functional as F

from vitkit.explaining.truth.class_probability import ClassProbability
from vitkit.explaining.truth.deletion import (
    ReferenceAreas,
    image_keys,
    insertion_areas,
    join_references,
    map_orders,
    reference_areas,
)
from vitkit.explaining.truth.maps import BATCH
from vitkit.explaining.truth.score import TruthScore
from vitkit.explaining.truth.statistics import kendall_tau, median_or_none
from vitkit.models.layers import eval_mode
from vitkit.models.vit import ViT
from vitkit.shapes import Images, Logits

COVERS = ("grey", "blur")
"""What stands in the place of a patch that is not dropped: the mean colour, or a blurred image."""
COVERED_IMAGES = 50
"""Images of these opinions, the first ones: a covered patch costs as much as any other."""


@dataclass(frozen=True)
class OtherRemovals:
    """Deletion by patches that turn grey or blurred, and how far it agrees with dropped ones.

    The taus are Kendall's tau-b over the images: do the same images get the better scores? None
    where fewer than two images are measurable by both, or all scores are equal.

    Attributes:
        images: their number.
        grey: median normalised deletion score with grey patches; None where not measurable.
        blur: the same with blurred patches.
        tau_dropped_grey: between the scores with dropped and with grey patches, in [-1, 1].
        tau_dropped_blur: between dropped and blurred ones.
        tau_grey_blur: between grey and blurred ones.
    """

    images: int
    grey: float | None
    blur: float | None
    tau_dropped_grey: float | None
    tau_dropped_blur: float | None
    tau_grey_blur: float | None


class CoveredPatches:
    """Images some of whose patches are covered; called as `TokenSubsets`, where they are dropped.

    Args:
        model: any ViT.
        images: (B, C, H, W) normalised, on the model's device.
        cover: `grey`, which is 0 after normalisation, so the dataset's mean colour; or `blur`, the
            mean colours of the patches, interpolated between their centres.
    """

    def __init__(self, model: ViT, images: Images, cover: str) -> None:
        self.model, self.images = model, images
        self.grid = model.patch_embed.grid(images)
        self.count = self.grid[0] * self.grid[1]
        size = (images.shape[2], images.shape[3])
        means = F.adaptive_avg_pool2d(images, self.grid)
        blurred = F.interpolate(means, size, mode="bilinear", align_corners=False)
        self.covers = torch.zeros_like(images) if cover == "grey" else blurred

    def logits(
        self, patches: Int64[Tensor, "R n"], image: Int64[Tensor, " R"] | None = None
    ) -> Logits:
        """Return logits (R, K) of images whose other patches are covered.

        Args:
            patches: (R, n) numbers of the patches that stay.
            image: (R,) which image each row is of; default: one row for each image.
        """
        if image is None:
            image = torch.arange(len(patches))
        stays = torch.zeros(len(patches), self.count).scatter_(1, patches.cpu(), 1.0)
        cells = stays.view(-1, 1, *self.grid).to(self.images.device)
        pixels = F.interpolate(cells, self.images.shape[2:], mode="nearest") > 0  # R 1 H W
        image = image.to(self.images.device)
        logits: Logits = self.model(torch.where(pixels, self.images[image], self.covers[image]))
        return logits


def covered_references(
    model: ViT, images: Images, classes: Int64[Tensor, " B"], *, seed: int = 0
) -> dict[str, ReferenceAreas]:
    """Measure random orders and occlusion by grey and by blurred patches, for several methods.

    Args:
        model: any ViT with a head.
        images: (B, C, H, W) normalised; the first `COVERED_IMAGES` are measured.
        classes: the class of each, (B,).
        seed: of the random orders.
    """
    found = {}
    with eval_mode(model), torch.inference_mode():
        for cover in COVERS:
            parts = []
            for part in torch.arange(len(images))[:COVERED_IMAGES].split(BATCH):
                covered = CoveredPatches(model, images[part], cover)
                probability = ClassProbability(covered, classes[part])
                parts.append(reference_areas(probability, image_keys(images[part]), seed=seed))
            found[cover] = join_references(parts)
    return found


def other_removals(
    model: ViT,
    images: Images,
    grids: Float[Tensor, "B gh gw"],
    classes: Int64[Tensor, " B"],
    dropped: Sequence[TruthScore],
    *,
    seed: int = 0,
    references: Mapping[str, ReferenceAreas] | None = None,
) -> OtherRemovals:
    """Score deletion by grey and by blurred patches, and compare it with dropped ones.

    Each score is normalised as that of dropped patches is: 0 is the mean of 20 random orders, 1 the
    order of occlusion by patches covered in the same way.

    Args:
        model: any ViT with a head.
        images: (B, C, H, W) normalised; the first `COVERED_IMAGES` are measured.
        grids: their maps, larger = more important.
        classes: the class of each map, (B,).
        dropped: the scores with dropped patches, of each image.
        seed: of the random orders.
        references: as `covered_references` measures them; default: measured here.
    """
    references = references or covered_references(model, images, classes, seed=seed)
    count = min(len(images), COVERED_IMAGES)
    scores: dict[str, Sequence[float | None]] = {
        "dropped": [score.deletion for score in dropped[:count]]
    }
    with eval_mode(model), torch.inference_mode():
        for cover in COVERS:
            areas = []
            for part in torch.arange(count).split(BATCH):
                covered = CoveredPatches(model, images[part], cover)
                orders = map_orders(grids[part], image_keys(images[part]), seed)
                probability = ClassProbability(covered, classes[part])
                areas.append(insertion_areas(probability, orders.flip(1).unsqueeze(1))[:, 0])
            found = references[cover].normalise(np.concatenate(areas), deletion=True)
            scores[cover] = [None if np.isnan(score) else float(score) for score in found]
    return OtherRemovals(
        count,
        median_or_none(scores["grey"]),
        median_or_none(scores["blur"]),
        kendall_tau(scores["dropped"], scores["grey"]),
        kendall_tau(scores["dropped"], scores["blur"]),
        kendall_tau(scores["grey"], scores["blur"]),
    )
