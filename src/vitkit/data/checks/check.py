"""One decode of every image before a run starts, so that problems are named then.

`check` opens the data and reports all findings; `drop_or_refuse_unreadable` is the part that
training needs: it refuses images that cannot be decoded, or leaves them out. Both keep the results
of files that do not change in a cache.
"""

import dataclasses
import itertools
import os
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

from vitkit.data.checks.findings import Finding, findings
from vitkit.data.checks.scan import SCAN_ROW, Problem, ScanResult, scan_split
from vitkit.data.datasets.dataset import Dataset
from vitkit.data.datasets.split import LabelChange, LabelChanges, Split, read_label_changes
from vitkit.data.datasets.splitting import first_copies
from vitkit.data.sources.open import DataSource, open_dataset
from vitkit.errors import DataError
from vitkit.io.caches import FileCache
from vitkit.messages import did_you_mean, escape, plural, quote_list

__all__ = ["Problem", "Report", "check", "check_dataset", "drop_or_refuse_unreadable"]

PROBLEMS_SHOWN = 5


@dataclass(frozen=True)
class Report:
    """The result of a check."""

    name: str
    """Name of the dataset."""
    classes: tuple[str, ...]
    images: dict[str, dict[str, int]]
    """Split -> class -> number of images, unreadable ones included."""
    problems: dict[str, list[Problem]]
    """Split -> the images that cannot be decoded; splits without any are left out."""
    findings: tuple[Finding, ...]
    """All findings, errors first."""
    notes: tuple[str, ...]
    """Notes from opening the data."""
    recalled: int
    """Number of images known from an earlier check that have not changed since."""

    @property
    def refused(self) -> bool:
        """True if training refuses the data as it is."""
        return bool(self.problems)

    @property
    def total(self) -> int:
        """The number of images in all splits."""
        return sum(sum(counts.values()) for counts in self.images.values())

    def warnings(self) -> list[str]:
        """Return the warnings, a line each; training prints them."""
        return [finding.message for finding in self.findings if finding.severity == "warning"]

    def as_dict(self, most: int | None = None) -> dict[str, Any]:
        """Return the report as JSON values.

        Args:
            most: images that are listed of a finding, and problems; `more` of each finding then
                counts the others. None lists all.
        """
        problems = []
        for split, of_split in self.problems.items():
            for problem in of_split[:most]:
                problems.append({"split": split} | dataclasses.asdict(problem))
        entries = []
        for finding in self.findings:
            # Shortened first: a finding may name a million images, which take seconds to copy.
            short = dataclasses.replace(finding, images=finding.images[:most])
            more = {} if most is None else {"more": len(finding.images) - len(short.images)}
            entries.append(dataclasses.asdict(short) | more)
        lists = {"problems": problems[:most], "findings": entries}
        return vars(self) | {"refused": self.refused} | lists


def check_dataset(
    dataset: Dataset,
    *,
    workers: int = 0,
    advance: Callable[[int], object] = lambda count: None,
) -> Report:
    """Decode every image of a dataset and report everything that may be wrong with it.

    Images in files that have not changed since an earlier check are not decoded again.

    Args:
        dataset: all its splits are checked.
        workers: threads; 0 means one for each core. Memory hardly grows with the data.
        advance: called with the number of images done since the last call.

    Raises:
        SettingError: a negative number of workers.
    """
    scans = _scan(dataset, dataset.splits, workers, advance)
    return _report(dataset, dataset.splits, scans)


def check(
    data: DataSource,
    *,
    data_root: str | Path | None = None,
    ignore_extra_classes: bool = False,
    follow_links: bool = False,
    workers: int = 0,
    relabel: str | Path | None = None,
) -> Report:
    """Check every image of a dataset; unchanged files are read only the first time.

    Args:
        data: as for `open_dataset`.
        data_root: the folder of named datasets.
        ignore_extra_classes: leave out classes of val and test that train lacks.
        follow_links: follow symbolic links that lead out of the folder.
        workers: threads; 0 means one for each core.
        relabel: a CSV file of corrected labels, as for `train`.

    Returns:
        `.problems`, the images that cannot be decoded; `.findings`, all findings; `.refused`, True
        if training would refuse the data; `.as_dict()` for JSON.

    Raises:
        DataError: data that cannot be opened, or corrected labels that do not fit them.
        MissingExtraError: a Parquet file or a set of the Hub, without `vitkit[hub]`.
        SettingError: a negative number of workers.
    """
    dataset = open_corrected(
        data,
        relabel,
        data_root=data_root,
        ignore_extra_classes=ignore_extra_classes,
        follow_links=follow_links,
    )
    return check_dataset(dataset, workers=workers)


def open_corrected(data: DataSource, relabel: str | Path | None, **options: Any) -> Dataset:
    """Open data as `open_dataset` does, with the corrected labels of a file, if there is one."""
    if relabel is None:
        return open_dataset(data, **options)
    changes = read_label_changes(relabel)  # first: opening the data takes longer
    return with_corrections(open_dataset(data, **options), changes)


def drop_or_refuse_unreadable(
    dataset: Dataset, problems_policy: Literal["refuse", "skip"], *, workers: int = 0
) -> tuple[Dataset, Report]:
    """Return the dataset with images that all decode.

    Args:
        dataset: its splits are checked, but for images already in memory.
        problems_policy: "refuse" raises at the first bad image, after all have been decoded;
            "skip" leaves the bad ones out, and the others keep their labels.
        workers: threads; 0 means one for each core.

    Returns:
        The dataset, and the report; `.problems` are the images left out.

    Raises:
        DataError: bad images with "refuse"; a split without any good image with "skip".
        SettingError: a negative number of workers.
    """
    checked = {name: split for name, split in dataset.splits.items() if not split.in_memory}
    report = _report(dataset, checked, _scan(dataset, checked, workers))
    if not report.refused:
        return dataset, report
    splits = dict(dataset.splits)
    copies = dataset.first_copies
    for name, problems in report.problems.items():
        bad = [problem.index for problem in problems]
        good = np.setdiff1d(np.arange(len(splits[name])), bad)
        # A split without images would only fail later, with a message that names no file.
        if problems_policy == "refuse" or len(good) == 0:
            raise DataError(_refusal(dataset, report))
        splits[name] = splits[name].subset(good)
        if name == "train" and copies is not None:
            # Only which images are copies of each other counts, so any bytes will do as digests.
            copies = first_copies(first.tobytes() for first in copies[good])
    return dataclasses.replace(dataset, splits=splits, first_copies=copies), report


def _scan(
    dataset: Dataset,
    splits: Mapping[str, Split],
    workers: int,
    advance: Callable[[int], object] = lambda count: None,
) -> dict[str, ScanResult]:
    if not splits:
        return {}
    # The folder of the image files, or the name of a dataset of another kind; it only says which
    # file to look into: rows are found by the keys of the images.
    subject = dataset.name
    for split in splits.values():
        folder = split.folder()
        if folder is not None:
            subject = os.path.realpath(folder)
            break
    cache = FileCache("looks", subject, SCAN_ROW)
    scans = {}
    # An interrupted scan is kept, too: the next one continues after its last image.
    try:
        for name, split in splits.items():
            scans[name] = scan_split(split, cache, workers=workers, advance=advance)
    finally:
        cache.save()
    return scans


def _report(
    dataset: Dataset, splits: Mapping[str, Split], scans: Mapping[str, ScanResult]
) -> Report:
    all_findings: tuple[Finding, ...] = ()
    if splits:
        all_findings = findings(dataset.classes, splits, scans, dataset.warnings)
    # Some notes from opening the data are findings, too; they are reported once.
    messages = {finding.message for finding in all_findings}
    notes = tuple(note for note in dataset.notes if note not in messages)
    images = {}
    for name, split in dataset.splits.items():
        counts = np.bincount(split.labels, minlength=len(dataset.classes)).tolist()
        images[name] = dict(zip(dataset.classes, counts, strict=True))
    return Report(
        name=dataset.name,
        classes=dataset.classes,
        images=images,
        problems={name: scan.problems for name, scan in scans.items() if scan.problems},
        findings=all_findings,
        notes=notes,
        recalled=sum(scan.recalled for scan in scans.values()),
    )


def _refusal(dataset: Dataset, report: Report) -> str:
    problems = [*itertools.chain(*report.problems.values())]
    reasons = Counter(problem.reason for problem in problems)
    by_reason = ", ".join(f"{count:,} {reason}" for reason, count in reasons.most_common())
    shown = "; ".join(f"{p.name}: {p.reason}: {p.detail}" for p in problems[:PROBLEMS_SHOWN])
    return (
        f"{dataset.name}: {len(problems):,} of {report.total:,} images cannot be decoded "
        f"({by_reason}), such as {shown}; remove them or pass --bad-images skip, which needs "
        "other images in each split"
    )


# Relabelling of a dataset: single images get other classes, and the files stay as they are.


def with_corrections(dataset: Dataset, changes: LabelChanges) -> Dataset:
    """Return the dataset with corrected labels; splits, images and order stay as they were.

    An image that has its new class already keeps it.

    Args:
        dataset: after it was divided into splits, which must not depend on the corrections.
        changes: images of any of its splits. An image may be named as `Split.path` or as
            `Split.name` does.

    Raises:
        DataError: an image or a class that the dataset does not have, or an image that has another
            class than the list says, or two new ones; the first is named, the others counted.
    """
    labels = {name: split.labels.copy() for name, split in dataset.splits.items()}
    places = _places(dataset, {change.path for change in changes.changes})
    problems = []
    first: dict[tuple[str, int], LabelChange] = {}
    for change in changes.changes:
        image, found = escape(change.path), places.get(change.path, [])
        earlier = [first.setdefault(place, change) for place in found]
        now = {dataset.classes[dataset.splits[name].labels[index]] for name, index in found}
        if change.new not in dataset.classes:
            near = did_you_mean(change.new, dataset.classes)
            known = quote_list(dataset.classes)
            problem = f"no class {escape(change.new)!r}{near}; {dataset.name} has {known}"
        elif not found:
            example = next(iter(dataset.splits.values())).path(0)
            problem = f"{dataset.name} has no image {image!r}; its images are named like {example}"
        elif change.old and not now <= {change.old, change.new}:
            problem = f"{image!r} is {quote_list(now)} in {dataset.name}, not {change.old!r}"
        elif {other.new for other in earlier} != {change.new}:
            problem = (
                f"{image!r} is the image of line {earlier[0].line}, {escape(earlier[0].new)!r} "
                f"there and {escape(change.new)!r} here; keep one of the lines"
            )
        else:
            for name, index in found:  # a CSV may list an image more than once
                labels[name][index] = dataset.classes.index(change.new)
            continue
        problems.append(f"line {change.line}: {problem}")
    if problems:
        more = f" (and {len(problems) - 1:,} more lines)" if problems[1:] else ""
        raise DataError(f"--relabel {changes.name}, {problems[0]}{more}")
    counts: dict[str, int] = {}
    splits = dict(dataset.splits)
    for name, split in dataset.splits.items():
        if count := int((labels[name] != split.labels).sum()):
            counts[name] = count
            splits[name] = split.relabelled(labels[name])
    parts = ", ".join(f"{count:,} of {name}" for name, count in counts.items())
    note = f"{changes.name}: {plural(sum(counts.values()), 'label')} corrected"
    return dataclasses.replace(
        dataset,
        splits=splits,
        notes=(*dataset.notes, f"{note} ({parts})" if parts else note),
        relabelled=changes,
    )


def _places(dataset: Dataset, wanted: set[str]) -> dict[str, list[tuple[str, int]]]:
    """Return the split and the index of each image of a list that the dataset has."""
    places: dict[str, list[tuple[str, int]]] = {}
    for name, split in dataset.splits.items():
        for index in range(len(split)):
            # names as in predictions.csv are accepted, too
            for image in {split.path(index), split.name(index)} & wanted:
                places.setdefault(image, []).append((name, index))
    return places
