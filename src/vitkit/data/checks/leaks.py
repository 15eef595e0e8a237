"""Leaks: images of a split that are also in an earlier one, exactly or nearly."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping

from vitkit.data.checks.copy_search import LEAST_CORRELATION, name_pairs, near_copies
from vitkit.data.checks.finding import Finding, ScannedImages, new_finding
from vitkit.data.datasets.scan import ScanResult
from vitkit.data.datasets.split import Split
from vitkit.messages import plural

LEAKS = {
    "leak": "of {split} {are} also in {other}, pixel for pixel; scores on {split} are too high",
    "near leak": "of {split} {are} nearly the same as in {other}: saved again, scaled, mirrored or "
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
        pairs = near_copies(scans[here], scans[other], mirrored=True)
        if pairs:
            named = name_pairs(pairs, splits[here], splits[other])
            yield _leak("near leak", here, other, named, len(pairs))


def _leak(
    kind: str, split: str, other: str, names: Iterable[tuple[str, ...]], count: int
) -> Finding:
    text = LEAKS[kind].format(split=split, other=other, are="is" if count == 1 else "are")
    return new_finding(kind, f"{plural(count, 'image')} {text}", names, count, split)
