"""Findings about images that occur twice, or nearly: leaks, labels that differ, duplicates."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence

import numpy as np

from vitkit.data.checks.duplicates import LEAST_CORRELATION, NONE, nearest_copies
from vitkit.data.checks.finding import Finding, ScannedImages, new_finding
from vitkit.data.datasets.scan import ScanResult
from vitkit.data.datasets.split import Split
from vitkit.messages import plural, quote_list

LEAKS = {
    "leak": "of {split} also in {other}, pixel for pixel; what {split} measures is flattered",
    "near leak": "of {split} nearly the same as in {other}: saved again, scaled, mirrored or "
    f"slightly changed (grey thumbnails correlate by {LEAST_CORRELATION} or more)",
}


def leaks(images: ScannedImages) -> Iterator[Finding]:
    """Find images of a split that are also in an earlier one."""
    pairs: dict[tuple[int, int], list[tuple[str, ...]]] = {}
    for group in images.groups:
        first: dict[int, int] = {}
        for number in map(int, group):
            first.setdefault(int(images.split[number]), number)
        # Training is the first split: a copy in test is a leak from train, not the reverse.
        original = min(first)
        for number in map(int, group):
            split = int(images.split[number])
            if split != original:
                names = (images.name(number), images.name(first[original]))
                pairs.setdefault((split, original), []).append(names)
    for (split, original), named in sorted(pairs.items()):
        yield _leak("leak", images.names[split], images.names[original], named, len(named))


def near_leaks(splits: Mapping[str, Split], scans: Mapping[str, ScanResult]) -> Iterator[Finding]:
    """Find images of a split that are nearly the same as one of an earlier split."""
    for other, here in itertools.combinations(splits, 2):
        pairs = _near_copies(scans[here], scans[other], mirrored=True)
        if pairs:
            named = _name_pairs(pairs, splits[here], splits[other])
            yield _leak("near leak", here, other, named, len(pairs))


def two_labels(images: ScannedImages, classes: Sequence[str]) -> Iterator[Finding]:
    """Find copies under more than one class."""
    labels = images.labels()
    groups = []
    names_of_classes = set()
    for group in images.groups:
        of_group = np.unique(labels[group]).tolist()
        if len(of_group) > 1:
            groups.append(group)
            names_of_classes |= {classes[label] for label in of_group}
    if groups:
        message = (
            f"{plural(len(groups), 'image')} under more than one class, of "
            f"{quote_list(sorted(names_of_classes))}; one of the labels is wrong"
        )
        yield new_finding("two labels", message, map(images.names_of, groups), len(groups))


def near_two_labels(
    splits: Mapping[str, Split], scans: Mapping[str, ScanResult], classes: Sequence[str]
) -> Iterator[Finding]:
    """Find images that are nearly the same under two classes."""
    # Not mirrored: the mirror image of a left arrow is a right arrow.
    named: dict[frozenset[tuple[str, int]], tuple[str, ...]] = {}
    involved: set[int] = set()
    for other, here in itertools.combinations_with_replacement(splits, 2):
        labels = splits[here].labels
        other_labels = splits[other].labels
        for one, two in _near_copies(scans[here], scans[other], apart=(labels, other_labels)):
            names = tuple(sorted((splits[here].name(one), splits[other].name(two))))
            named[frozenset(((here, one), (other, two)))] = names
            involved |= {int(labels[one]), int(other_labels[two])}
    if named:
        names_of_classes = sorted(classes[label] for label in involved)
        message = (
            f"{plural(len(named), 'pair')} of nearly the same images under two classes, of "
            f"{quote_list(names_of_classes)}; check both labels"
        )
        yield new_finding("near two labels", message, named.values(), len(named))


def duplicates(images: ScannedImages) -> Iterator[Finding]:
    """Find copies inside of a split."""
    for number, split in enumerate(images.names):
        groups = []
        extra = 0
        for group in images.groups:
            of_split = group[images.split[group] == number]
            if len(of_split) > 1:
                groups.append(of_split)
                extra += len(of_split) - 1  # all but one could go
        if groups:
            message = f"{plural(extra, 'image')} of {split} repeating others"
            yield new_finding("duplicate", message, map(images.names_of, groups), extra, split)


def near_duplicates(
    splits: Mapping[str, Split], scans: Mapping[str, ScanResult]
) -> Iterator[Finding]:
    """Find images that are nearly the same inside of a split."""
    for name, split in splits.items():
        own = np.arange(len(split))  # an image is no copy of itself
        copies = _near_copies(scans[name], scans[name], (own, own))
        # Each of a pair may be the nearest copy of the other: the pair counts once.
        pairs = {(min(pair), max(pair)) for pair in copies}
        if pairs:
            involved = np.unique([*pairs])
            message = f"{plural(len(involved), 'image')} of {name} nearly the same as another"
            named = _name_pairs(sorted(pairs), split, split)
            yield new_finding("near duplicate", message, named, len(involved), name)


def _name_pairs(
    pairs: Iterable[tuple[int, int]], here: Split, other: Split
) -> Iterator[tuple[str, ...]]:
    """Generate the names of pairs of images; a note takes only the first of them."""
    for one, two in pairs:
        yield here.name(one), other.name(two)


def _near_copies(
    here: ScanResult,
    other: ScanResult,
    apart: tuple[np.ndarray, np.ndarray] | None = None,
    *,
    mirrored: bool = False,
) -> list[tuple[int, int]]:
    """Return indices in `here` and in `other` of images that are nearly the same, not quite.

    Args:
        here: the images to find copies of.
        other: the images among which copies are searched.
        apart: as in `nearest_copies`.
        mirrored: as in `nearest_copies`.
    """
    # Unreadable images have thumbnails without contrast, which have no copies.
    copies = nearest_copies(
        here.rows["thumbnail"], other.rows["thumbnail"], mirrored=mirrored, apart=apart
    )
    ones = np.flatnonzero(copies != NONE)
    twos = copies[ones]
    # Images with the same pixels are exact copies, which are reported as such.
    changed = (here.rows["pixels"][ones] != other.rows["pixels"][twos]).any(axis=1)
    return [*zip(ones[changed].tolist(), twos[changed].tolist(), strict=True)]


def _leak(
    kind: str, split: str, other: str, names: Iterable[tuple[str, ...]], count: int
) -> Finding:
    text = LEAKS[kind].format(split=split, other=other)
    return new_finding(kind, f"{plural(count, 'image')} {text}", names, count, split)
