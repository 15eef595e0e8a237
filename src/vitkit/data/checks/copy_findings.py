"""Findings about copies: the same or nearly the same images with two labels, or in one split."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from vitkit.data.checks.copy_search import name_pairs, near_copies
from vitkit.data.checks.finding import Finding, ScannedImages, new_finding
from vitkit.data.datasets.scan import ScanResult
from vitkit.data.datasets.split import Split
from vitkit.messages import plural, quote_list


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
            f"{plural(len(groups), 'image')} with more than one label, of "
            f"{quote_list(sorted(names_of_classes))}; correct the labels"
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
        for one, two in near_copies(scans[here], scans[other], apart=(labels, other_labels)):
            names = tuple(sorted((splits[here].name(one), splits[other].name(two))))
            named[frozenset(((here, one), (other, two)))] = names
            involved |= {int(labels[one]), int(other_labels[two])}
    if named:
        names_of_classes = sorted(classes[label] for label in involved)
        message = (
            f"{plural(len(named), 'pair')} of nearly the same images with different labels, of "
            f"{quote_list(names_of_classes)}; check the labels"
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
                extra += len(of_split) - 1  # all copies but one could be removed
        if groups:
            message = f"{plural(extra, 'duplicate')} in {split}"
            yield new_finding("duplicate", message, map(images.names_of, groups), extra, split)


def near_duplicates(
    splits: Mapping[str, Split], scans: Mapping[str, ScanResult]
) -> Iterator[Finding]:
    """Find images that are nearly the same inside of a split."""
    for name, split in splits.items():
        own = np.arange(len(split))  # an image is no copy of itself
        copies = near_copies(scans[name], scans[name], (own, own))
        # Each of a pair may be the nearest copy of the other: the pair counts once.
        pairs = {(min(pair), max(pair)) for pair in copies}
        if pairs:
            involved = np.unique([*pairs])
            are = "is" if len(involved) == 1 else "are"
            message = f"{plural(len(involved), 'image')} of {name} {are} nearly the same as another"
            named = name_pairs(sorted(pairs), split, split)
            yield new_finding("near duplicate", message, named, len(involved), name)
