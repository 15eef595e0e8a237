"""Results of the candidates of `--auto`, and whether one is significantly better than another."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from jaxtyping import Bool

from vitkit.evaluation.intervals import wilson_interval
from vitkit.evaluation.mcnemar import SIGNIFICANCE_LEVEL, mcnemar
from vitkit.evaluation.metrics import Metrics

Clock = Callable[[], float]
"""A function that returns seconds, which never decrease."""


@dataclass(frozen=True)
class CandidateResult:
    """The result of one candidate on the validation images.

    Attributes:
        name: name of the candidate and of its folder.
        description: the candidate in a few words.
        trained: number of trained parameters.
        correct: True for each validation image whose class was predicted correctly (N,).
        weights: file of its weights; `None` if it leaves none.
        seconds: duration of its run.
    """

    name: str
    description: str
    trained: int
    correct: Bool[np.ndarray, " N"]
    weights: Path | None
    seconds: float

    @property
    def errors(self) -> int:
        """The number of misclassified validation images."""
        return int((~self.correct).sum())

    def scores(self) -> Metrics:
        """Return `top1`, its 95 % interval (Wilson), and the number of images, of validation."""
        # Unlike the normal approximation, it is valid near 0 and 1.
        low, high = wilson_interval(int(self.correct.sum()), len(self.correct))
        return {
            "top1": float(self.correct.mean()),
            "top1_low": low,
            "top1_high": high,
            "images": len(self.correct),
        }


def p_value(first: CandidateResult, second: CandidateResult) -> float:
    """Return the p-value of McNemar's exact test between two results."""
    # Only images on which the two disagree tell anything about the difference.
    only_first = int((first.correct & ~second.correct).sum())
    only_second = int((second.correct & ~first.correct).sum())
    return mcnemar(only_first, only_second)


def is_better(best: CandidateResult, candidate: CandidateResult) -> bool:
    """Return whether a candidate is significantly better than the best one before it."""
    if candidate.errors >= best.errors:
        return False
    return _is_significant(best, best.errors - candidate.errors, p_value(best, candidate))


def can_be_better(best: CandidateResult) -> bool:
    """Return whether a candidate without any error would be significantly better."""
    return _is_significant(best, best.errors, mcnemar(0, best.errors))


def _is_significant(best: CandidateResult, gained: int, p: float) -> bool:
    """Decide by McNemar's test, or by a gain of more than half the width of the best's interval.

    McNemar's test needs at least six discordant images, so for small validation sets the half-width
    rule is more lenient; for large sets it is stricter.

    Args:
        best: the result to be surpassed.
        gained: images by which the other result is better.
        p: the p-value of their comparison.
    """
    scores = best.scores()
    half_width = (scores["top1_high"] - scores["top1_low"]) / 2
    # either suffices: the test is too strict for few images
    return p < SIGNIFICANCE_LEVEL or gained / len(best.correct) > half_width


def best_result(results: Sequence[CandidateResult]) -> CandidateResult | None:
    """Return the last result with weights that was significantly better than those before it.

    The first result with weights counts as better.
    """
    best = None
    for result in results:
        if result.weights is not None and (best is None or is_better(best, result)):
            best = result
    return best
