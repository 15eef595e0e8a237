"""Image folders: `train/<class>/**.jpg` with `val/` or `test/`, or `<class>/**.jpg`.

The folder is walked once into a `Listing`; everything else follows from that.
"""

import dataclasses
import os
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from vitkit.data.datasets import pixel_cache, splitting
from vitkit.data.datasets.dataset import SPLIT_WORDS, Dataset, FileSplit
from vitkit.data.images.integrity import IMAGE_ENDINGS
from vitkit.errors import DataError
from vitkit.messages import escape, plural, quote_list

# A list of all files below a folder, in an order that does not depend on the file system.

UNREAD_IMAGES = frozenset({
    ".heic", ".heif", ".avif", ".jxl", ".jp2", ".j2k", ".ico", ".svg", ".psd", ".eps", ".pdf",
    ".ppm", ".pgm", ".pbm", ".pnm", ".tga", ".exr", ".hdr", ".dds", ".dng", ".cr2", ".cr3", ".nef",
    ".arw", ".orf", ".rw2", ".raw", ".dcm", ".nii", ".npy", ".mp4", ".mov", ".avi", ".mkv", ".webm",
    ".zip", ".tar", ".gz", ".7z", ".rar",
})  # fmt: skip
"""Endings of files that may hold images, but are not read; a warning names them."""
# Links to folders are followed at most so deep: folders full of links to each other would
# otherwise be walked once for every order of visiting them.
MOST_LINKS = 2
KINDS_SHOWN = 5

PathParts = tuple[str, ...]
"""A path below the root, split at its separators."""


@dataclass
class Listing:
    """The files and folders below a root."""

    images: list[PathParts] = field(default_factory=list)
    folders: set[PathParts] = field(default_factory=set)
    others: Counter[str] = field(default_factory=Counter)
    """Number of other files by their ending."""
    hidden_folders: int = 0
    looping_links: int = 0
    leaving_links: list[PathParts] = field(default_factory=list)
    """Symbolic links that lead out of the root."""

    def warnings(self) -> tuple[str, ...]:
        """Return a line about files that may hold images but are not read, if there are any."""
        unread = {kind: n for kind, n in self.others.items() if kind in UNREAD_IMAGES}
        if not unread:
            return ()
        return (
            f"files that may contain images are not read: {count_by_kind(unread)}; convert them, "
            "for example to .png, or move them away",
        )

    def notes(self) -> list[str]:
        """Return lines about everything else that is not read."""
        notes = []
        if self.hidden_folders:
            notes.append(f"{plural(self.hidden_folders, 'hidden folder')} skipped")
        if self.looping_links:
            notes.append(f"{plural(self.looping_links, 'link')} that loop or nest deeply skipped")
        others = {kind: n for kind, n in self.others.items() if kind not in UNREAD_IMAGES}
        if others:
            notes.append(f"not read: {count_by_kind(others)}")
        return notes

    def children(self, parent: PathParts) -> tuple[str, ...]:
        """Return the names of the folders directly in `parent`, in natural order."""
        depth = len(parent)
        names = []
        for folder in self.folders:
            if len(folder) == depth + 1 and folder[:depth] == parent:
                names.append(folder[-1])
        return splitting.natural_order(names)

    def images_by_class(self, parent: PathParts) -> dict[str, list[PathParts]]:
        """Return class name -> its images, at any depth below `parent`/<class>."""
        depth = len(parent)
        groups: dict[str, list[PathParts]] = {}
        for path in self.images:
            if len(path) > depth + 1 and path[:depth] == parent:
                groups.setdefault(path[depth], []).append(path)
        return groups


def list_folder(root: Path, follow_links: bool) -> Listing:
    """Walk `root`, every folder once for each path to it; loops of links are cut.

    Args:
        root: the folder.
        follow_links: follow symbolic links that lead out of it, instead of listing them.

    Raises:
        DataError: a folder that cannot be listed.
    """
    listing = Listing()
    real_root = os.path.realpath(root)
    # A folder to visit, the folders above it by device and inode, and the links on the way.
    waiting: list[tuple[PathParts, frozenset[tuple[int, int]], int]] = [((), frozenset(), 0)]
    while waiting:
        parts, above, links = waiting.pop()
        folder = root.joinpath(*parts)
        try:
            status = folder.stat()
            with os.scandir(folder) as found:
                entries = [*found]
        except OSError as error:
            raise DataError(f"{escape(folder)}: cannot be listed: {error.strerror}") from error
        here = (status.st_dev, status.st_ino)  # the same folder under any name
        if here in above or links > MOST_LINKS:
            listing.looping_links += 1
            continue
        listing.folders.add(parts)
        for entry in entries:
            below = (*parts, entry.name)
            # a link to itself is no folder, and would raise
            is_folder = os.path.isdir(entry.path) if entry.is_symlink() else entry.is_dir()
            if splitting.is_hidden(entry.name):
                listing.hidden_folders += is_folder
            elif not is_folder and not entry.name.lower().endswith(IMAGE_ENDINGS):
                listing.others[os.path.splitext(entry.name)[1].lower() or "without an ending"] += 1
            # Nothing outside of the root is read unless the user allows it.
            elif entry.is_symlink() and not follow_links and _leaves(entry.path, real_root):
                listing.leaving_links.append(below)
            elif is_folder:
                waiting.append((below, above | {here}, links + entry.is_symlink()))
            else:
                listing.images.append(below)
    listing.images.sort()  # the order of a file system may change
    listing.leaving_links.sort()
    return listing


def count_by_kind(counts: Mapping[str, int]) -> str:
    """Return `"3 .txt, 1 .csv and 2 more"`: the most frequent kinds of files first."""
    most = Counter(counts).most_common(KINDS_SHOWN)
    shown = ", ".join(f"{count:,} {escape(kind)}" for kind, count in most)
    more = sum(counts.values()) - sum(count for _, count in most)
    if more:
        return f"{shown} and {more:,} more"
    return shown


def _leaves(link: str, real_root: str) -> bool:
    target = os.path.realpath(link)
    return target != real_root and not target.startswith(real_root.rstrip("/") + "/")


def refuse_run_folder(folder: Path) -> None:
    """Raise `DataError` for the folder of a run."""
    config = folder / "config.yaml"
    has_run = os.path.isdir(folder / "weights") or os.path.isdir(folder / "state")
    if not config.is_file() or not has_run or os.path.isdir(folder / "train"):
        return
    raise DataError(
        f"{escape(folder)} is the folder of a run, not data; name the data that it was trained on "
        f"({escape(config)}: data)"
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
    parents: dict[str, PathParts] = {split: (name,) for split, name in folders.items()}
    parents = parents or {splitting.POOL: ()}
    images: dict[str, dict[str, list[PathParts]]] = {}
    names: dict[str, tuple[str, ...]] = {}
    for split, parent in parents.items():
        images[split] = listing.images_by_class(parent)
        names[split] = listing.children(parent)
    training = next(iter(parents))
    classes = splitting.natural_order(set().union(*names.values()))
    if training in (splitting.POOL, "train"):
        classes = names[training]
    if training in (splitting.POOL, "train") or not any(images.values()):
        _refuse_too_few(root, parents[training], images[training])
    parts: dict[str, splitting.NamedImages] = {}
    for split, by_class in images.items():
        parts[split] = _part(root, by_class, classes)
        if not by_class:
            notes.append(f"{split} has no images and is left out")
    # Images beside the class folders, at the top or in a split's folder, have no class.
    read = {*folders.values()}
    stray = 0
    for path in listing.images:
        stray += len(path) == 1 or (len(path) == 2 and path[0] in read)
    if stray:
        notes.append(f"{plural(stray, 'image')} outside the class folders not read")
    opened = splitting.assemble(
        escape(root.resolve().name) or "data",
        escape(root),
        parts,
        classes=classes,
        ignore_extra_classes=ignore_extra_classes,
        notes=[*notes, *listing.notes()],
    )
    # Only a flat folder can be one level too high or too low: split folders are known by name.
    layout: Iterable[str] = [] if folders else _warnings_on_layout(classes, listing)
    return dataclasses.replace(opened, warnings=(*layout, *listing.warnings()))


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
    ordered = {split: known[split] for split in splitting.POOL_FRACTIONS if split in known}
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
    below = splitting.natural_order(common.pop())
    if len(below) < 2:
        return
    if any(name.casefold() in SPLIT_WORDS for name in below):
        problem = (
            "which are read as one; put the splits above the classes: train/<class>, test/<class>"
        )
    else:
        problem = "which may be the classes; the upper folders are read as classes"
    yield f"the folders {quote_list(classes)} all hold the folders {quote_list(below)}, {problem}"


def _refuse_too_few(
    root: Path, parent: PathParts, by_class: Mapping[str, Sequence[PathParts]]
) -> None:
    """Refuse fewer than two classes with images."""
    if len(by_class) > 1:
        return
    where, base, found = escape(root.joinpath(*parent)), escape(root), "images outside them"
    for name, images in by_class.items():
        found = f"only one class has images, {name!r}"
        # Several folders in the only class, or one called train: probably one level too high.
        inner = {path[len(parent) + 1] for path in images if len(path) > len(parent) + 2}
        if len(inner) > 1 or "train" in inner:
            found += f"; did you mean {where}/{escape(name)}?"
    raise DataError(
        f"{where}: expected class folders, {base}/train/<class>/*.jpg with val/ or test/ beside "
        f"train/, or {base}/<class>/*.jpg; {found}"
    )


def _contents_instead(listing: Listing) -> str:
    contents = "the folder is empty"
    if listing.others:
        contents = f"but {count_by_kind(listing.others)}"
    if ".tar" in listing.others:
        contents += " (tar shards are named as 'wds:FOLDER/*.tar')"
    return f"{contents}; expected files ending in {' '.join(IMAGE_ENDINGS)}"


def _part(
    root: Path, by_class: Mapping[str, Sequence[PathParts]], classes: Sequence[str]
) -> splitting.NamedImages:
    # Images are ordered by class, then as in the listing.
    paths: list[str] = []
    names: list[str] = []
    for name in dict.fromkeys([*classes, *by_class]):
        images = by_class.get(name, ())
        paths += [os.path.join(root, *image) for image in images]
        names += [name] * len(images)
    # The labels are numbered by `assemble`.
    split = FileSplit(paths, np.zeros(len(paths), np.int64), root)
    return splitting.NamedImages(split, names, [*map(bytes, pixel_cache.file_digests(paths))])
