"""Whether one model is better than another on the same images, or only luckier."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from vitkit.errors import DataError, plural
from vitkit.evaluation.evaluate import Evaluation

LEVEL = 0.05
"""A p-value below this is taken for a difference."""
TRIED = frozenset({"amp", "attention_kernel", "compile"})
"""Settings that a trial may decide, and with the next seed otherwise: times are noisy."""


@dataclass(frozen=True)
class Pair:
    """Two models on the same images.

    Attributes:
        first: name of the one.
        second: name of the other.
        both: images that both are right about.
        only_first: that the first alone is right about.
        only_second: that the second alone is right about.
        neither: that neither is right about.
        p: of McNemar's exact test: how likely the two numbers between are to differ by so much, or
            more, if both models are equally good.
    """

    first: str
    second: str
    both: int
    only_first: int
    only_second: int
    neither: int
    p: float

    @property
    def verdict(self) -> str:
        """One line that says which is better, or that it cannot be told."""
        counts = (
            f"{plural(self.only_second, 'image')} only it has right, {self.only_first} only the "
            f"other"
        )
        if self.p >= LEVEL:
            said = f"no difference to be told between {self.second} and {self.first}"
            counts = f"{plural(self.only_second, 'image')} against {self.only_first}"
        else:
            better = "better" if self.only_second > self.only_first else "worse"
            said = f"{self.second} is {better} than {self.first}"
        return f"{said}: {counts}, McNemar's exact p = {self.p:.2g}"


@dataclass(frozen=True)
class Repeats:
    """Runs of the same settings that differ in their seeds.

    Attributes:
        names: of the runs.
        mean: of their top-1.
        spread: the sample standard deviation of their top-1.
        low: the lowest.
        high: the highest.
    """

    names: tuple[str, ...]
    mean: float
    spread: float
    low: float
    high: float


@dataclass(frozen=True)
class Comparison:
    """Several models on the same images.

    Attributes:
        scores: name -> evaluation, in the order given.
        pairs: each of the others against the first.
        repeats: groups of runs that differ in their seeds alone.
    """

    scores: dict[str, Evaluation]
    pairs: tuple[Pair, ...]
    repeats: tuple[Repeats, ...] = ()


def mcnemar(only_first: int, only_second: int) -> float:
    """The two-sided p-value of McNemar's test in its exact form.

    Of n images that one model alone is right about, Binomial(n, 1/2) fall to either if both are
    equally good (McNemar 1947; for classifiers: Dietterich 1998): p = min(1, 2 P(X <= the smaller
    number)).
    """
    n, fewer = only_first + only_second, min(only_first, only_second)
    logarithms = (
        math.lgamma(n + 1) - math.lgamma(i + 1) - math.lgamma(n - i + 1) - n * math.log(2)
        for i in range(fewer + 1)
    )
    return min(1.0, 2 * math.fsum(map(math.exp, logarithms)))


def compare(
    scores: Mapping[str, Evaluation],
    settings: Sequence[Mapping[str, Any] | None] | None = None,
    seeds: Sequence[int | None] | None = None,
) -> Comparison:
    """Compare the first evaluation with each of the others.

    Args:
        scores: name -> evaluation, two or more.
        settings: of each, what it was trained with apart from the seed; those that are equal but
            for `TRIED` are repeats, and None is like no other.
        seeds: of each; of one seed there is one run, so of several the first is taken.

    Raises:
        DataError: they were not evaluated on the same images with the same classes.
    """
    (first, one), *others = scores.items()
    for name, other in others:
        _check_same(first, one, name, other)
    pairs = tuple(_pair(first, one, name, other) for name, other in others)
    unknown = [None] * len(scores)
    repeats = _repeats(scores, settings or unknown, seeds or unknown)
    return Comparison(dict(scores), pairs, repeats)


def _check_same(first: str, one: Evaluation, second: str, other: Evaluation) -> None:
    if odd := sorted(set(one.classes) ^ set(other.classes)):
        raise DataError(
            f"{first} and {second} know different classes: only one of them has "
            f"{', '.join(odd[:5])}; compare models of the same classes"
        )
    ours, theirs = ([row[:2] for row in each.rows()] for each in (one, other))
    if ours != theirs:
        raise DataError(
            f"{first} and {second} do not see the same images in this split: {len(ours):,} and "
            f"{len(theirs):,}, cut or cleaned as each was trained; choose another --split"
        )


def _pair(first: str, one: Evaluation, second: str, other: Evaluation) -> Pair:
    (neither, only_second), (only_first, both) = (
        [int((mine & its).sum()) for its in (~other.right, other.right)]
        for mine in (~one.right, one.right)
    )
    p = mcnemar(only_first, only_second)
    return Pair(first, second, both, only_first, only_second, neither, p)


def _repeats(
    scores: Mapping[str, Evaluation],
    settings: Sequence[Mapping[str, Any] | None],
    seeds: Sequence[int | None],
) -> tuple[Repeats, ...]:
    groups: dict[str, dict[int, str]] = {}
    for name, given, seed in zip(scores, settings, seeds, strict=True):
        if given is not None and seed is not None:
            key = {setting: value for setting, value in given.items() if setting not in TRIED}
            groups.setdefault(repr(key), {}).setdefault(seed, name)
    found = []
    for names in map(list, map(dict.values, groups.values())):
        top1 = np.array([scores[name]["top1"] for name in names])
        if len(names) > 1:
            spread = float(top1.std(ddof=1))
            low, high = float(top1.min()), float(top1.max())
            found.append(Repeats(tuple(names), float(top1.mean()), spread, low, high))
    return tuple(found)
