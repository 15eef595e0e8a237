"""Look at every image once, before a run starts: what is wrong is named then, not hours later.

`check` reports all there is to say; `drop_or_refuse_unreadable` is what training does with it: it
refuses images that cannot be decoded, or leaves them out. Both remember what they saw of files that
do not change.
"""

from __future__ import annotations

import dataclasses
import os
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from vitkit.data.checks.findings import Finding, findings
from vitkit.data.datasets.dataset import ArraySplit, Dataset, FileSplit, Split
from vitkit.data.datasets.scan import LOOK, Looks, Problem, as_stored, scan_split
from vitkit.data.datasets.splitting import first_copies
from vitkit.errors import DataError
from vitkit.io.file_cache import FileCache

__all__ = ["Problem", "Report", "check", "drop_or_refuse_unreadable"]

SHOWN = 5


@dataclass(frozen=True)
class Report:
    """What a check found."""

    name: str
    """The data set's."""
    classes: tuple[str, ...]
    images: dict[str, dict[str, int]]
    """Split -> class -> how many images, unreadable ones included."""
    problems: dict[str, list[Problem]]
    """Split -> the images that cannot be decoded; splits without any are left out."""
    findings: tuple[Finding, ...]
    """Everything found, errors first."""
    notes: tuple[str, ...]
    """What opening the data had to say."""
    recalled: int
    """How many images were known from an earlier check and have not changed since."""

    @property
    def refused(self) -> bool:
        """Whether training refuses the data as it is."""
        return bool(self.problems)

    @property
    def total(self) -> int:
        """How many images there are."""
        return sum(sum(counts.values()) for counts in self.images.values())

    def warnings(self) -> list[str]:
        """What training prints, a line each: what makes its figures doubtful."""
        return [finding.message for finding in self.findings if finding.severity == "warning"]

    def as_dict(self) -> dict[str, Any]:
        """The report as JSON takes it."""
        fields = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        return fields | {
            "refused": self.refused,
            "problems": [
                {"split": split} | dataclasses.asdict(problem)
                for split, problems in self.problems.items()
                for problem in problems
            ],
            "findings": [dataclasses.asdict(finding) for finding in self.findings],
        }


def check(
    dataset: Dataset,
    *,
    workers: int = 0,
    advance: Callable[[int], object] = lambda count: None,
) -> Report:
    """Look at every image of a data set and say all there is to say.

    Images in files that have not changed since an earlier check are not decoded again.

    Args:
        dataset: all its splits are looked at.
        workers: threads; 0 means one for each core. Memory hardly grows with the data.
        advance: is told how many images more are done.
    """
    looks = _look(dataset, dataset.splits, workers, advance)
    return _report(dataset, dataset.splits, looks)


def drop_or_refuse_unreadable(
    dataset: Dataset, problems_policy: Literal["refuse", "skip"], *, workers: int = 0
) -> tuple[Dataset, Report]:
    """The data set with every image known to decode.

    Args:
        dataset: its splits are looked at, but for images already in memory.
        problems_policy: "refuse" raises at the first bad image, after all have been looked at;
            "skip" leaves the bad ones out, and the others keep their labels.
        workers: threads; 0 means one for each core.

    Returns:
        The data set, and what was found; `.problems` are the images left out.

    Raises:
        DataError: bad images with "refuse"; a split of which nothing is left with "skip".
    """
    looked_at = {
        k: split for k, split in dataset.splits.items() if not isinstance(split, ArraySplit)
    }
    report = _report(dataset, looked_at, _look(dataset, looked_at, workers))
    if not report.refused:
        return dataset, report
    if problems_policy == "refuse":
        raise DataError(_refusal(dataset, report))
    splits, copies = dict(dataset.splits), dataset.first_copies
    for name, problems in report.problems.items():
        bad = [problem.index for problem in problems]
        kept = np.setdiff1d(np.arange(len(splits[name])), bad)
        if len(kept) == 0:
            raise DataError(
                f"{dataset.name}: no image of {name} can be decoded; {_first(problems)}"
            )
        splits[name] = splits[name].subset(kept)
        if name == "train" and copies is not None:
            copies = first_copies(place.tobytes() for place in copies[kept])
    return dataclasses.replace(dataset, splits=splits, first_copies=copies), report


def _look(
    dataset: Dataset,
    splits: Mapping[str, Split],
    workers: int,
    advance: Callable[[int], object] = lambda count: None,
) -> dict[str, Looks]:
    if not splits:
        return {}
    stored = map(as_stored, splits.values())
    roots = [split.root for split in stored if isinstance(split, FileSplit)]
    memory = FileCache("looks", os.path.realpath(roots[0]) if roots else dataset.name, LOOK)
    try:
        return {
            name: scan_split(split, memory, workers=workers, advance=advance)
            for name, split in splits.items()
        }
    finally:
        memory.save()


def _report(dataset: Dataset, splits: Mapping[str, Split], looks: Mapping[str, Looks]) -> Report:
    found = findings(dataset.classes, splits, looks, dataset.warnings) if splits else ()
    said = {finding.message for finding in found}
    counts = {
        name: np.bincount(split.labels, minlength=len(dataset.classes)).tolist()
        for name, split in dataset.splits.items()
    }
    return Report(
        name=dataset.name,
        classes=dataset.classes,
        images={
            name: dict(zip(dataset.classes, sizes, strict=True)) for name, sizes in counts.items()
        },
        problems={name: look.problems for name, look in looks.items() if look.problems},
        findings=found,
        notes=tuple(note for note in dataset.notes if note not in said),
        recalled=sum(look.recalled for look in looks.values()),
    )


def _refusal(dataset: Dataset, report: Report) -> str:
    problems = [problem for group in report.problems.values() for problem in group]
    reasons = Counter(problem.reason for problem in problems)
    by_reason = ", ".join(f"{count:,} {reason}" for reason, count in reasons.most_common())
    return (
        f"{dataset.name}: {len(problems):,} of {report.total:,} images cannot be decoded "
        f"({by_reason}): {_first(problems)}; remove them or pass --bad-images skip"
    )


def _first(problems: list[Problem]) -> str:
    shown = "; ".join(f"{p.name}: {p.reason}: {p.detail}" for p in problems[:SHOWN])
    more = len(problems) - SHOWN
    return shown + (f"; and {more:,} more" if more > 0 else "")
