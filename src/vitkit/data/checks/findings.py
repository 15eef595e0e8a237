"""All findings about a dataset whose images have been scanned, errors first."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence

import numpy as np
from jaxtyping import Bool

from vitkit.data.checks.class_findings import class_shifts, doubtful_classes, missing_classes
from vitkit.data.checks.copy_findings import (
    duplicates,
    near_duplicates,
    near_two_labels,
    two_labels,
)
from vitkit.data.checks.finding import FINDING_KINDS, Finding, ScannedImages, new_finding
from vitkit.data.checks.leaks import leaks, near_leaks
from vitkit.data.datasets.scan import TRAITS, ScanResult
from vitkit.data.datasets.split import Split
from vitkit.messages import plural

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
        leaks(images),
        near_leaks(splits, scans),
        two_labels(images, classes),
        near_two_labels(splits, scans, classes),
        missing_classes(classes, images),
        doubtful_classes(classes),
        class_shifts(classes, splits),
        (new_finding("layout", message, (), 1) for message in warnings),
        _traits(images),
        duplicates(images),
        near_duplicates(splits, scans),
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
            yield new_finding("unreadable", message, names, len(scan.problems), split)


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
        yield new_finding(kind, f"{plural(count, 'image')} {text}", names, count)
