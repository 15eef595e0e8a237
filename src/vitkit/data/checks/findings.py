"""All findings about a dataset whose images have been scanned, errors first."""

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from jaxtyping import Bool, Int64

from vitkit.data.checks.scan import LEAST_CORRELATION, ScanResult, near_copies, same_pixels
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
    "missing class": "warning",
    "class names": "warning",
    "layout": "warning",
    "blank": "warning",
    "rare class": "note",
    "duplicate": "note",
    "near duplicate": "note",
    "size": "note",
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


FAR = 16.0
"""Ratio of an image's area to the median area, or the reverse, that is suspicious."""


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
        _marked("blank", "of one colour only", images, images.column("blank")),
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


def _sizes(images: ScannedImages) -> Iterator[Finding]:
    area = images.column("height") * images.column("width").astype(np.int64)
    usual = float(np.median(area)) if len(area) else 0.0
    is_far = (area > FAR * usual) | (area * FAR < usual)
    about = f"far from the usual size of about {usual**0.5:.0f} x {usual**0.5:.0f} pixels"
    yield from _marked("size", about, images, is_far)


def _marked(
    kind: str, text: str, images: ScannedImages, marked: Bool[np.ndarray, " N"]
) -> Iterator[Finding]:
    count = int(marked.sum())
    if count:
        names = ((images.name(number),) for number in np.flatnonzero(marked).tolist())
        yield _new_finding(kind, f"{plural(count, 'image')} {text}", names, count)


RARE = 0.1
"""A class is rare below this part of the median class."""


def _missing_classes(classes: Sequence[str], images: ScannedImages) -> Iterator[Finding]:
    """Find classes without an image, and in train those with few."""
    expected = [*classes]
    for number, split in enumerate(images.names):
        sizes = np.bincount(images.labels[images.split == number], minlength=len(classes))
        counts = dict(zip(classes, sizes.tolist(), strict=True))
        empty = [counts[name] for name in expected].count(0)
        for message in notes_on_classes(split, expected, counts):
            kind = "missing class" if number else "empty class"
            yield _new_finding(kind, message, (), empty, split)
        if number or not sizes.any():
            continue
        # a class that train lacks is reported once, for train
        expected = [name for name in classes if counts[name]]
        median = float(np.median(sizes[sizes > 0]))
        rare = [name for name in expected if counts[name] < max(RARE * median, 2)]
        if rare:
            message = f"{split} has few images of {quote_list(rare)}; the median is {median:,.0f}"
            yield _new_finding("rare class", message, (), len(rare), split)


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
        original = ""
        if splits.max() > first:
            original = images.name(int(group[splits == first][0]))
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
