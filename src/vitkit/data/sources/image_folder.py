"""Image folders: `train/<class>/**.jpg` with `val/` or `test/`, or `<class>/**.jpg`.

The folder is walked once into a `Listing`; everything else follows from that.
"""

from __future__ import annotations

import dataclasses
import itertools
import os
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np

from vitkit.data.datasets.class_names import (
    natural_order,
    notes_on_classes,
    refuse_look_alikes,
    refuse_unknown_classes,
    unknown_classes,
)
from vitkit.data.datasets.dataset import SPLIT_WORDS, Dataset, FileSplit, dataset_fingerprint
from vitkit.data.datasets.file_digests import file_digests
from vitkit.data.datasets.split import Split
from vitkit.data.datasets.splitting import POOL_FRACTIONS, cut_pool, first_copies, pool_cuts
from vitkit.data.images.file_types import IMAGE_ENDINGS
from vitkit.data.sources.folder_listing import (
    PART_SEPARATOR,
    Listing,
    PathParts,
    count_by_kind,
    list_folder,
    refuse_run_folder,
)
from vitkit.errors import DataError
from vitkit.messages import escape, plural, quote_list


def open_folder(
    root: Path, *, ignore_extra_classes: bool = False, follow_links: bool = False
) -> Dataset:
    """Open an image folder; no image is decoded, every file is hashed.

    Args:
        root: the folder.
        ignore_extra_classes: leave out classes of val and test that train lacks.
        follow_links: follow symbolic links that lead out of the folder.

    Raises:
        DataError: no images, no class folders, one class only, unknown or ambiguous classes,
            links out of the folder, folders that cannot be listed.
    """
    refuse_run_folder(root)
    # Refused, not ignored: a dataset with many links would silently lose images.
    listing = list_folder(root, follow_links)
    if listing.leaving_links:
        first = "/".join(listing.leaving_links[0])
        raise DataError(
            f"{escape(root)}: {len(listing.leaving_links)} symbolic links lead out of the "
            f"folder, the first is {escape(first)}; pass --follow-links to follow them"
        )
    if not listing.images:
        raise DataError(f"{escape(root)}: no images, {_contents_instead(listing)}")
    folders, notes = _split_folders(root, listing)
    notes += listing.notes()
    if folders:
        opened = _open_split_folders(root, listing, folders, notes, ignore_extra_classes)
        return dataclasses.replace(opened, warnings=listing.warnings())
    # Only a flat folder can be one level too high or too low: split folders are known by name.
    opened = _open_flat(root, listing, notes)
    warnings = (*_warnings_on_layout(opened.classes, listing), *listing.warnings())
    return dataclasses.replace(opened, warnings=warnings)


def _split_folders(root: Path, listing: Listing) -> tuple[dict[str, str], list[str]]:
    """Return split name -> its folder, empty for a flat folder, and notes.

    The folder is split where there is a train folder, or nothing but split folders.
    """
    top = listing.children(())
    known: dict[str, str] = {}
    for folder in top:
        split = SPLIT_WORDS.get(folder.casefold())
        if split in known:
            raise DataError(
                f"{escape(root)}: both {known[split]!r} and {folder!r} could be {split}; keep "
                "one of them"
            )
        if split:
            known[split] = folder
    if not known or ("train" not in known and len(known) < len(top)):
        return {}, []
    # Training comes first, whatever the order of the folders.
    ordered = {split: known[split] for split in POOL_FRACTIONS if split in known}
    unused = [folder for folder in top if folder not in known.values()]
    if not unused:
        return ordered, []
    note = f"folders beside {quote_list(known.values())} are not read: {quote_list(unused)}"
    return ordered, [note]


def _warnings_on_layout(classes: Sequence[str], listing: Listing) -> Iterator[str]:
    """Warn of class folders that all hold the same folders: the classes, or the splits."""
    inner: dict[str, set[str]] = {name: set() for name in classes}
    for folder in listing.folders:
        if len(folder) == 2:
            inner[folder[0]].add(folder[1])
    # The same subfolders in every class are hardly an accident.
    common = {*map(frozenset, inner.values())}
    if len(common) != 1:
        return
    below = natural_order(common.pop())
    if len(below) < 2:
        return
    if any(name.casefold() in SPLIT_WORDS for name in below):
        problem = (
            "which are read as one; put the splits above the classes: train/<class>, test/<class>"
        )
    else:
        problem = "which may be the classes; the upper folders are read as classes"
    yield f"the folders {quote_list(classes)} all hold the folders {quote_list(below)}, {problem}"


def _notes_on_stray(outside: Iterable[bool]) -> list[str]:
    stray = sum(outside)
    return [f"{plural(stray, 'image')} outside the class folders not read"] if stray else []


def _name(root: Path) -> str:
    return escape(root.resolve().name) or "data"


def _open_split_folders(
    root: Path,
    listing: Listing,
    folders: Mapping[str, str],
    notes: list[str],
    ignore_extra_classes: bool,
) -> Dataset:
    names: dict[str, tuple[str, ...]] = {}
    images: dict[str, dict[str, list[str]]] = {}
    for split, folder in folders.items():
        names[split] = listing.children((folder,))
        images[split] = listing.images_by_class((folder,))
    classes = natural_order(set().union(*names.values()))
    refuse_look_alikes(classes, escape(root))
    if "train" in folders:
        classes = names["train"]
        _refuse_too_few(root, (folders["train"],), classes, images["train"])
    splits: dict[str, Split] = {}
    digests = {}
    for split, by_class in images.items():
        counts = _count_images(by_class)
        if not ignore_extra_classes:
            refuse_unknown_classes(classes, counts, split, escape(root))
        else:
            extra = unknown_classes(classes, counts)
            if extra:
                notes.append(f"{split} classes that train lacks are left out: {quote_list(extra)}")
        # Classes that train lacks are left out here, since only `classes` are taken.
        part = _file_split(root, by_class, classes)
        if not len(part):
            notes.append(f"{split} has no images and is left out")
            continue
        notes += notes_on_classes(split, classes, counts)
        splits[split] = part
        digests[split] = (part.labels, [*map(bytes, file_digests(part.paths))])
    if not splits:
        raise DataError(f"{escape(root)}: images outside class folders; {_expected(root)}")
    # Images beside the class folders, at the top or in a split's folder, have no class.
    read = set(folders.values())
    notes += _notes_on_stray(
        len(path) == 1 or (len(path) == 2 and path[0] in read) for path in listing.paths()
    )
    copies = first_copies(digests["train"][1]) if "train" in splits else None
    mark = dataset_fingerprint(classes, digests)
    return Dataset(_name(root), classes, splits, mark, tuple(notes), first_copies=copies)


def _open_flat(root: Path, listing: Listing, notes: list[str]) -> Dataset:
    classes = listing.children(())
    by_class = listing.images_by_class(())
    refuse_look_alikes(classes, escape(root))
    _refuse_too_few(root, (), classes, by_class)
    counts = _count_images(by_class)
    notes += notes_on_classes("train", classes, counts)  # with the same wording as in the check
    notes += _notes_on_stray(len(path) == 1 for path in listing.paths())
    whole = _file_split(root, by_class, classes)
    digests = [*map(bytes, file_digests(whole.paths))]
    cut, cut_before = pool_cuts(whole.labels, digests)
    sizes = ", ".join(f"{len(part):,} {name}" for name, part in cut.items())
    notes.append(f"no train folder: split 70/10/20 by class and file hash, seed 0: {sizes}")
    # Classes without any image were noted above; here only those that the split left empty.
    filled = [name for name in classes if counts.get(name)]
    for split in ("val", "test"):
        present = Counter(classes[label] for label in whole.labels[cut[split]])
        notes += notes_on_classes(split, filled, present)
    mark = dataset_fingerprint(classes, {"": (whole.labels, digests)})
    dataset = Dataset(_name(root), classes, {}, mark, tuple(notes))
    return cut_pool(whole, cut, dataset, cut_before)


def _count_images(by_class: Mapping[str, Sequence[str]]) -> dict[str, int]:
    return {name: len(images) for name, images in by_class.items()}


def _refuse_too_few(
    root: Path, parent: PathParts, classes: Sequence[str], by_class: Mapping[str, Sequence[str]]
) -> None:
    """Refuse fewer than two classes with images."""
    where = escape(root.joinpath(*parent))
    filled = [name for name in classes if by_class.get(name)]
    if not filled:
        raise DataError(f"{where}: images outside class folders; {_expected(root)}")
    if len(filled) > 1:
        return
    # Several folders in the only class, or one called train: probably one level too high.
    depth = len(parent)
    inner = set()
    for image in by_class[filled[0]]:
        path = image.split(PART_SEPARATOR)
        if len(path) > depth + 2:
            inner.add(path[depth + 1])
    nested = len(inner) > 1 or "train" in inner
    hint = f"; did you mean {where}/{escape(filled[0])}?" if nested else ""
    raise DataError(
        f"{where}: only one class has images, {filled[0]!r}; expected at least two{hint}"
    )


def _expected(root: Path) -> str:
    base = escape(root)
    return (
        f"expected {base}/train/<class>/*.jpg with val/ or test/ beside train/, "
        f"or {base}/<class>/*.jpg"
    )


def _contents_instead(listing: Listing) -> str:
    contents = "the folder is empty"
    if listing.others:
        contents = f"but {count_by_kind(listing.others)}"
    if ".tar" in listing.others:
        contents += " (tar shards are named as 'wds:FOLDER/*.tar')"
    return f"{contents}; expected files ending in {' '.join(IMAGE_ENDINGS)}"


def _file_split(
    root: Path, by_class: Mapping[str, Sequence[str]], classes: Sequence[str]
) -> FileSplit:
    # Images are ordered by class, then as in the listing.
    groups = [by_class.get(name, ()) for name in classes]
    labels = np.repeat(np.arange(len(groups)), [*map(len, groups)])
    images = itertools.chain.from_iterable(groups)
    paths = [os.path.join(root, image.replace(PART_SEPARATOR, os.sep)) for image in images]
    return FileSplit(paths, labels, root)
