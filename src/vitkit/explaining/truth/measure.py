"""Measurement of the truth of a method over many images: all parts of the score."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, Literal, TypeAlias

from jaxtyping import Int64
from torch import Tensor

from vitkit.explaining.method import Method
from vitkit.explaining.truth.class_matters import MOSAICS, class_matters
from vitkit.explaining.truth.deletion import ReferenceAreas
from vitkit.explaining.truth.maps import MapMaker, check_numbers, predict_logits
from vitkit.explaining.truth.model_fit import model_fit
from vitkit.explaining.truth.other_removals import other_removals
from vitkit.explaining.truth.report import TruthReport
from vitkit.explaining.truth.score import truth_score
from vitkit.explaining.truth.stability import stability
from vitkit.explaining.truth.statistics import paired_permutation
from vitkit.explaining.truth.weights_matter import weights_matter
from vitkit.models.vit import ViT
from vitkit.shapes import Images
from vitkit.spec import Preprocess

Part: TypeAlias = Literal["weights", "class", "stability", "fit", "removal"]
PARTS: tuple[Part, ...] = ("weights", "class", "stability", "fit", "removal")
"""The parts that need more than a map and its image."""


def measure_truth(
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
    covered: Mapping[str, ReferenceAreas] | None = None,
) -> TruthReport:
    """Measure how far the maps of a method may be trusted.

    Args:
        method: one of `METHODS`.
        model: in any mode; it keeps its mode and its weights.
        images: (B, C, H, W) normalised, on the model's device, such as of a validation split.
        classes: explained in each image (B,); default the predicted ones.
        labels: the right classes (B,); default the predicted ones, for mosaics and the fit.
        options: of the method, such as `layer`.
        preprocess: of the images, for JPEG; without it that part is left out.
        parts: the expensive parts that are measured; default all.
        mosaics: the number of mosaics, 1 or more.
        seed: of everything that is random, 0 or more; the same seed gives the same numbers.
        reference: of the same images and classes, as `references` measures it.
        covered: the same with grey and blurred patches, as `covered_references` measures it.

    Raises:
        SettingError: a model without a head, no images, a class that it does not have, another
            number of classes or labels than images, a method without such maps, or unknown options.
        CheckpointError: logits that are not finite.
    """
    maps = MapMaker(method, dict(options or {}))
    predicted = predict_logits(model, images).argmax(dim=1)
    check_numbers({"classes": classes, "labels": labels}, model, len(images))
    explained = predicted if classes is None else classes.cpu()
    grids = maps(model, images, explained)
    scores = truth_score(model, images, grids, explained, seed=seed, reference=reference)
    measured: dict[str, Any] = {}
    if "weights" in parts:
        measured["weights_matter"] = weights_matter(maps, model, images, explained, seed=seed)
    if "class" in parts:
        # in a mosaic of images that the model mistakes, no map could be right
        known = predicted == (predicted if labels is None else labels.cpu())
        shown = images[known], predicted[known]
        measured["class_matters"] = class_matters(maps, model, *shown, count=mosaics, seed=seed)
    if "stability" in parts:
        measured["stability"] = stability(maps, model, images, explained, preprocess)
    if "fit" in parts:
        measured["model_fit"] = model_fit(model, images, labels, seed=seed)
    if "removal" in parts:
        by_image = images, grids, explained, scores
        measured["other_removals"] = other_removals(model, *by_image, seed=seed, references=covered)
    p = paired_permutation([s.insertion_area - s.deletion_area for s in scores], seed=seed)
    return TruthReport(method.name, maps.options, tuple(scores), p, **measured)
