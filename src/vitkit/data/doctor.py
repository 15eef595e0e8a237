"""Decode every picture once, before a run starts: bad files are named then, not hours later."""

from __future__ import annotations

import dataclasses
import os
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Literal

import numpy as np

from vitkit.data.splits import ArraySplit, Dataset, Split
from vitkit.errors import DataError, ImageError, ImageReason

# Pictures handed to the threads at once; what is waiting takes memory, pixels are dropped.
BLOCK = 1024
SHOWN = 5


@dataclass(frozen=True)
class Problem:
    """A picture that cannot be used."""

    index: int
    """Its place in the split."""
    name: str
    """Its file."""
    reason: ImageReason
    """One of a fixed list of words."""
    detail: str
    """What was expected and what was found, in one line."""


def unreadable(split: Split, *, workers: int = 0) -> list[Problem]:
    """Decode every picture once and list those that cannot be, in order.

    Args:
        split: an `ArraySplit`, already in memory, is sound.
        workers: threads; 0 means one for each core. Memory does not grow with the split.
    """
    if isinstance(split, ArraySplit):
        return []

    def examine(index: int) -> Problem | None:
        try:
            split.read(index)
        except ImageError as error:
            return Problem(index, split.name(index), error.reason, error.detail)
        return None

    problems: list[Problem] = []
    with ThreadPoolExecutor(workers or os.cpu_count() or 1) as pool:
        for start in range(0, len(split), BLOCK):
            block = range(start, min(start + BLOCK, len(split)))
            problems += [problem for problem in pool.map(examine, block) if problem is not None]
    return problems


def sound(
    dataset: Dataset, problems_policy: Literal["refuse", "skip"], *, workers: int = 0
) -> tuple[Dataset, dict[str, list[Problem]]]:
    """The data set with every picture known to decode.

    Args:
        dataset: its splits are decoded once, all of them.
        problems_policy: "refuse" raises at the first bad picture, after all have been looked at;
            "skip" leaves the bad ones out, and the others keep their labels.
        workers: threads; 0 means one for each core.

    Returns:
        The data set, and for each split that has any the pictures left out.

    Raises:
        DataError: bad pictures with "refuse"; a split of which nothing is left with "skip".
    """
    found = {name: unreadable(split, workers=workers) for name, split in dataset.splits.items()}
    found = {name: problems for name, problems in found.items() if problems}
    if not found:
        return dataset, {}
    if problems_policy == "refuse":
        raise DataError(_refusal(dataset, found))
    splits = dict(dataset.splits)
    for name, problems in found.items():
        bad = [problem.index for problem in problems]
        kept = np.setdiff1d(np.arange(len(splits[name])), bad)
        if len(kept) == 0:
            raise DataError(
                f"{dataset.name}: no picture of {name} can be decoded; {_first(problems)}"
            )
        splits[name] = splits[name].subset(kept)
    return dataclasses.replace(dataset, splits=splits), found


def _refusal(dataset: Dataset, found: dict[str, list[Problem]]) -> str:
    problems = [problem for group in found.values() for problem in group]
    total = sum(len(split) for split in dataset.splits.values())
    reasons = Counter(problem.reason for problem in problems)
    by_reason = ", ".join(f"{count:,} {reason}" for reason, count in reasons.most_common())
    return (
        f"{dataset.name}: {len(problems):,} of {total:,} pictures cannot be decoded ({by_reason}): "
        f"{_first(problems)}; remove them or pass --bad-images skip"
    )


def _first(problems: list[Problem]) -> str:
    shown = "; ".join(f"{p.name}: {p.reason}: {p.detail}" for p in problems[:SHOWN])
    more = len(problems) - SHOWN
    return shown + (f"; and {more:,} more" if more > 0 else "")
