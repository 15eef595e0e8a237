"""Image folders: `train/<class>/**.jpg` with `val/` or `test/`, or `<class>/**.jpg`.

The folder is walked once into a `Listing`; all else is decided from that, in an order that does
not depend on the file system's.
"""

from __future__ import annotations

import dataclasses
import itertools
import os
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from vitkit.data.datasets.class_names import (
    is_hidden,
    natural_order,
    notes_on_classes,
    quote_list,
    refuse_look_alikes,
    refuse_unknown,
    unknown,
)
from vitkit.data.datasets.dataset import (
    SPLIT_WORDS,
    Dataset,
    FileSplit,
    Split,
    fingerprint,
)
from vitkit.data.datasets.file_digests import file_digests
from vitkit.data.datasets.path_list import Paths
from vitkit.data.datasets.splitting import POOL_FRACTIONS, cut_pool, first_copies, pool_cuts
from vitkit.data.images.decode import escape
from vitkit.errors import DataError, plural

ENDINGS = (
    ".jpg", ".jpeg", ".png", ".webp", ".bmp", ".gif", ".tif", ".tiff", ".jfif", ".jpe",
)  # fmt: skip
UNREAD_IMAGES = {
    ".heic", ".heif", ".avif", ".jxl", ".jp2", ".j2k", ".ico", ".svg", ".psd", ".eps", ".pdf",
    ".ppm", ".pgm", ".pbm", ".pnm", ".tga", ".exr", ".hdr", ".dds", ".dng", ".cr2", ".cr3", ".nef",
    ".arw", ".orf", ".rw2", ".raw", ".dcm", ".nii", ".npy", ".mp4", ".mov", ".avi", ".mkv", ".webm",
    ".zip", ".tar", ".gz", ".7z", ".rar",
}  # fmt: skip
"""Endings of files that may hold images, but are not read; a warning tells of them."""
# Links to folders are followed at most so deep: folders full of links to each other would
# otherwise be walked once for every order of visiting them.
MOST_LINKS = 2

Parts = tuple[str, ...]
"""A path below the root, split at its separators."""
BETWEEN = "\0"
"""Stands between the parts of a path as text; it is in no name, and sorts before all others."""


@dataclass
class Listing:
    """What lies below a root."""

    images: list[str] = field(default_factory=list)
    """Their paths, split at `BETWEEN`: as text they take a third of what `Parts` do."""
    folders: set[Parts] = field(default_factory=set)
    others: Counter[str] = field(default_factory=Counter)
    hidden_folders: int = 0
    looping_links: int = 0
    leaving_links: list[Parts] = field(default_factory=list)

    def paths(self) -> Iterator[Parts]:
        """The images' paths."""
        return (tuple(image.split(BETWEEN)) for image in self.images)

    def warnings(self) -> tuple[str, ...]:
        """A line about files that may hold images but are not read."""
        unread = {kind: n for kind, n in self.others.items() if kind in UNREAD_IMAGES}
        if not unread:
            return ()
        return (f"files that may hold images are not read: {_by_kind(unread)}; convert them, for "
                f"example to .png, or move them away",)  # fmt: skip

    def children(self, parent: Parts) -> tuple[str, ...]:
        """The names of the folders directly in `parent`, in natural order."""
        depth = len(parent)
        return natural_order(
            folder[-1]
            for folder in self.folders
            if len(folder) == depth + 1 and folder[:depth] == parent
        )


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
    listing = list_folder(root, follow_links)
    if listing.leaving_links:
        first = "/".join(listing.leaving_links[0])
        raise DataError(
            f"{escape(root)}: {len(listing.leaving_links)} symbolic links lead out of the "
            f"folder, the first is {escape(first)}; pass --follow-links to follow them"
        )
    if not listing.images:
        raise DataError(f"{escape(root)}: no images, {_found_instead(listing)}")
    folders, notes = _split_folders(root, listing)
    notes += _notes_on_listing(root, listing)
    if folders:
        opened = _open_split_folders(root, listing, folders, notes, ignore_extra_classes)
        return dataclasses.replace(opened, warnings=listing.warnings())
    opened = _open_flat(root, listing, notes)
    warnings = (*_warnings_on_layout(opened.classes, listing), *listing.warnings())
    return dataclasses.replace(opened, warnings=warnings)


def list_folder(root: Path, follow_links: bool) -> Listing:
    """Walk `root`, every folder once for each way to it; loops end where they close.

    Raises:
        DataError: a folder that cannot be listed.
    """
    listing, real_root = Listing(), os.path.realpath(root)
    waiting: list[tuple[Parts, frozenset[tuple[int, int]], int]] = [((), frozenset(), 0)]
    while waiting:
        parts, above, links = waiting.pop()
        folder = root.joinpath(*parts)
        try:
            found = folder.stat()
            here = (found.st_dev, found.st_ino)
            if here in above or links > MOST_LINKS:
                listing.looping_links += 1
                continue
        except OSError as error:
            raise _unlistable(folder, error) from error
        listing.folders.add(parts)
        for entry in _entries(folder):
            below = (*parts, entry.name)
            is_folder = _is_folder(entry)
            if is_hidden(entry.name):
                listing.hidden_folders += is_folder
            elif not is_folder and not entry.name.lower().endswith(ENDINGS):
                listing.others[os.path.splitext(entry.name)[1].lower() or "without an ending"] += 1
            elif entry.is_symlink() and not follow_links and _leaves(entry.path, real_root):
                listing.leaving_links.append(below)
            elif is_folder:
                waiting.append((below, above | {here}, links + entry.is_symlink()))
            else:
                listing.images.append(BETWEEN.join(below))
    listing.images.sort()
    listing.leaving_links.sort()
    return listing


def _entries(folder: Path) -> Iterator[os.DirEntry[str]]:
    try:
        with os.scandir(folder) as entries:
            yield from entries
    except OSError as error:
        raise _unlistable(folder, error) from error


def _unlistable(folder: Path, error: OSError) -> DataError:
    return DataError(f"{escape(folder)}: cannot be listed: {error.strerror}")


def _is_folder(entry: os.DirEntry[str]) -> bool:
    try:
        return entry.is_dir()
    except OSError:  # a link to itself
        return False


def _leaves(link: str, real_root: str) -> bool:
    target = os.path.realpath(link)
    return target != real_root and not target.startswith(real_root.rstrip("/") + "/")


def _split_folders(root: Path, listing: Listing) -> tuple[dict[str, str], list[str]]:
    """Split name -> its folder; empty for a flat folder. It is split where there is a train folder,
    or nothing but split folders."""
    top = listing.children(())
    known: dict[str, str] = {}
    for folder in top:
        split = SPLIT_WORDS.get(folder.casefold())
        if split in known:
            raise DataError(
                f"{escape(root)}: both {known[split]!r} and {folder!r} could be {split}; "
                f"keep one of them"
            )
        if split:
            known[split] = folder
    if not known or ("train" not in known and len(known) < len(top)):
        return {}, []
    unused = [folder for folder in top if folder not in known.values()]
    note = f"folders beside {quote_list(known.values())} are not read: {quote_list(unused)}"
    return {s: known[s] for s in POOL_FRACTIONS if s in known}, [note] if unused else []


def _notes_on_listing(root: Path, listing: Listing) -> list[str]:
    notes = []
    if listing.hidden_folders:
        notes.append(f"{plural(listing.hidden_folders, 'hidden folder')} skipped")
    if listing.looping_links:
        notes.append(f"{plural(listing.looping_links, 'link')} that loop or nest deeply skipped")
    others = {kind: n for kind, n in listing.others.items() if kind not in UNREAD_IMAGES}
    if others:
        notes.append(f"not read: {_by_kind(others)}")
    return notes


def _warnings_on_layout(classes: Sequence[str], listing: Listing) -> Iterator[str]:
    """Class folders that all hold the same folders: those may be the classes, or the splits."""
    inner: dict[str, set[str]] = {name: set() for name in classes}
    for folder in listing.folders:
        if len(folder) == 2:
            inner[folder[0]].add(folder[1])
    common = {*map(frozenset, inner.values())}
    if len(common) != 1 or len(below := natural_order(common.pop())) < 2:
        return
    if any(name.casefold() in SPLIT_WORDS for name in below):
        what = (
            "which are read as one; put the splits above the classes: train/<class>, test/<class>"
        )
    else:
        what = "which may be the classes; the upper folders are read as classes"
    yield f"the folders {quote_list(classes)} all hold the folders {quote_list(below)}, {what}"


def _by_kind(counts: Mapping[str, int]) -> str:
    most = Counter(counts).most_common(5)
    shown = ", ".join(f"{count:,} {escape(kind)}" for kind, count in most)
    more = sum(counts.values()) - sum(count for _, count in most)
    return shown + (f" and {more:,} more" if more else "")


def _notes_on_stray(outside: Iterable[bool]) -> list[str]:
    stray = sum(outside)
    return [f"{plural(stray, 'image')} outside class folders not read"] if stray else []


def _name(root: Path) -> str:
    return escape(root.resolve().name) or "data"


def _open_split_folders(
    root: Path,
    listing: Listing,
    folders: Mapping[str, str],
    notes: list[str],
    ignore_extra_classes: bool,
) -> Dataset:
    names = {split: listing.children((folder,)) for split, folder in folders.items()}
    found = {split: _by_class(listing, (folder,)) for split, folder in folders.items()}
    classes = natural_order({name for group in names.values() for name in group})
    refuse_look_alikes(classes, escape(root))
    if "train" in folders:
        classes = names["train"]
        _refuse_too_few(root, (folders["train"],), classes, found["train"])
    splits: dict[str, Split] = {}
    digests = {}
    for split, by_class in found.items():
        counts = {name: len(group) for name, group in by_class.items()}
        if not ignore_extra_classes:
            refuse_unknown(classes, counts, split, escape(root))
        elif extra := unknown(classes, counts):
            notes.append(f"{split} classes that train lacks are left out: {quote_list(extra)}")
        part = _file_split(root, by_class, classes)
        if not len(part):
            notes.append(f"{split} has no images and is left out")
            continue
        notes += notes_on_classes(split, classes, counts)
        splits[split] = part
        digests[split] = (part.labels, [*map(bytes, file_digests(part.paths))])
    if not splits:
        raise DataError(f"{escape(root)}: images in no class folder; {_expected(root)}")
    read = set(folders.values())
    notes += _notes_on_stray(
        len(path) == 1 or (len(path) == 2 and path[0] in read) for path in listing.paths()
    )
    copies = first_copies(digests["train"][1]) if "train" in splits else None
    mark = fingerprint(classes, digests)
    return Dataset(_name(root), classes, splits, mark, tuple(notes), first_copies=copies)


def _open_flat(root: Path, listing: Listing, notes: list[str]) -> Dataset:
    classes, by_class = listing.children(()), _by_class(listing, ())
    refuse_look_alikes(classes, escape(root))
    _refuse_too_few(root, (), classes, by_class)
    counts = {name: len(group) for name, group in by_class.items()}
    notes += notes_on_classes("train", classes, counts)  # the words of the finding
    notes += _notes_on_stray(len(path) == 1 for path in listing.paths())
    whole = _file_split(root, by_class, classes)
    digests = file_digests(whole.paths)
    cut, before = pool_cuts(whole.labels, map(bytes, digests))
    sizes = ", ".join(f"{len(part):,} {name}" for name, part in cut.items())
    notes.append(f"no train folder: split 70/10/20 by class and file hash, seed 0: {sizes}")
    for name in ("val", "test"):
        present = Counter(classes[label] for label in whole.labels[cut[name]])
        kept = {c: present[c] for c in classes if counts.get(c)}
        notes += notes_on_classes(name, tuple(kept), kept)
    mark = fingerprint(classes, {"": (whole.labels, map(bytes, digests))})
    return cut_pool(whole, cut, Dataset(_name(root), classes, {}, mark, tuple(notes)), before)


def _by_class(listing: Listing, parent: Parts) -> dict[str, list[str]]:
    """Class name -> its images, at any depth below `parent`/<class>."""
    depth = len(parent)
    groups: dict[str, list[str]] = {}
    for image, path in zip(listing.images, listing.paths(), strict=True):
        if len(path) > depth + 1 and path[:depth] == parent:
            groups.setdefault(path[depth], []).append(image)
    return groups


def _refuse_too_few(
    root: Path, parent: Parts, classes: Sequence[str], by_class: Mapping[str, Sequence[str]]
) -> None:
    """Refuse fewer than two classes with images."""
    where = escape(root.joinpath(*parent))
    filled = [name for name in classes if by_class.get(name)]
    if not filled:
        raise DataError(f"{where}: images in no class folder; {_expected(root)}")
    if len(filled) > 1:
        return
    depth = len(parent)
    paths = (image.split(BETWEEN) for image in by_class[filled[0]])
    inner = {path[depth + 1] for path in paths if len(path) > depth + 2}
    nested = len(inner) > 1 or "train" in inner
    hint = f"; did you mean {where}/{escape(filled[0])}?" if nested else ""
    raise DataError(f"{where}: only one class has images, {filled[0]!r}; expected two{hint}")


def _expected(root: Path) -> str:
    base = escape(root)
    return (
        f"expected {base}/train/<class>/*.jpg with val/ or test/ beside train/, "
        f"or {base}/<class>/*.jpg"
    )


def _found_instead(listing: Listing) -> str:
    if not listing.others:
        return f"the folder is empty; expected files ending in {' '.join(ENDINGS)}"
    return f"but {_by_kind(listing.others)}; expected files ending in {' '.join(ENDINGS)}"


def _file_split(
    root: Path, by_class: Mapping[str, Sequence[str]], classes: Sequence[str]
) -> FileSplit:
    groups = [by_class.get(name, ()) for name in classes]
    labels = np.repeat(np.arange(len(groups)), [len(group) for group in groups])
    images = itertools.chain.from_iterable(groups)
    return FileSplit(Paths((p.replace(BETWEEN, os.sep) for p in images), root), labels, root)
