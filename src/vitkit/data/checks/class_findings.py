"""Findings about classes: empty and rare ones, doubtful names, proportions that differ."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import numpy as np
from jaxtyping import Float64

from vitkit.data.checks.finding import Finding, ScannedImages, new_finding
from vitkit.data.datasets.class_names import doubtful_names, notes_on_classes
from vitkit.data.datasets.split import Split
from vitkit.messages import quote_list

RARE = 0.1
"""A class is rare below this part of the median class."""
SHIFT = 0.2
"""Part of a split that would need another class to have the proportions of train."""
SHIFTS_SHOWN = 3
DEVIATIONS = 5
"""Standard deviations above its mean from which a chi-squared is beyond chance."""


def missing_classes(classes: Sequence[str], images: ScannedImages) -> Iterator[Finding]:
    """Find classes without an image, and in train those with few."""
    labels = images.labels()
    labels_of_train = labels[images.split == 0]
    for number, split in enumerate(images.names):
        sizes = np.bincount(labels[images.split == number], minlength=len(classes))
        counts = dict(zip(classes, sizes.tolist(), strict=True))
        if number == 0:
            kind = "empty class"
            expected = list(classes)
        else:  # a class that train lacks is reported once, for train
            kind = "missing class"
            expected = [classes[label] for label in np.unique(labels_of_train)]
        empty = [counts[name] for name in expected].count(0)
        for message in notes_on_classes(split, expected, counts):
            yield new_finding(kind, message, (), empty, split)
        if number == 0:
            yield from _small_classes(split, counts)


def _small_classes(split: str, counts: Mapping[str, int]) -> Iterator[Finding]:
    filled = [count for count in counts.values() if count > 0]
    median = float(np.median(filled)) if filled else 0.0
    single: list[str] = []
    rare: list[str] = []
    for name, count in counts.items():
        if count == 1:
            single.append(name)
        elif 1 < count < RARE * median:
            rare.append(name)
    if single:
        message = f"{split} has only one image of {_of_classes(single)}"
        yield new_finding("single image", message, (), len(single), split)
    if rare:
        message = (
            f"{split} has few images of {_of_classes(rare)}; the other classes have {median:,.0f}"
        )
        yield new_finding("rare class", message, (), len(rare), split)


def doubtful_classes(classes: Sequence[str]) -> Iterator[Finding]:
    """Find class names that are probably one class, or no class."""
    for message in doubtful_names(classes):
        yield new_finding("class names", message, (), 1)


def class_shifts(classes: Sequence[str], splits: Mapping[str, Split]) -> Iterator[Finding]:
    """Find splits whose class proportions differ significantly from the first split's."""
    counts_by_split = {}
    for name, split in splits.items():
        counts_by_split[name] = np.bincount(split.labels, minlength=len(classes)).astype(float)
    (first, first_counts), *others = counts_by_split.items()
    for name, counts in others:
        here = counts / counts.sum()
        there = first_counts / first_counts.sum()
        # Every image that moves from one class to another counts twice: hence the half.
        moved = float(np.abs(here - there).sum()) / 2
        if moved >= SHIFT and _is_beyond_chance(counts, first_counts):
            most = np.argsort(-np.abs(here - there), kind="stable")[:SHIFTS_SHOWN]
            shown = ", ".join(f"{classes[c]!r} {here[c]:.0%} ({there[c]:.0%})" for c in most)
            message = f"the classes of {name} have other proportions than in {first}: {shown}"
            yield new_finding("class shift", message, (), round(moved * counts.sum()), name)


def _is_beyond_chance(one: Float64[np.ndarray, " K"], other: Float64[np.ndarray, " K"]) -> bool:
    """Return True if two class counts differ significantly (chi-squared test).

    Pearson's chi-squared is then more than five standard deviations above its mean.
    """
    total = one + other
    present = total > 0
    # A table of two rows and K columns has K - 1 degrees of freedom, its mean; the variance is
    # twice as much.
    chi_squared = 0.0
    for counts in (one, other):
        expected = counts.sum() * total[present] / total.sum()
        chi_squared += float(((counts[present] - expected) ** 2 / expected).sum())
    freedom = int(present.sum()) - 1
    return chi_squared > freedom + DEVIATIONS * (2 * freedom) ** 0.5


def _of_classes(names: Sequence[str]) -> str:
    return f"{'class' if len(names) == 1 else 'classes'} {quote_list(names)}"
