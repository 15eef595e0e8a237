"""The truth of a method over many images, as measured: in one line, in words and as JSON."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from vitkit.explaining.truth.class_matters import CHANCE, ClassMatters
from vitkit.explaining.truth.model_fit import ModelFit
from vitkit.explaining.truth.other_removals import OtherRemovals
from vitkit.explaining.truth.score import TruthScore, score_line
from vitkit.explaining.truth.stability import Stability
from vitkit.explaining.truth.statistics import kendall_tau, median_or_none
from vitkit.explaining.truth.verdict import Verdict, verdict_of_method
from vitkit.explaining.truth.weights_matter import STRONGEST
from vitkit.messages import percent, plural


@dataclass(frozen=True)
class TruthReport:
    """How far the maps of a method may be trusted, on one model; None where not measured.

    Attributes:
        method: its name.
        options: its options, as measured.
        scores: of each image.
        p: of a paired permutation test over the images that insertion is not above deletion, in
            (0, 1].
        weights_matter: mean Spearman correlation, in [-1, 1], with maps of the model with a random
            top (arXiv 1810.03292); above 0.5 the method hardly looks at the model.
        class_matters: pointing in mosaics of 2 x 2 images; chance is 25 %. None, too, where fewer
            than four classes are predicted right.
        stability: Spearman correlations after a shift of one pixel and JPEG 90.
        model_fit: accuracy with 25 and 50 % of the patches dropped.
        other_removals: deletion by grey and by blurred patches.
    """

    method: str
    options: Mapping[str, Any]
    scores: tuple[TruthScore, ...]
    p: float
    weights_matter: float | None = None
    class_matters: ClassMatters | None = None
    stability: Stability | None = None
    model_fit: ModelFit | None = None
    other_removals: OtherRemovals | None = None

    @property
    def deletion(self) -> float | None:
        """The median over the images where it is measurable, 1 at best; see `TruthScore`."""
        return median_or_none([score.deletion for score in self.scores])

    @property
    def insertion(self) -> float | None:
        """The median over the images where it is measurable, 1 at best; see `TruthScore`."""
        return median_or_none([score.insertion for score in self.scores])

    @property
    def saco(self) -> float | None:
        """The median over the images where it is measurable, in [-1, 1]."""
        return median_or_none([score.saco for score in self.scores])

    @property
    def measurable(self) -> int:
        """The number of images whose deletion score is measurable."""
        return sum(score.deletion is not None for score in self.scores)

    @property
    def verdict(self) -> Verdict:
        """`better than chance`, `no better than chance` or `too few images to tell`, by `p`."""
        gains = [score.insertion_area - score.deletion_area for score in self.scores]
        return verdict_of_method(self.p, np.array(gains))

    @property
    def line(self) -> str:
        """The medians in one line, as `TruthScore.line`."""
        return score_line(self.deletion, self.insertion, self.verdict, self.p, self.saco)

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
        if self.other_removals is not None:
            found.append(_removal_line(self.other_removals))
        return tuple(found)

    def as_json(self) -> dict[str, Any]:
        """Return everything as plain values for JSON; None where not measured."""
        plain = asdict(self)
        plain |= {"deletion": self.deletion, "insertion": self.insertion, "saco": self.saco}
        plain["verdict"] = self.verdict
        return plain | {"images": len(self.scores), "measurable": self.measurable}


def _class_line(found: ClassMatters) -> str:
    return (
        f"class: {percent(found.pointing)} of {found.mosaics} mosaics point at the right image "
        f"({percent(found.low)} to {percent(found.high)}; chance {percent(CHANCE)}, by positive "
        f"values alone {percent(found.positive_pointing)}, the model itself "
        f"{percent(found.model_pointing)})"
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


def _removal_line(found: OtherRemovals) -> str:
    words = []
    grey = ("grey", found.grey, found.tau_dropped_grey)
    blurred = ("blurred", found.blur, found.tau_dropped_blur)
    for name, score, tau in (grey, blurred):
        agreement = "not measurable" if tau is None else f"{tau:.2f}"
        shown = "not measurable" if score is None else f"{score:.2f}"
        words.append(f"{shown} with {name} patches (tau {agreement})")
    return (
        f"removal: deletion {', '.join(words)} instead of dropped ones; tau is Kendall's, between "
        f"the scores of {plural(found.images, 'image')}"
    )


def agreement_of_methods(reports: Collection[TruthReport]) -> dict[str, float | None]:
    """Return Kendall's tau-b between methods ranked by two ways of removing patches.

    Args:
        reports: of several methods on the same images; those without other removals are left out.

    Returns:
        `dropped_grey`, `dropped_blur` and `grey_blur`: tau over the methods, between their median
        normalised deletion scores by the two ways; None for fewer than two methods.
    """
    rows = [
        (median_or_none([score.deletion for score in report.scores[: other.images]]), other)
        for report in reports
        if (other := report.other_removals) is not None
    ]
    dropped = [median for median, _ in rows]
    grey, blur = [other.grey for _, other in rows], [other.blur for _, other in rows]
    pairs = {"dropped_grey": (dropped, grey), "dropped_blur": (dropped, blur)}
    pairs["grey_blur"] = (grey, blur)
    return {name: kendall_tau(*pair) for name, pair in pairs.items()}
