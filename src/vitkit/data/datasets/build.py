"""Build a `Dataset` from images with class names: one list of classes for all splits."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from vitkit.data.datasets.dataset import Dataset, dataset_fingerprint
from vitkit.data.datasets.split import Split
from vitkit.data.datasets.splitting import (
    POOL_FRACTIONS,
    cut_pool,
    first_copies,
    match_classes,
    natural_order,
    notes_on_classes,
    pool_cut,
    refuse_look_alikes,
    refuse_unknown_classes,
    unknown_classes,
)
from vitkit.errors import DataError
from vitkit.messages import quote_list

POOL = ""
"""The name of images that belong to no split yet."""


@dataclass(frozen=True)
class NamedImages:
    """The images of one split, or of all, before classes have numbers."""

    images: Split
    """The images; their labels are ignored."""
    names: Sequence[str]
    """Each image's class."""
    digests: Sequence[bytes]
    """Each image's SHA-256."""


def assemble(
    name: str,
    where: str,
    parts: Mapping[str, NamedImages],
    *,
    classes: Sequence[str] = (),
    ignore_extra_classes: bool = False,
    notes: Iterable[str] = (),
) -> Dataset:
    """Number the classes, and cut images without a split 70/10/20.

    Args:
        name: the dataset's name.
        where: the folder or address, for messages.
        parts: by split, or all of it as `POOL`.
        classes: all class names in their order, where the source knows them; else those of train,
            numbers as numbers.
        ignore_extra_classes: leave out classes of val and test that train lacks.
        notes: lines for the user that the source has already.

    Raises:
        DataError: no images, one class only, unknown or ambiguous classes.
    """
    counts = {split: Counter(part.names) for split, part in parts.items() if len(part.names)}
    if not counts:
        raise DataError(f"{where}: no images")
    all_names = set().union(*counts.values())
    # The training images define the classes; without them, all named classes count.
    train_counts = counts.get(POOL) or counts.get("train")
    if not classes:
        classes = natural_order(train_counts or all_names)
    classes = tuple(classes)
    refuse_look_alikes({*classes, *all_names}, where)
    if train_counts is not None and len(train_counts) < 2:
        only = next(iter(train_counts))
        raise DataError(f"{where}: only one class has images, {only!r}; expected at least two")
    notes = list(notes)
    numbered: dict[str, NamedImages] = {}
    for split in counts:
        part = parts[split]
        if not ignore_extra_classes:
            refuse_unknown_classes(classes, counts[split], split or "the data", where)
        else:
            extra = unknown_classes(classes, counts[split])
            if extra:
                notes.append(f"{split} classes that train lacks are left out: {quote_list(extra)}")
                part = _without_classes(part, {*extra})
        if not len(part.names):
            notes.append(f"{split} has no images and is left out")
            continue
        notes += notes_on_classes(split or "train", classes, counts[split])
        numbered[split] = _numbered(part, classes)
    return _dataset(name, classes, numbered, notes)


def _dataset(
    name: str, classes: tuple[str, ...], parts: dict[str, NamedImages], notes: list[str]
) -> Dataset:
    # The fingerprint is of the images as they were opened, before any cut.
    marks = {split: (part.images.labels, part.digests) for split, part in parts.items()}
    mark = dataset_fingerprint(classes, marks)
    if POOL in parts:
        images = parts[POOL].images
        cut, mark = pool_cut(images.labels, parts[POOL].digests, mark)
        sizes = ", ".join(f"{len(indices):,} {split}" for split, indices in cut.items())
        notes.append(f"no splits: divided 70/10/20 by class and image hash, seed 0: {sizes}")
        return cut_pool(images, cut, Dataset(name, classes, {}, mark, tuple(notes)))
    # Training comes first, whatever the order of the source.
    splits = {split: parts[split].images for split in POOL_FRACTIONS if split in parts}
    copies = first_copies(parts["train"].digests) if "train" in parts else None
    return Dataset(name, classes, splits, mark, tuple(notes), first_copies=copies)


def _numbered(part: NamedImages, classes: Sequence[str]) -> NamedImages:
    # Each name is matched once, not once for every image.
    names = natural_order({*part.names})
    number = dict(zip(names, match_classes(names, classes).indices, strict=True))
    labels = np.array([number[name] for name in part.names], np.int64)
    return NamedImages(part.images.relabelled(labels), part.names, part.digests)


def _without_classes(part: NamedImages, extra: set[str]) -> NamedImages:
    indices: list[int] = []
    names: list[str] = []
    digests: list[bytes] = []
    for index, (name, digest) in enumerate(zip(part.names, part.digests, strict=True)):
        if name not in extra:
            indices.append(index)
            names.append(name)
            digests.append(digest)
    return NamedImages(part.images.subset(np.array(indices, np.int64)), names, digests)
