"""What there is to say about a data set whose images have been looked at: a list of findings.

An error keeps training from starting, a warning makes its figures doubtful, a note is good to know.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from jaxtyping import Bool, Float64, Int64

from vitkit.data.checks.duplicates import LEAST_CORRELATION, NONE, nearest_copies, same_pixels
from vitkit.data.datasets.class_names import doubtful_names, notes_on_classes, quote_list
from vitkit.data.datasets.dataset import Split
from vitkit.data.datasets.scan import TRAITS, Looks
from vitkit.errors import plural

Severity = Literal["error", "warning", "note"]

RARE = 0.1
"""A class is rare below this part of the median class."""
SHIFT = 0.2
"""Part of a split that would need another class to have the proportions of train."""
LONG = 10.0
"""A side more than so many times the other."""
SMALL = 32
"""Pixels of a short side, below which an image shows little, if others show more."""
FAR = 16.0
"""How many times the median area, or a part of it, is suspicious."""
LARGE = 20_000_000
"""Pixels whose decoding takes longer than a training step."""
NOTED = 100
"""Images that a note names; errors and warnings name all."""

ABOUT_TRAITS = {
    "CMYK": "stored as CMYK inks; converted to RGB",
    "16 bits": "with more than 8 bits a sample; read with 8",
    "1 bit": "of black and white only",
    "alpha": "with transparency; laid on white",
    "frames": "with several frames; the first is read",
    "turned": "held sideways or mirrored by EXIF; turned upright",
    "blank": "of one colour only",
}
LEAKS = {
    "exact": "of {split} also in {other}, pixel for pixel; what {split} measures is flattered",
    "near": "of {split} nearly the same as in {other}: saved again, scaled, mirrored or slightly "
    f"changed (grey thumbnails correlate by {LEAST_CORRELATION} or more)",
}


@dataclass(frozen=True)
class Finding:
    """One thing that was found."""

    kind: str
    """What it is, for counting: a fixed set of words, those of `KINDS`."""
    severity: Severity
    message: str
    """One line."""
    count: int
    """How many images or classes it is about."""
    images: tuple[tuple[str, ...], ...] = ()
    """Their names; alone, or together with the images they are duplicates of."""
    split: str = ""
    """Where they are, if they are in one split."""


KINDS: dict[str, Severity] = {
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


def findings(
    classes: Sequence[str],
    splits: Mapping[str, Split],
    looks: Mapping[str, Looks],
    warnings: Iterable[str] = (),
) -> tuple[Finding, ...]:
    """Everything found, errors first.

    Args:
        classes: the data set's class names.
        splits: its splits, training first.
        looks: what was seen of each.
        warnings: what was noticed when the files were listed.
    """
    images = ScannedImages(splits, looks)
    found = itertools.chain(
        _unreadable(looks),
        _leaks(images),
        _near_leaks(splits, looks),
        _two_labels(images, classes),
        _near_two_labels(splits, looks, classes),
        _classes(classes, images),
        _class_names(classes),
        _class_shifts(classes, splits),
        (_finding("layout", message, (), 1) for message in warnings),
        _traits(images),
        _duplicates(images),
        _near_duplicates(splits, looks),
        _sizes(images),
    )
    order = [*KINDS]
    return tuple(sorted(found, key=lambda finding: order.index(finding.kind)))


class ScannedImages:
    """The readable images of all splits in one row, training first."""

    def __init__(self, splits: Mapping[str, Split], looks: Mapping[str, Looks]) -> None:
        self._splits, self._looks = splits, looks
        self.names = tuple(splits)
        good = [
            np.setdiff1d(np.arange(len(split)), [p.index for p in looks[name].problems])
            for name, split in splits.items()
        ]
        counts = [len(places) for places in good]
        self._edges = np.cumsum(counts)[:-1]
        self.places = np.concatenate(good)
        """Each image's place in its split (N,)."""
        self.split = np.repeat(np.arange(len(counts), dtype=np.uint8), counts)
        """Which of `names` each is of (N,)."""
        self.groups = same_pixels(self.column("pixels"))
        """Places with the same pixels."""

    def column(self, field: str) -> np.ndarray:
        """One field of all rows (N, ...)."""
        return self._gathered([self._looks[name].rows[field] for name in self.names])

    def labels(self) -> Int64[np.ndarray, " N"]:
        """Class numbers (N,)."""
        return self._gathered([self._splits[name].labels for name in self.names])

    def _gathered(self, columns: Iterable[np.ndarray]) -> np.ndarray:
        places = np.split(self.places, self._edges)
        return np.concatenate([c[some] for c, some in zip(columns, places, strict=True)])

    def name(self, place: int) -> str:
        split = self._splits[self.names[self.split[place]]]
        return split.name(int(self.places[place]))


def _finding(
    kind: str, message: str, images: Iterable[tuple[str, ...]], count: int, split: str = ""
) -> Finding:
    severity = KINDS[kind]
    named = itertools.islice(images, NOTED if severity == "note" else None)
    return Finding(kind, severity, message, count, tuple(named), split)


def _unreadable(looks: Mapping[str, Looks]) -> Iterator[Finding]:
    for split, look in looks.items():
        if look.problems:
            message = f"{plural(len(look.problems), 'image')} of {split} that cannot be decoded"
            names = ((problem.name,) for problem in look.problems)
            yield _finding("unreadable", message, names, len(look.problems), split)


def _leaks(images: ScannedImages) -> Iterator[Finding]:
    pairs: dict[tuple[int, int], list[tuple[str, ...]]] = {}
    for group in images.groups:
        first: dict[int, int] = {}
        for place in map(int, group):
            first.setdefault(int(images.split[place]), place)
        for place in map(int, group):
            here = int(images.split[place])
            before = min(first)  # training stands first
            if here != before:
                names = (images.name(place), images.name(first[before]))
                pairs.setdefault((here, before), []).append(names)
    for (here, other), named in sorted(pairs.items()):
        here_name, other_name = images.names[here], images.names[other]
        yield _leak("leak", "exact", here_name, other_name, named, len(named))


def _near_leaks(splits: Mapping[str, Split], looks: Mapping[str, Looks]) -> Iterator[Finding]:
    for other, here in itertools.combinations(splits, 2):
        if pairs := _near_copies(looks[here], looks[other], mirrored=True):
            names = ((splits[here].name(one), splits[other].name(two)) for one, two in pairs)
            yield _leak("near leak", "near", here, other, names, len(pairs))


def _near_two_labels(
    splits: Mapping[str, Split], looks: Mapping[str, Looks], classes: Sequence[str]
) -> Iterator[Finding]:
    # Not mirrored: the mirror image of a left arrow is a right arrow.
    named: dict[frozenset[tuple[str, int]], tuple[str, ...]] = {}
    torn: set[int] = set()
    for other, here in itertools.combinations_with_replacement(splits, 2):
        labels, others = splits[here].labels, splits[other].labels
        for one, two in _near_copies(looks[here], looks[other], apart=(labels, others)):
            names = tuple(sorted((splits[here].name(one), splits[other].name(two))))
            named[frozenset(((here, one), (other, two)))] = names
            torn |= {int(labels[one]), int(others[two])}
    if named:
        message = (
            f"{plural(len(named), 'pair')} of nearly the same images under two classes, of "
            f"{quote_list(sorted(classes[label] for label in torn))}; check both labels"
        )
        yield _finding("near two labels", message, named.values(), len(named))


def _near_duplicates(splits: Mapping[str, Split], looks: Mapping[str, Looks]) -> Iterator[Finding]:
    for name, split in splits.items():
        own = np.arange(len(split))
        pairs = {
            (min(pair), max(pair)) for pair in _near_copies(looks[name], looks[name], (own, own))
        }
        if pairs:
            several = np.unique([*pairs])
            message = f"{plural(len(several), 'image')} of {name} nearly the same as another"
            names = ((split.name(one), split.name(two)) for one, two in sorted(pairs))
            yield _finding("near duplicate", message, names, len(several), name)


def _near_copies(
    here: Looks,
    other: Looks,
    apart: tuple[np.ndarray, np.ndarray] | None = None,
    *,
    mirrored: bool = False,
) -> list[tuple[int, int]]:
    """Places in `here` and in `other` of images that are nearly the same, but not quite."""
    # Unreadable images have thumbnails without contrast, which have no copies.
    found = nearest_copies(
        here.rows["thumbnail"], other.rows["thumbnail"], mirrored=mirrored, apart=apart
    )
    ones = np.flatnonzero(found != NONE)
    twos = found[ones]
    changed = (here.rows["pixels"][ones] != other.rows["pixels"][twos]).any(axis=1)
    return [*zip(ones[changed].tolist(), twos[changed].tolist(), strict=True)]


def _leak(
    kind: str,
    how: str,
    here: str,
    other: str,
    names: Iterable[tuple[str, ...]],
    count: int,
) -> Finding:
    text = LEAKS[how].format(split=here, other=other)
    message = f"{plural(count, 'image')} {text}"
    return _finding(kind, message, names, count, here)


def _two_labels(images: ScannedImages, classes: Sequence[str]) -> Iterator[Finding]:
    every = images.labels()
    torn = [group for group in images.groups if len({*every[group].tolist()}) > 1]
    if torn:
        names = (tuple(images.name(int(place)) for place in group) for group in torn)
        labels = {classes[label] for group in torn for label in every[group]}
        message = (
            f"{plural(len(torn), 'image')} under more than one class, of "
            f"{quote_list(sorted(labels))}; one of the labels is wrong"
        )
        yield _finding("two labels", message, names, len(torn))


def _duplicates(images: ScannedImages) -> Iterator[Finding]:
    for number, split in enumerate(images.names):
        groups = [group[images.split[group] == number] for group in images.groups]
        groups = [group for group in groups if len(group) > 1]
        if groups:
            extra = sum(len(group) - 1 for group in groups)
            names = (tuple(images.name(int(place)) for place in group) for group in groups)
            message = f"{plural(extra, 'image')} of {split} repeating others"
            yield _finding("duplicate", message, names, extra, split)


def _classes(classes: Sequence[str], images: ScannedImages) -> Iterator[Finding]:
    every = images.labels()
    of_train = every[images.split == 0]
    for number, split in enumerate(images.names):
        labels = every[images.split == number]
        sizes = np.bincount(labels, minlength=len(classes))
        counts = dict(zip(classes, sizes.tolist(), strict=True))
        if number == 0:
            kind, expected = "empty class", list(classes)
        else:  # what train has no images of was said of train
            kind, expected = "missing class", [classes[label] for label in np.unique(of_train)]
        empty = sum(counts[name] == 0 for name in expected)
        for message in notes_on_classes(split, expected, counts):
            yield _finding(kind, message, (), empty, split)
        if number > 0:
            continue
        if single := [name for name, count in counts.items() if count == 1]:
            message = f"{split} has a single image of {_of_classes(single)}"
            yield _finding("single image", message, (), len(single), split)
        median = float(np.median(sizes[sizes > 0])) if sizes.any() else 0.0
        if rare := [name for name, count in counts.items() if 1 < count < RARE * median]:
            message = f"{split} has few images of {_of_classes(rare)}, others have {median:,.0f}"
            yield _finding("rare class", message, (), len(rare), split)


def _class_names(classes: Sequence[str]) -> Iterator[Finding]:
    for message in doubtful_names(classes):
        yield _finding("class names", message, (), 1)


def _class_shifts(classes: Sequence[str], splits: Mapping[str, Split]) -> Iterator[Finding]:
    """Splits whose proportions of classes are far from those of the first, beyond chance."""
    (first, taught), *others = (
        (name, np.bincount(split.labels, minlength=len(classes)).astype(float))
        for name, split in splits.items()
    )
    for name, counts in others:
        here, there = counts / counts.sum(), taught / taught.sum()
        moved = float(np.abs(here - there).sum()) / 2
        if moved >= SHIFT and _is_beyond_chance(counts, taught):
            most = np.argsort(-np.abs(here - there), kind="stable")[:3]
            shown = ", ".join(f"{classes[c]!r} {here[c]:.0%} ({there[c]:.0%})" for c in most)
            message = f"the classes of {name} have other proportions than in {first}: {shown}"
            yield _finding("class shift", message, (), round(moved * counts.sum()), name)


def _is_beyond_chance(one: Float64[np.ndarray, " K"], other: Float64[np.ndarray, " K"]) -> bool:
    """Whether two counts differ by more than draws from the same classes would.

    Pearson's chi-squared is more than five standard deviations above its mean.
    """
    both = one + other
    present = both > 0
    expected = [part.sum() * both[present] / both.sum() for part in (one, other)]
    squares = [
        ((part[present] - mean) ** 2 / mean).sum()
        for part, mean in zip((one, other), expected, strict=True)
    ]
    freedom = int(present.sum()) - 1
    return bool(sum(squares) > freedom + 5 * (2 * freedom) ** 0.5)


def _traits(images: ScannedImages) -> Iterator[Finding]:
    traits = images.column("traits")
    for bit, trait in enumerate(TRAITS):
        marked = (traits >> bit & 1).astype(bool)
        kind = "blank" if trait == "blank" else "mode"
        yield from _marked(kind, ABOUT_TRAITS[trait], images, marked)


def _sizes(images: ScannedImages) -> Iterator[Finding]:
    height, width = images.column("height"), images.column("width")
    if not len(height):
        return
    short, long, area = (
        np.minimum(height, width),
        np.maximum(height, width),
        height * width.astype(np.int64),
    )
    usual, usual_short = float(np.median(area)), float(np.median(short))
    small = (short < SMALL) & (short < usual_short / 2)
    is_long = long > LONG * short
    far = ~small & ~is_long & ((area > FAR * usual) | (area * FAR < usual))
    about = f"far from the usual size, {usual**0.5:.0f} x {usual**0.5:.0f} pixels or as many"
    yield from _marked("size", f"smaller than {SMALL} pixels on a side", images, small)
    yield from _marked("size", f"with one side over {LONG:g} times the other", images, is_long)
    yield from _marked("size", about, images, far)
    text = f"of more than {LARGE / 1e6:.0f} million pixels, slow to decode; scale them down once"
    yield from _marked("size", text, images, area > LARGE)


def _marked(
    kind: str, text: str, images: ScannedImages, marked: Bool[np.ndarray, " N"]
) -> Iterator[Finding]:
    count = int(marked.sum())
    if count:
        names = ((images.name(int(place)),) for place in np.flatnonzero(marked))
        yield _finding(kind, f"{plural(count, 'image')} {text}", names, count)


def _of_classes(names: Sequence[str]) -> str:
    return f"{'class' if len(names) == 1 else 'classes'} {quote_list(names)}"
