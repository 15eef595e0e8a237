"""All findings about a dataset whose images have been scanned, errors first."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from jaxtyping import Bool, Float64, Int64

from vitkit.data.checks.copy_search import LEAST_CORRELATION, name_pairs, near_copies, same_pixels
from vitkit.data.datasets.scan import TRAITS, ScanResult
from vitkit.data.datasets.split import Split
from vitkit.data.datasets.splitting import doubtful_names, notes_on_classes
from vitkit.messages import plural, quote_list

# A finding of a check, and the images that findings are about.

Severity = Literal["error", "warning", "note"]

MOST_NAMED = 100
"""Images that a note names; errors and warnings name all."""

FINDING_KINDS: dict[str, Severity] = {
    "unreadable": "error",
    "leak": "warning",
    "near leak": "warning",
    "two labels": "warning",
    "near two labels": "warning",
    "empty class": "warning",
    "single image": "warning",
    "missing class": "warning",
    "class names": "warning",
    "class shift": "warning",
    "layout": "warning",
    "blank": "warning",
    "rare class": "note",
    "duplicate": "note",
    "near duplicate": "note",
    "size": "note",
    "mode": "note",
}
"""All kinds of findings, in the order of a report."""


@dataclass(frozen=True)
class Finding:
    """One problem or peculiarity of a dataset.

    An error keeps training from starting, a warning makes its figures doubtful, a note is good to
    know.
    """

    kind: str
    """One of `FINDING_KINDS`, for counting."""
    severity: Severity
    message: str
    """The message, in one line."""
    count: int
    """Number of images or classes it is about."""
    images: tuple[tuple[str, ...], ...] = ()
    """Their names; alone, or together with the images they are duplicates of."""
    split: str = ""
    """Their split, if they are in one."""


def _new_finding(
    kind: str, message: str, images: Iterable[tuple[str, ...]], count: int, split: str = ""
) -> Finding:
    """Return a finding with the severity of its kind; a note names the first images only."""
    severity = FINDING_KINDS[kind]
    # `images` may be a generator over millions of names, each of which takes time.
    most = MOST_NAMED if severity == "note" else None
    return Finding(kind, severity, message, count, tuple(itertools.islice(images, most)), split)


class ScannedImages:
    """The readable images of all splits in one list, training first.

    Attributes:
        names: names of the splits.
        split: the index in `names` of each image's split (N,).
        indices: each image's index in its split (N,).
        groups: numbers of images with the same pixels, for each set of copies.
    """

    def __init__(self, splits: Mapping[str, Split], scans: Mapping[str, ScanResult]) -> None:
        self._splits = splits
        self._scans = scans
        self.names = tuple(splits)
        readable = []
        for name, split in splits.items():
            unreadable = [problem.index for problem in scans[name].problems]
            readable.append(np.setdiff1d(np.arange(len(split)), unreadable))
        counts = [*map(len, readable)]
        # All splits are concatenated; these are the offsets of the splits.
        self._edges = np.cumsum(counts)[:-1]
        self.indices = np.concatenate(readable)
        self.split = np.repeat(np.arange(len(counts), dtype=np.uint8), counts)
        self.groups = same_pixels(self.column("pixels"))

    def column(self, field: str) -> np.ndarray:
        """Return one field of all rows (N, ...)."""
        return self._of_readable(scan.rows[field] for scan in self._scans.values())

    def labels(self) -> Int64[np.ndarray, " N"]:
        """Return the class numbers (N,)."""
        return self._of_readable(split.labels for split in self._splits.values())

    def name(self, number: int) -> str:
        """Return the name of an image."""
        split = self._splits[self.names[self.split[number]]]
        return split.name(int(self.indices[number]))

    def names_of(self, numbers: Int64[np.ndarray, " M"]) -> tuple[str, ...]:
        """Return the names of some images."""
        return tuple(map(self.name, numbers.tolist()))

    def _of_readable(self, columns: Iterable[np.ndarray]) -> np.ndarray:
        by_split = np.split(self.indices, self._edges)
        parts = [column[rows] for column, rows in zip(columns, by_split, strict=True)]
        return np.concatenate(parts)


LONG = 10.0
"""Ratio of the sides above which an image is long."""
SMALL = 32
"""Pixels of a short side, below which an image shows little, if others show more."""
FAR = 16.0
"""Ratio of an image's area to the median area, or the reverse, that is suspicious."""
LARGE = 20_000_000
"""Pixels whose decoding takes longer than a training step."""

ABOUT_TRAITS = {
    "CMYK": "stored as CMYK; converted to RGB",
    "16 bits": "with more than 8 bits per sample; reduced to 8",
    "1 bit": "in black and white only",
    "alpha": "with transparency; placed on white",
    "frames": "with several frames; the first is read",
    "turned": "rotated or mirrored by their EXIF orientation; turned upright",
    "blank": "of one colour only",
}


def findings(
    classes: Sequence[str],
    splits: Mapping[str, Split],
    scans: Mapping[str, ScanResult],
    warnings: Iterable[str] = (),
) -> tuple[Finding, ...]:
    """Return all findings, errors first.

    Args:
        classes: the dataset's class names.
        splits: its splits, training first.
        scans: the scan of each.
        warnings: warnings from listing the files.
    """
    images = ScannedImages(splits, scans)
    unordered = itertools.chain(
        _unreadable(scans),
        _leaks(images),
        _near_leaks(splits, scans),
        _two_labels(images, classes),
        _near_two_labels(splits, scans, classes),
        _missing_classes(classes, images),
        _doubtful_classes(classes),
        _class_shifts(classes, splits),
        (_new_finding("layout", message, (), 1) for message in warnings),
        _traits(images),
        _duplicates(images),
        _near_duplicates(splits, scans),
        _sizes(images),
    )
    # The kinds are listed from errors to remarks.
    order = [*FINDING_KINDS]
    return tuple(sorted(unordered, key=lambda finding: order.index(finding.kind)))


def _unreadable(scans: Mapping[str, ScanResult]) -> Iterator[Finding]:
    for split, scan in scans.items():
        if scan.problems:
            message = f"{plural(len(scan.problems), 'image')} of {split} cannot be decoded"
            names = ((problem.name,) for problem in scan.problems)
            yield _new_finding("unreadable", message, names, len(scan.problems), split)


def _traits(images: ScannedImages) -> Iterator[Finding]:
    # Every trait is one bit of an image's row, see `scan.TRAITS`.
    traits = images.column("traits")
    for bit, trait in enumerate(TRAITS):
        marked = (traits >> bit & 1).astype(bool)
        kind = "blank" if trait == "blank" else "mode"
        yield from _marked(kind, ABOUT_TRAITS[trait], images, marked)


def _sizes(images: ScannedImages) -> Iterator[Finding]:
    height = images.column("height")
    width = images.column("width")
    if not len(height):
        return
    short = np.minimum(height, width)
    long = np.maximum(height, width)
    area = height * width.astype(np.int64)
    usual = float(np.median(area))
    # In a dataset of small images, small ones are not reported.
    is_small = (short < SMALL) & (short < float(np.median(short)) / 2)
    is_long = long > LONG * short
    # Small and long images are reported once, not again for their area.
    is_far = ~is_small & ~is_long & ((area > FAR * usual) | (area * FAR < usual))
    about = f"far from the usual size of about {usual**0.5:.0f} x {usual**0.5:.0f} pixels"
    yield from _marked("size", f"smaller than {SMALL} pixels on a side", images, is_small)
    yield from _marked("size", f"with one side over {LONG:g} times the other", images, is_long)
    yield from _marked("size", about, images, is_far)
    text = f"of more than {LARGE / 1e6:.0f} million pixels, slow to decode; resize the files once"
    yield from _marked("size", text, images, area > LARGE)


def _marked(
    kind: str, text: str, images: ScannedImages, marked: Bool[np.ndarray, " N"]
) -> Iterator[Finding]:
    count = int(marked.sum())
    if count:
        names = ((images.name(number),) for number in np.flatnonzero(marked).tolist())
        yield _new_finding(kind, f"{plural(count, 'image')} {text}", names, count)


# Findings about classes: empty and rare ones, doubtful names, proportions that differ.

RARE = 0.1
"""A class is rare below this part of the median class."""
SHIFT = 0.2
"""Part of a split that would need another class to have the proportions of train."""
SHIFTS_SHOWN = 3
DEVIATIONS = 5
"""Standard deviations above its mean from which a chi-squared is beyond chance."""


def _missing_classes(classes: Sequence[str], images: ScannedImages) -> Iterator[Finding]:
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
            yield _new_finding(kind, message, (), empty, split)
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
        yield _new_finding("single image", message, (), len(single), split)
    if rare:
        message = (
            f"{split} has few images of {_of_classes(rare)}; the other classes have {median:,.0f}"
        )
        yield _new_finding("rare class", message, (), len(rare), split)


def _doubtful_classes(classes: Sequence[str]) -> Iterator[Finding]:
    """Find class names that are probably one class, or no class."""
    for message in doubtful_names(classes):
        yield _new_finding("class names", message, (), 1)


def _class_shifts(classes: Sequence[str], splits: Mapping[str, Split]) -> Iterator[Finding]:
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
            yield _new_finding("class shift", message, (), round(moved * counts.sum()), name)


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


# Findings about copies: the same or nearly the same images with two labels, or in one split.


def _two_labels(images: ScannedImages, classes: Sequence[str]) -> Iterator[Finding]:
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
        yield _new_finding("two labels", message, map(images.names_of, groups), len(groups))


def _near_two_labels(
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
        yield _new_finding("near two labels", message, named.values(), len(named))


def _duplicates(images: ScannedImages) -> Iterator[Finding]:
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
            yield _new_finding("duplicate", message, map(images.names_of, groups), extra, split)


def _near_duplicates(
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
            yield _new_finding("near duplicate", message, named, len(involved), name)


# Leaks: images of a split that are also in an earlier one, exactly or nearly.

LEAKS = {
    "leak": "of {split} {are} also in {other}, pixel for pixel; scores on {split} are too high",
    "near leak": "of {split} {are} nearly the same as in {other}: saved again, scaled, mirrored or "
    f"slightly changed (grey thumbnails correlate by {LEAST_CORRELATION} or more)",
}


def _leaks(images: ScannedImages) -> Iterator[Finding]:
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


def _near_leaks(splits: Mapping[str, Split], scans: Mapping[str, ScanResult]) -> Iterator[Finding]:
    """Find images of a split that are nearly the same as one of an earlier split."""
    for other, here in itertools.combinations(splits, 2):
        pairs = near_copies(scans[here], scans[other], mirrored=True)
        if pairs:
            named = name_pairs(pairs, splits[here], splits[other])
            yield _leak("near leak", here, other, named, len(pairs))


def _leak(
    kind: str, split: str, other: str, names: Iterable[tuple[str, ...]], count: int
) -> Finding:
    text = LEAKS[kind].format(split=split, other=other, are="is" if count == 1 else "are")
    return _new_finding(kind, f"{plural(count, 'image')} {text}", names, count, split)
