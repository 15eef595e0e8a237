"""From images with class names to a `Dataset`: one class map for all splits, matched by name."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from vitkit.data.datasets.class_names import (
    natural_order,
    notes_on_classes,
    quote_list,
    refuse_look_alikes,
    refuse_unknown,
    unknown,
)
from vitkit.data.datasets.dataset import Dataset, Split, fingerprint
from vitkit.data.datasets.splitting import POOL_FRACTIONS, cut_pool, first_copies, pool_cuts
from vitkit.errors import DataError

POOL = ""
"""The name of images that no split claims."""


@dataclass(frozen=True)
class Part:
    """The images of one split, or of all, before classes have numbers."""

    images: Split
    """Its labels are not looked at."""
    names: Sequence[str]
    """Each image's class."""
    digests: Sequence[bytes]
    """Each image's SHA-256."""


def assemble(
    name: str,
    where: str,
    parts: Mapping[str, Part],
    *,
    classes: Sequence[str] = (),
    ignore_extra_classes: bool = False,
    notes: Iterable[str] = (),
) -> Dataset:
    """Number the classes, and cut 70/10/20 what is not split yet.

    Args:
        name: the data set's name.
        where: what to call it in a message.
        parts: by split, or all of it as `POOL`.
        classes: all class names in their order, where the source knows them; else those of train,
            numbers as numbers.
        ignore_extra_classes: leave out classes of val and test that train lacks.
        notes: lines for the user that the source has already.

    Raises:
        DataError: no images, one class only, unknown or ambiguous classes.
    """
    parts = {split: part for split, part in parts.items() if len(part.names)}
    if not parts:
        raise DataError(f"{where}: no images")
    counts = {split: Counter(part.names) for split, part in parts.items()}
    taught = counts.get(POOL) or counts.get("train")
    if not classes:
        classes = natural_order(taught or {name for count in counts.values() for name in count})
    classes = tuple(classes)
    refuse_look_alikes({*classes, *(name for count in counts.values() for name in count)}, where)
    if taught is not None and len(taught) < 2:
        raise DataError(f"{where}: only one class has images, {next(iter(taught))!r}; expected two")
    notes, kept = list(notes), {}
    for split, part in parts.items():
        if not ignore_extra_classes:
            refuse_unknown(classes, counts[split], split or "the data", where)
        elif extra := unknown(classes, counts[split]):
            notes.append(f"{split} classes that train lacks are left out: {quote_list(extra)}")
            part = _of_classes(part, {*classes})
        if not len(part.names):
            notes.append(f"{split} has no images and is left out")
            continue
        notes += notes_on_classes(split or "train", classes, counts[split])
        kept[split] = _numbered(part, classes)
    marks = {split: (part.images.labels, part.digests) for split, part in kept.items()}
    mark = fingerprint(classes, marks)
    if POOL in kept:
        whole = kept[POOL].images
        cut, before = pool_cuts(whole.labels, kept[POOL].digests)
        sizes = ", ".join(f"{len(places):,} {split}" for split, places in cut.items())
        notes.append(f"no splits: cut 70/10/20 by class and image hash, seed 0: {sizes}")
        return cut_pool(whole, cut, Dataset(name, classes, {}, mark, tuple(notes)), before)
    splits = {split: kept[split].images for split in POOL_FRACTIONS if split in kept}
    copies = first_copies(kept["train"].digests) if "train" in kept else None
    return Dataset(name, classes, splits, mark, tuple(notes), first_copies=copies)


def _numbered(part: Part, classes: Sequence[str]) -> Part:
    number = {name: label for label, name in enumerate(classes)}
    labels = np.array([number[name] for name in part.names], np.int64)
    return Part(part.images.relabelled(labels), part.names, part.digests)


def _of_classes(part: Part, classes: set[str]) -> Part:
    kept = [place for place, name in enumerate(part.names) if name in classes]
    return Part(
        part.images.subset(np.array(kept, np.int64)),
        [part.names[place] for place in kept],
        [part.digests[place] for place in kept],
    )
