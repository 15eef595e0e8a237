"""A list of all files below a folder, in an order that does not depend on the file system."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator, Mapping, Set
from dataclasses import dataclass, field
from pathlib import Path

from vitkit.data.datasets.class_names import is_hidden, natural_order
from vitkit.data.images.file_types import IMAGE_ENDINGS
from vitkit.errors import DataError
from vitkit.messages import escape, plural

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
PART_SEPARATOR = "\0"
"""Separator of the parts of a path; no name contains it, and it sorts before all others."""


@dataclass
class Listing:
    """The files and folders below a root."""

    images: list[str] = field(default_factory=list)
    """Paths, joined by `PART_SEPARATOR`: as text they take a third of the memory of `PathParts`."""
    folders: set[PathParts] = field(default_factory=set)
    others: Counter[str] = field(default_factory=Counter)
    """Number of other files by their ending."""
    hidden_folders: int = 0
    looping_links: int = 0
    leaving_links: list[PathParts] = field(default_factory=list)
    """Symbolic links that lead out of the root."""

    def paths(self) -> Iterator[PathParts]:
        """Iterate over the images' paths."""
        return (tuple(image.split(PART_SEPARATOR)) for image in self.images)

    def warnings(self) -> tuple[str, ...]:
        """Return a line about files that may hold images but are not read, if there are any."""
        unread = _select_kinds(self.others, UNREAD_IMAGES & set(self.others))
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
        others = _select_kinds(self.others, set(self.others) - UNREAD_IMAGES)
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
        return natural_order(names)

    def images_by_class(self, parent: PathParts) -> dict[str, list[str]]:
        """Return class name -> its images, at any depth below `parent`/<class>."""
        depth = len(parent)
        groups: dict[str, list[str]] = {}
        for image, path in zip(self.images, self.paths(), strict=True):
            if len(path) > depth + 1 and path[:depth] == parent:
                groups.setdefault(path[depth], []).append(image)
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
        except OSError as error:
            raise _unlistable(folder, error) from error
        here = (status.st_dev, status.st_ino)  # the same folder under any name
        if here in above or links > MOST_LINKS:
            listing.looping_links += 1
            continue
        listing.folders.add(parts)
        for entry in _entries(folder):
            below = (*parts, entry.name)
            is_folder = _is_folder(entry)
            if is_hidden(entry.name):
                listing.hidden_folders += is_folder
            elif not is_folder and not entry.name.lower().endswith(IMAGE_ENDINGS):
                listing.others[os.path.splitext(entry.name)[1].lower() or "without an ending"] += 1
            # Nothing outside of the root is read unless the user allows it.
            elif entry.is_symlink() and not follow_links and _leaves(entry.path, real_root):
                listing.leaving_links.append(below)
            elif is_folder:
                waiting.append((below, above | {here}, links + entry.is_symlink()))
            else:
                listing.images.append(PART_SEPARATOR.join(below))
    listing.images.sort()  # the order of a file system may change
    listing.leaving_links.sort()
    return listing


def count_by_kind(counts: Mapping[str, int]) -> str:
    """Return `"3 .txt, 1 .csv and 2 more"`: the most frequent kinds of files first."""
    most = Counter(counts).most_common(KINDS_SHOWN)
    shown = ", ".join(f"{count:,} {escape(kind)}" for kind, count in most)
    more = sum(counts.values()) - sum(count for _, count in most)
    return f"{shown} and {more:,} more" if more else shown


def _select_kinds(counts: Mapping[str, int], kinds: Set[str]) -> dict[str, int]:
    return {kind: count for kind, count in counts.items() if kind in kinds}


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


def refuse_run_folder(folder: Path) -> None:
    """Raise `DataError` for the folder of a run, naming the data that it was trained on."""
    config = folder / "config.yaml"
    if not config.is_file() or os.path.isdir(folder / "train"):
        return
    if not any(os.path.isdir(folder / part) for part in ("weights", "state")):
        return
    raise DataError(
        f"{escape(folder)} is the folder of a run, not data; name the data{_trained_on(config)}"
    )


def _trained_on(config: Path) -> str:
    """Return the data of a run for a message; empty where its settings do not say so."""
    try:
        lines = config.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError):
        return ""
    # not parsed: a run may have a damaged config.yaml
    for line in lines:
        name, _, value = line.partition(": ")
        if name == "data" and value.strip():
            return f": this run was trained on {escape(value.strip())}"
    return ""
