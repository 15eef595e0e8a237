"""Relabelling of a dataset: single images get other classes, and the files stay as they are."""

from __future__ import annotations

import dataclasses

from vitkit.data.datasets.dataset import Dataset
from vitkit.data.datasets.label_changes import LabelChange, LabelChanges
from vitkit.errors import DataError
from vitkit.messages import did_you_mean, escape, plural, quote_list


def relabel(dataset: Dataset, changes: LabelChanges) -> Dataset:
    """Return the dataset with corrected labels; splits, images and order stay as they were.

    An image that has its new class already keeps it.

    Args:
        dataset: after it was divided into splits, which must not depend on the corrections.
        changes: images of any of its splits. An image may be named as `Split.path` or as
            `Split.name` does.

    Raises:
        DataError: an image or a class that the dataset does not have, an image that has another
            class than the list says, or that is listed under both its names with two new classes;
            the message names the first one and counts the others.
    """
    _refuse_unknown_classes(dataset, changes)
    numbers = {name: number for number, name in enumerate(dataset.classes)}
    labels = {name: split.labels.copy() for name, split in dataset.splits.items()}
    counts: dict[str, int] = {}
    stale = []
    for (name, index), change in _change_by_place(dataset, changes).items():
        now = dataset.classes[labels[name][index]]
        if now == change.new:
            continue
        if change.old and now != change.old:
            stale.append(
                f"line {change.line}: {escape(change.path)!r} is {now!r} in {dataset.name}, "
                f"not {change.old!r}"
            )
        labels[name][index] = numbers[change.new]
        counts[name] = counts.get(name, 0) + 1
    _refuse(changes, stale, "")
    splits = dict(dataset.splits)
    for name in counts:
        splits[name] = splits[name].relabelled(labels[name])
    parts = ", ".join(f"{count:,} of {name}" for name, count in counts.items())
    note = f"{changes.name}: {plural(sum(counts.values()), 'label')} corrected"
    return dataclasses.replace(
        dataset,
        splits=splits,
        notes=(*dataset.notes, f"{note} ({parts})" if parts else note),
        relabelled=changes,
    )


def _change_by_place(dataset: Dataset, changes: LabelChanges) -> dict[tuple[str, int], LabelChange]:
    """Return the change of each listed image by its split and index."""
    places = _places(dataset, {change.path for change in changes.changes})
    unknown, twice = [], []
    by_place: dict[tuple[str, int], LabelChange] = {}
    for change in changes.changes:
        if change.path not in places:
            unknown.append(
                f"line {change.line}: {dataset.name} has no image {escape(change.path)!r}"
            )
        # a CSV may list an image more than once
        for place in places.get(change.path, ()):
            first = by_place.setdefault(place, change)
            if first.new != change.new:
                twice.append(
                    f"line {change.line}: {escape(change.path)!r} is the image of line "
                    f"{first.line}, {first.new!r} there and {change.new!r} here"
                )
    _refuse(changes, unknown, _example(dataset))
    _refuse(changes, twice, "; keep one of the lines")
    return by_place


def _places(dataset: Dataset, wanted: set[str]) -> dict[str, list[tuple[str, int]]]:
    """Return the split and the index of each image of a list that the dataset has."""
    places: dict[str, list[tuple[str, int]]] = {}
    for name, split in dataset.splits.items():
        for index in range(len(split)):
            path = split.path(index)
            if path in wanted:
                places.setdefault(path, []).append((name, index))
    rest = wanted - {*places}
    if not rest:
        return places
    # names as in predictions.csv are accepted, too
    for name, split in dataset.splits.items():
        for index in range(len(split)):
            if split.name(index) in rest:
                places.setdefault(split.name(index), []).append((name, index))
    return places


def _refuse_unknown_classes(dataset: Dataset, changes: LabelChanges) -> None:
    problems = []
    for change in changes.changes:
        if change.new not in dataset.classes:
            near = did_you_mean(change.new, dataset.classes)
            problems.append(f"line {change.line}: no class {escape(change.new)!r}{near}")
    _refuse(changes, problems, f"; {dataset.name} has {quote_list(dataset.classes)}")


def _refuse(changes: LabelChanges, problems: list[str], mend: str) -> None:
    """Raise `DataError` for the first of the problems, if there are any."""
    if problems:
        more = f" (and {len(problems) - 1:,} more)" if len(problems) > 1 else ""
        raise DataError(f"--relabel {changes.name}, {problems[0]}{more}{mend}")


def _example(dataset: Dataset) -> str:
    """Show how the images of a dataset are named in a list."""
    for split in dataset.splits.values():
        if len(split):
            return f"; its images are named like {split.path(0)!r}"
    return ""
