"""The truth score of one heat map: deletion, insertion, magnitude, and whether chance does as well.

The cheap part of the truth of a map, as it needs the image alone.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass

import numpy as np
import torch
from jaxtyping import Float, Int64
from torch import Tensor

from vitkit.errors import ShapeError
from vitkit.explaining.token_subset import TokenSubsets
from vitkit.explaining.truth.class_probability import ROWS, ClassProbability
from vitkit.explaining.truth.deletion import (
    ReferenceAreas,
    deletion_and_insertion,
    image_keys,
    join_references,
    map_orders,
    reference_areas,
)
from vitkit.explaining.truth.magnitude import saco
from vitkit.explaining.truth.maps import BATCH, require_head
from vitkit.explaining.truth.statistics import chance_p
from vitkit.explaining.truth.verdict import Verdict, verdict_of_map
from vitkit.models.layers import eval_mode
from vitkit.models.vit import ViT
from vitkit.shapes import Images

CHEAP = 1e11
"""Multiplications of a score that is measured without being asked for: about a second on a CPU."""

SCORE_TERMS = (
    (
        "deletion",
        "Patches are dropped in the order of the map. 1: the probability of the class falls as "
        "fast as in the order of occlusion, which drops each patch alone to rank them. 0: as in a "
        "random order. Not measurable: the order of occlusion hardly beats random ones.",
    ),
    ("insertion", "The same while patches are added, the most important first."),
    (
        "p",
        "The share of 21 orders, 20 random ones and the map's, in which deletion and insertion "
        "together do at least as well. Better than chance: p is below 0.05. No better than "
        "chance: it is 0.05 or more. Too few patches to tell: few patches have few orders, so that "
        "random ones are often as good as the best one, and p says nothing.",
    ),
    (
        "SaCo",
        "Whether patches with more importance have more effect: from -1, never, to 1, always.",
    ),
)
"""The words of the truth score and their meanings."""


@dataclass(frozen=True)
class TruthScore:
    """The score of the map of one image: how well it names the patches that the model uses.

    Attributes:
        deletion: 1 if dropping patches in the map's order lowers the probability as much as in the
            order of token occlusion, 0 if only as much as in a random order; below 0 if less. None
            where it is not measurable, as even occlusion does not beat random orders clearly.
        insertion: the same while patches are added.
        p: the share of orders, 20 random ones and the map's, whose difference of insertion and
            deletion is at least the map's; 1/21 at least.
        saco: magnitude honesty in [-1, 1] (arXiv 2404.01415); None for a constant map.
        deletion_area: mean probability while patches are dropped, in [0, 1].
        insertion_area: mean probability while patches are added, in [0, 1].
        random_area: the mean of both over random orders.
        verdict: `better than chance` if p is below 0.05, else `no better than chance`, or `too few
            patches to tell` where the best order would not differ from random ones either.
    """

    deletion: float | None
    insertion: float | None
    p: float
    saco: float | None
    deletion_area: float
    insertion_area: float
    random_area: float
    verdict: Verdict

    @property
    def better_than_chance(self) -> bool:
        """True if p is below 0.05."""
        return self.verdict == "better than chance"

    @property
    def line(self) -> str:
        """One line: `deletion 0.71, insertion 0.64 (better than chance, p = 0.048), SaCo 0.42`."""
        return score_line(self.deletion, self.insertion, self.verdict, self.p, self.saco)

    def as_json(self) -> dict[str, float | str | None]:
        """Return the attributes as plain values; None where not measurable."""
        return asdict(self)


def score_line(
    deletion: float | None,
    insertion: float | None,
    verdict: Verdict,
    p: float,
    magnitude: float | None,
) -> str:
    """Return the scores as one line.

    >>> score_line(0.714, 0.64, "better than chance", 1 / 21, 0.42)
    'deletion 0.71, insertion 0.64 (better than chance, p = 0.048), SaCo 0.42'
    >>> score_line(None, 0.04, "no better than chance", 0.381, None)
    'deletion not measurable, insertion 0.04 (no better than chance, p = 0.38), SaCo not measurable'
    """
    return (
        f"deletion {_shown(deletion)}, insertion {_shown(insertion)} ({verdict}, p = {p:.2g}), "
        f"SaCo {_shown(magnitude)}"
    )


def _shown(value: float | None) -> str:
    return "not measurable" if value is None else f"{value:.2f}"


def is_cheap(model: ViT, images: Images) -> bool:
    """Return whether the score of one image takes few multiplications, by a rough count.

    Each parameter of a block is used once for each token: in about 100 passes with half of the
    patches on average each, and in one pass for each patch.

    Args:
        model: the model.
        images: (B, C, H, W), for the number of patches.
    """
    height, width = model.patch_embed.grid(images)
    tokens = height * width
    parameters = sum(parameter.numel() for parameter in model.blocks.parameters())
    return parameters * tokens * (100 + tokens) < CHEAP


def references(
    model: ViT, images: Images, classes: Int64[Tensor, " B"], *, seed: int = 0, rows: int = ROWS
) -> ReferenceAreas:
    """Measure random orders and token occlusion once, for the maps of several methods.

    Arguments as for `truth_score`.
    """
    require_head(model)
    parts = []
    with eval_mode(model), torch.inference_mode():
        for part in torch.arange(len(images)).split(BATCH):
            probability = ClassProbability(TokenSubsets(model, images[part]), classes[part], rows)
            parts.append(reference_areas(probability, image_keys(images[part]), seed=seed))
    return join_references(parts)


def truth_score(
    model: ViT,
    images: Images,
    grids: Float[Tensor, "B gh gw"],
    classes: Int64[Tensor, " B"],
    *,
    seed: int = 0,
    rows: int = ROWS,
    reference: ReferenceAreas | None = None,
) -> list[TruthScore]:
    """Score the maps of a batch of images; an image's score depends on no other image.

    It costs about as much as 100 forward passes an image and one for each patch; with a
    `reference`, as much as 20.

    Args:
        model: in any mode; it runs in eval mode and without gradients, and keeps its mode.
        images: (B, C, H, W) normalised, on the model's device.
        grids: a value for each patch, larger = more important.
        classes: the class that each map explains, (B,).
        seed: of the random orders.
        rows: forward passes at a time.
        reference: of the same images and classes, as `references` measures it; default: measured
            here.

    Raises:
        SettingError: a model without a head.
        ShapeError: maps that do not have the model's patches.
    """
    reference = reference or references(model, images, classes, seed=seed, rows=rows)
    deletion, insertion, magnitude = [], [], []
    with eval_mode(model), torch.inference_mode():
        for part in torch.arange(len(images)).split(BATCH):
            subsets = TokenSubsets(model, images[part])
            if grids.shape != (len(images), *subsets.grid):
                raise ShapeError(
                    f"maps have the shape {tuple(grids.shape)}; expected "
                    f"{(len(images), *subsets.grid)}, a value for each patch of each image"
                )
            orders = map_orders(grids[part], image_keys(images[part]), seed)
            probability = ClassProbability(subsets, classes[part], rows)
            areas = deletion_and_insertion(probability, orders)
            deletion.append(areas[0])
            insertion.append(areas[1])
            magnitude.append(saco(probability, grids[part], orders))
    return _scores(
        np.concatenate(deletion),
        np.concatenate(insertion),
        np.concatenate(magnitude),
        reference,
        grids[0].numel(),
    )


def _scores(
    deletion: Float[np.ndarray, " B"],
    insertion: Float[np.ndarray, " B"],
    magnitude: Float[np.ndarray, " B"],
    reference: ReferenceAreas,
    patches: int,
) -> list[TruthScore]:
    deletion_scores = reference.normalise(deletion, deletion=True)
    insertion_scores = reference.normalise(insertion, deletion=False)
    # each order beside its reverse, whose insertion area is its deletion area
    swapped = reference.random.reshape(len(deletion), -1, 2)[..., ::-1].reshape(len(deletion), -1)
    scores = []
    for row in range(len(deletion)):
        gain = float(insertion[row] - deletion[row])
        random = reference.random[row] - swapped[row]
        scores.append(
            TruthScore(
                _or_none(deletion_scores[row]),
                _or_none(insertion_scores[row]),
                chance_p(gain, random),
                _or_none(magnitude[row]),
                float(deletion[row]),
                float(insertion[row]),
                float(reference.random[row].mean()),
                verdict_of_map(gain, random, patches),
            )
        )
    return scores


def _or_none(value: float) -> float | None:
    return None if np.isnan(value) else float(value)
