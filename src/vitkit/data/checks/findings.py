"""All findings about a dataset whose images have been scanned, errors first."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from jaxtyping import Bool, Int64

from vitkit.data.checks.scan import (
    LEAST_CORRELATION,
    TRAITS,
    ScanResult,
    near_copies,
    same_pixels,
)
from vitkit.data.datasets.split import Split
from vitkit.data.datasets.splitting import doubtful_names, notes_on_classes
from vitkit.messages import plural, quote_list

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
    """The readable images of all splits in one list, training first."""

    def __init__(self, splits: Mapping[str, Split], scans: Mapping[str, ScanResult]) -> None:
        self._splits = splits
        self._scans = scans
        readable = []
        for name, split in splits.items():
            unreadable = [problem.index for problem in scans[name].problems]
            readable.append(np.setdiff1d(np.arange(len(split)), unreadable))
        counts = [*map(len, readable)]
        self.names = tuple(splits)
        """Names of the splits."""
        self.split = np.repeat(np.arange(len(counts), dtype=np.uint8), counts)
        """The index in `names` of each image's split (N,)."""
        self.indices = np.concatenate(readable)
        """Each image's index in its split (N,)."""
        self.labels = self._of_readable(split.labels for split in splits.values())
        """Class numbers (N,)."""

    def column(self, field: str) -> np.ndarray:
        """Return one field of all rows (N, ...)."""
        return self._of_readable(scan.rows[field] for scan in self._scans.values())

    def name(self, number: int) -> str:
        """Return the name of an image."""
        split = self._splits[self.names[self.split[number]]]
        return split.name(int(self.indices[number]))

    def names_of(self, numbers: Int64[np.ndarray, " M"]) -> tuple[str, ...]:
        """Return the names of some images."""
        return tuple(map(self.name, numbers.tolist()))

    def _of_readable(self, columns: Iterable[np.ndarray]) -> np.ndarray:
        parts = []
        for number, column in enumerate(columns):
            parts.append(column[self.indices[self.split == number]])
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
        _copies(images, classes),
        _near_copies(splits, scans, classes),
        _missing_classes(classes, images),
        (_new_finding("class names", message, (), 1) for message in doubtful_names(classes)),
        (_new_finding("layout", message, (), 1) for message in warnings),
        _traits(images),
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
    """Find classes without an image, in train those with few, and other proportions elsewhere."""
    sizes = []
    for number in range(len(images.names)):
        sizes.append(np.bincount(images.labels[images.split == number], minlength=len(classes)))
    for split, of_split in zip(images.names, sizes, strict=True):
        counts = dict(zip(classes, of_split.tolist(), strict=True))
        is_first = split == images.names[0]
        # a class that train lacks is reported once, for train
        expected = [name for name, size in zip(classes, sizes[0], strict=True) if size or is_first]
        empty = [counts[name] for name in expected].count(0)
        for message in notes_on_classes(split, expected, counts):
            kind = "empty class" if is_first else "missing class"
            yield _new_finding(kind, message, (), empty, split)
        if is_first:
            yield from _small_classes(split, counts)
        elif of_split.any() and sizes[0].any():
            here, there = of_split / of_split.sum(), sizes[0] / sizes[0].sum()
            # Every image that moves from one class to another counts twice: hence the half.
            moved = float(np.abs(here - there).sum()) / 2
            if moved >= SHIFT and _is_beyond_chance(of_split, sizes[0]):
                most = np.argsort(-np.abs(here - there), kind="stable")[:SHIFTS_SHOWN]
                shown = ", ".join(f"{classes[c]!r} {here[c]:.0%} ({there[c]:.0%})" for c in most)
                message = (
                    f"the classes of {split} have other proportions than in {images.names[0]}: "
                    f"{shown}"
                )
                count = round(moved * int(of_split.sum()))
                yield _new_finding("class shift", message, (), count, split)


def _small_classes(split: str, counts: Mapping[str, int]) -> Iterator[Finding]:
    filled = [count for count in counts.values() if count > 0]
    median = float(np.median(filled)) if filled else 0.0
    single = [name for name, count in counts.items() if count == 1]
    rare = [name for name, count in counts.items() if 1 < count < RARE * median]
    if single:
        message = f"{split} has only one image of {_of_classes(single)}"
        yield _new_finding("single image", message, (), len(single), split)
    if rare:
        message = (
            f"{split} has few images of {_of_classes(rare)}; the other classes have {median:,.0f}"
        )
        yield _new_finding("rare class", message, (), len(rare), split)


def _is_beyond_chance(one: Int64[np.ndarray, " K"], other: Int64[np.ndarray, " K"]) -> bool:
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


# Copies: the same or nearly the same images in two splits, under two classes, or in one split.

LEAKS = {
    "leak": "of {split} {are} also in {other}, pixel for pixel; scores on {split} are too high",
    "near leak": "of {split} {are} nearly the same as in {other}: saved again, scaled, mirrored or "
    f"slightly changed (grey thumbnails correlate by {LEAST_CORRELATION} or more)",
}


def _copies(images: ScannedImages, classes: Sequence[str]) -> Iterator[Finding]:
    """Find images with the same pixels: leaks, copies under several classes, duplicates."""
    leaks: dict[tuple[int, int], list[tuple[str, ...]]] = {}
    repeated: dict[int, list[Int64[np.ndarray, " M"]]] = {}
    mixed = []
    involved: set[int] = set()
    for group in same_pixels(images.column("pixels")):
        splits = images.split[group]
        labels = {*images.labels[group].tolist()}
        if len(labels) > 1:
            mixed.append(group)
            involved |= labels
        # Training is the first split: a copy in test is a leak from train, not the reverse.
        first = int(splits.min())
        original = images.name(int(group[splits == first][0])) if splits.max() > first else ""
        for split in np.unique(splits).tolist():
            of_split = group[splits == split]
            if split != first:
                pairs = leaks.setdefault((split, first), [])
                pairs += [(images.name(number), original) for number in of_split.tolist()]
            if len(of_split) > 1:
                repeated.setdefault(split, []).append(of_split)
    for (split, first), named in sorted(leaks.items()):
        yield _leak("leak", images.names[split], images.names[first], named, len(named))
    if mixed:
        message = (
            f"{plural(len(mixed), 'image')} with more than one label, of "
            f"{quote_list(sorted(classes[label] for label in involved))}; correct the labels"
        )
        yield _new_finding("two labels", message, map(images.names_of, mixed), len(mixed))
    for split, groups in sorted(repeated.items()):
        extra = sum(map(len, groups)) - len(groups)  # all copies but one could be removed
        name = images.names[split]
        message = f"{plural(extra, 'duplicate')} in {name}"
        yield _new_finding("duplicate", message, map(images.names_of, groups), extra, name)


def _near_copies(
    splits: Mapping[str, Split], scans: Mapping[str, ScanResult], classes: Sequence[str]
) -> Iterator[Finding]:
    """Find images that are nearly the same: leaks, pairs under two classes, duplicates."""
    named: dict[frozenset[tuple[str, int]], tuple[str, ...]] = {}
    involved: set[int] = set()
    for other, here in itertools.combinations_with_replacement(splits, 2):
        one, two = splits[here], splits[other]
        # Not mirrored: the mirror image of a left arrow is a right arrow.
        for i, k in near_copies(scans[here], scans[other], apart=(one.labels, two.labels)):
            named[frozenset(((here, i), (other, k)))] = tuple(sorted((one.name(i), two.name(k))))
            involved |= {int(one.labels[i]), int(two.labels[k])}
        if here == other:
            yield from _near_duplicates(here, one, scans[here])
            continue
        pairs = near_copies(scans[here], scans[other], mirrored=True)
        if pairs:
            names = ((one.name(i), two.name(k)) for i, k in pairs)
            yield _leak("near leak", here, other, names, len(pairs))
    if named:
        message = (
            f"{plural(len(named), 'pair')} of nearly the same images with different labels, of "
            f"{quote_list(sorted(classes[label] for label in involved))}; check the labels"
        )
        yield _new_finding("near two labels", message, named.values(), len(named))


def _near_duplicates(name: str, split: Split, scan: ScanResult) -> Iterator[Finding]:
    own = np.arange(len(split))  # an image is no copy of itself
    # Each of a pair may be the nearest copy of the other: the pair counts once.
    pairs = {(min(pair), max(pair)) for pair in near_copies(scan, scan, (own, own))}
    if pairs:
        involved = np.unique([*pairs])
        are = "is" if len(involved) == 1 else "are"
        message = f"{plural(len(involved), 'image')} of {name} {are} nearly the same as another"
        names = ((split.name(i), split.name(k)) for i, k in sorted(pairs))
        yield _new_finding("near duplicate", message, names, len(involved), name)


def _leak(
    kind: str, split: str, other: str, names: Iterable[tuple[str, ...]], count: int
) -> Finding:
    text = LEAKS[kind].format(split=split, other=other, are="is" if count == 1 else "are")
    return _new_finding(kind, f"{plural(count, 'image')} {text}", names, count, split)
