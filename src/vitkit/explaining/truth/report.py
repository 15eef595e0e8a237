"""The truth of a method over many images: all parts of the score."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal, TypeAlias

import torch
from jaxtyping import Int64
from torch import Tensor

from vitkit.explaining.method import Method
from vitkit.explaining.truth.class_matters import MOSAICS, ClassMatters, class_matters
from vitkit.explaining.truth.deletion import ReferenceAreas
from vitkit.explaining.truth.maps import MapMaker, predict_logits
from vitkit.explaining.truth.model_fit import ModelFit, model_fit
from vitkit.explaining.truth.score import TruthScore, score_line, truth_score
from vitkit.explaining.truth.stability import Stability, stability
from vitkit.explaining.truth.statistics import median_or_none, paired_permutation
from vitkit.explaining.truth.weights_matter import STRONGEST, weights_matter
from vitkit.models.vit import ViT
from vitkit.shapes import Images
from vitkit.spec import Preprocess

Part: TypeAlias = Literal["weights", "class", "stability", "fit"]
PARTS: tuple[Part, ...] = ("weights", "class", "stability", "fit")
"""The parts that need more than a map and its image."""


@dataclass(frozen=True)
class TruthReport:
    """How far the maps of a method may be trusted, on one model; None where not measured.

    Attributes:
        method: its name.
        options: its options, as measured.
        scores: of each image.
        p: of a paired permutation test over the images that insertion is not above deletion.
        weights_matter: mean Spearman correlation with maps of the model with a random top; above
            0.5 the method hardly looks at the model.
        class_matters: pointing in mosaics of 2 x 2 images; chance is 25 %.
        stability: Spearman correlations after a shift of one pixel and JPEG 90.
        model_fit: accuracy with 25 and 50 % of the patches dropped.
    """

    method: str
    options: Mapping[str, Any]
    scores: tuple[TruthScore, ...]
    p: float
    weights_matter: float | None = None
    class_matters: ClassMatters | None = None
    stability: Stability | None = None
    model_fit: ModelFit | None = None

    @property
    def deletion(self) -> float | None:
        """The median over the images where it is measurable."""
        return median_or_none([score.deletion for score in self.scores])

    @property
    def insertion(self) -> float | None:
        """The median over the images where it is measurable."""
        return median_or_none([score.insertion for score in self.scores])

    @property
    def saco(self) -> float | None:
        """The median over the images where it is measurable."""
        return median_or_none([score.saco for score in self.scores])

    @property
    def measurable(self) -> int:
        """The number of images whose deletion score is measurable."""
        return sum(score.deletion is not None for score in self.scores)

    @property
    def line(self) -> str:
        """The medians as one line, such as `deletion 0.71, insertion 0.64 (p = 0.0001), ...`."""
        return score_line(self.deletion, self.insertion, self.p, self.saco)

    @property
    def lines(self) -> tuple[str, ...]:
        """One line for each part that was measured, each a sentence with its yardstick."""
        measured = f"measurable on {self.measurable} of {len(self.scores)}"
        found = [self.line, f"images: these are medians; deletion is {measured}"]
        if self.weights_matter is not None:
            verdict = "good: below 0.5"
            if self.weights_matter > STRONGEST:
                verdict = "above 0.5: the method hardly looks at the model"
            found.append(
                f"weights: correlation {self.weights_matter:.2f} with maps of a model whose upper "
                f"half is random ({verdict})"
            )
        if self.class_matters is not None:
            found.append(_class_line(self.class_matters))
        if self.stability is not None:
            found.append(_stability_line(self.stability))
        if self.model_fit is not None:
            found.append(_fit_line(self.model_fit))
        return tuple(found)

    def as_json(self) -> dict[str, Any]:
        """Return everything as plain values for JSON; None where not measured."""
        plain = asdict(self)
        plain |= {"deletion": self.deletion, "insertion": self.insertion, "saco": self.saco}
        return plain | {"images": len(self.scores), "measurable": self.measurable}


def _class_line(found: ClassMatters) -> str:
    return (
        f"class: {found.pointing:.1%} of {found.mosaics} mosaics point at the right image "
        f"({found.low:.1%} to {found.high:.1%}; chance 25.0%, the model itself "
        f"{found.model_pointing:.1%})"
    )


def _stability_line(found: Stability) -> str:
    parts = []
    for value, change in ((found.shift, "a shift of one pixel"), (found.jpeg, "JPEG 90")):
        if value is not None:
            parts.append(f"{value:.2f} after {change}")
    return "stability: correlation " + (", ".join(parts) or "not measurable, the maps are constant")


def _fit_line(found: ModelFit) -> str:
    noun = "accuracy" if found.labelled else "same prediction"
    verdict = "" if found.fits else " (a weak test: train with --spec.patch-dropout 0.25)"
    return (
        f"model: {noun} {found.full:.3f}, {found.quarter_dropped:.3f} and {found.half_dropped:.3f} "
        f"with 0, 25 and 50 % of the patches dropped{verdict}"
    )


def truth_report(
    method: Method,
    model: ViT,
    images: Images,
    *,
    classes: Int64[Tensor, " B"] | None = None,
    labels: Int64[Tensor, " B"] | None = None,
    options: Mapping[str, Any] | None = None,
    preprocess: Preprocess | None = None,
    parts: Collection[Part] = PARTS,
    mosaics: int = MOSAICS,
    seed: int = 0,
    reference: ReferenceAreas | None = None,
) -> TruthReport:
    """Measure how far the maps of a method may be trusted.

    Args:
        method: one of `METHODS`.
        model: in any mode; it runs in eval mode and keeps its mode and its weights.
        images: (B, C, H, W) normalised, on the model's device, such as of a validation split.
        classes: explained in each image (B,); default the predicted ones.
        labels: the right classes (B,); without them, mosaics are of predicted classes, and the
            fit is agreement with the full prediction.
        options: of the method, such as `layer`.
        preprocess: of the images, for JPEG; without it that part is left out.
        parts: the expensive parts that are measured; default all.
        mosaics: the number of mosaics.
        seed: of everything that is random; the same seed gives the same numbers.
        reference: of the same images and classes, as `references` measures it.

    Raises:
        SettingError: a model without a head, a method without such maps, or unknown options.
    """
    maps = MapMaker(method, dict(options or {}))
    predicted = predict_logits(model, images).argmax(dim=1)
    explained = predicted if classes is None else classes.cpu()
    grids = maps(model, images, explained)
    scores = truth_score(model, images, grids, explained, seed=seed, reference=reference)
    gains = [score.insertion_area - score.deletion_area for score in scores]
    weights = pointing = stable = fit = None
    if "weights" in parts:
        weights = weights_matter(maps, model, images, explained, seed=seed)
    if "class" in parts:
        # in a mosaic of images that the model mistakes, no map could be right
        known = torch.arange(len(images)) if labels is None else (predicted == labels.cpu())
        pointing = class_matters(
            maps, model, images[known], predicted[known], count=mosaics, seed=seed
        )
    if "stability" in parts:
        stable = stability(maps, model, images, explained, preprocess)
    if "fit" in parts:
        fit = model_fit(model, images, labels, seed=seed)
    p = paired_permutation(gains, seed=seed)
    return TruthReport(method.name, maps.options, tuple(scores), p, weights, pointing, stable, fit)
