"""Image folders: `train/<class>/**.jpg` with `val/` or `test/`, or `<class>/**.jpg`.

The folder is walked once into a `_Listing`; all else is decided from that, in an order that does
not depend on the file system's.
"""

from __future__ import annotations

import hashlib
import itertools
import os
import stat
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import numpy as np
from jaxtyping import Int64, UInt8

from vitkit.data.classes import (
    is_hidden,
    listed,
    natural_order,
    notes_on_classes,
    refuse_look_alikes,
    refuse_unknown,
    unknown,
)
from vitkit.data.images import printable
from vitkit.data.memory import Memory, file_keys
from vitkit.data.paths import Paths
from vitkit.data.splits import (
    POOL_FRACTIONS,
    SPLIT_WORDS,
    Dataset,
    FileSplit,
    Split,
    cut_pool,
    fingerprint,
)
from vitkit.errors import DataError, counted

ENDINGS = (".jpg", ".jpeg", ".png", ".webp", ".bmp", ".gif", ".tif", ".tiff")
# Links to folders are followed at most so deep: folders full of links to each other would
# otherwise be walked once for every order of visiting them.
MOST_LINKS = 2
DIGEST = np.dtype([("sha256", np.uint8, (32,))])
LEAST_REMEMBERED = 1000
"""Fewer files are hashed again in no time."""
GROUP = 256
"""Files that a thread hashes at once; handing over one costs more than hashing it."""

Parts = tuple[str, ...]
"""A path below the root, split at its separators."""
BETWEEN = "\0"
"""Stands between the parts of a path as text; it is in no name, and sorts before all others."""


@dataclass
class _Listing:
    """What lies below a root."""

    pictures: list[str] = field(default_factory=list)
    """Their paths, split at `BETWEEN`: as text they take a third of what `Parts` do."""
    folders: set[Parts] = field(default_factory=set)
    others: Counter[str] = field(default_factory=Counter)
    hidden_folders: int = 0
    looping_links: int = 0
    leaving_links: list[Parts] = field(default_factory=list)

    def paths(self) -> Iterator[Parts]:
        """The pictures' paths."""
        return (tuple(picture.split(BETWEEN)) for picture in self.pictures)

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
    """Open an image folder; no picture is decoded, every file is hashed.

    Args:
        root: the folder.
        ignore_extra_classes: leave out classes of val and test that train lacks.
        follow_links: follow symbolic links that lead out of the folder.

    Raises:
        DataError: no pictures, no class folders, one class only, unknown or ambiguous classes,
            links out of the folder, folders that cannot be listed.
    """
    listing = _list(root, follow_links)
    if listing.leaving_links:
        first = "/".join(listing.leaving_links[0])
        raise DataError(
            f"{printable(root)}: {len(listing.leaving_links)} symbolic links lead out of the "
            f"folder, the first is {printable(first)}; pass --follow-links to follow them"
        )
    if not listing.pictures:
        raise DataError(f"{printable(root)}: no pictures, {_found_instead(listing)}")
    folders, notes = _split_folders(root, listing)
    notes += _notes_on_listing(root, listing)
    if folders:
        return _open_split_folders(root, listing, folders, notes, ignore_extra_classes)
    return _open_flat(root, listing, notes)


def _list(root: Path, follow_links: bool) -> _Listing:
    """Walk `root`, every folder once for each way to it; loops end where they close."""
    listing, real_root = _Listing(), os.path.realpath(root)
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
                listing.others[os.path.splitext(entry.name)[1].lower() or entry.name] += 1
            elif entry.is_symlink() and not follow_links and _leaves(entry.path, real_root):
                listing.leaving_links.append(below)
            elif is_folder:
                waiting.append((below, above | {here}, links + entry.is_symlink()))
            else:
                listing.pictures.append(BETWEEN.join(below))
    listing.pictures.sort()
    listing.leaving_links.sort()
    return listing


def _entries(folder: Path) -> Iterator[os.DirEntry[str]]:
    try:
        with os.scandir(folder) as entries:
            yield from entries
    except OSError as error:
        raise _unlistable(folder, error) from error


def _unlistable(folder: Path, error: OSError) -> DataError:
    return DataError(f"{printable(folder)}: cannot be listed: {error.strerror}")


def _is_folder(entry: os.DirEntry[str]) -> bool:
    try:
        return entry.is_dir()
    except OSError:  # a link to itself
        return False


def _leaves(link: str, real_root: str) -> bool:
    target = os.path.realpath(link)
    return target != real_root and not target.startswith(real_root.rstrip("/") + "/")


def _split_folders(root: Path, listing: _Listing) -> tuple[dict[str, str], list[str]]:
    """Split name -> its folder; empty for a flat folder. It is split where there is a train folder,
    or nothing but split folders."""
    top = listing.children(())
    known: dict[str, str] = {}
    for folder in top:
        split = SPLIT_WORDS.get(folder.casefold())
        if split in known:
            raise DataError(
                f"{printable(root)}: both {known[split]!r} and {folder!r} could be {split}; "
                f"keep one of them"
            )
        if split:
            known[split] = folder
    if not known or ("train" not in known and len(known) < len(top)):
        return {}, []
    unused = [folder for folder in top if folder not in known.values()]
    note = f"folders beside {listed(known.values())} are not read: {listed(unused)}"
    return {s: known[s] for s in POOL_FRACTIONS if s in known}, [note] if unused else []


def _notes_on_listing(root: Path, listing: _Listing) -> list[str]:
    notes = []
    if listing.hidden_folders:
        notes.append(f"{counted(listing.hidden_folders, 'hidden folder')} skipped")
    if listing.looping_links:
        notes.append(f"{counted(listing.looping_links, 'link')} that loop or nest deeply skipped")
    return notes


def _notes_on_stray(outside: Iterable[bool]) -> list[str]:
    stray = sum(outside)
    return [f"{counted(stray, 'picture')} outside class folders not read"] if stray else []


def _name(root: Path) -> str:
    return printable(root.resolve().name) or "data"


def _open_split_folders(
    root: Path,
    listing: _Listing,
    folders: Mapping[str, str],
    notes: list[str],
    ignore_extra_classes: bool,
) -> Dataset:
    names = {split: listing.children((folder,)) for split, folder in folders.items()}
    found = {split: _by_class(listing, (folder,)) for split, folder in folders.items()}
    classes = natural_order({name for group in names.values() for name in group})
    refuse_look_alikes(classes, printable(root))
    if "train" in folders:
        classes = names["train"]
        _refuse_too_few(root, (folders["train"],), classes, found["train"])
    splits: dict[str, Split] = {}
    digests = {}
    for split, by_class in found.items():
        counts = {name: len(group) for name, group in by_class.items()}
        if not ignore_extra_classes:
            refuse_unknown(classes, counts, split, printable(root))
        elif extra := unknown(classes, counts):
            notes.append(f"{split} classes that train lacks are left out: {listed(extra)}")
        part = _file_split(root, by_class, classes)
        if not len(part):
            notes.append(f"{split} has no pictures and is left out")
            continue
        notes += notes_on_classes(split, classes, counts)
        splits[split] = part
        digests[split] = (part.labels, map(bytes, file_digests(part.paths)))
    if not splits:
        raise DataError(f"{printable(root)}: pictures in no class folder; {_expected(root)}")
    read = set(folders.values())
    notes += _notes_on_stray(
        len(path) == 1 or (len(path) == 2 and path[0] in read) for path in listing.paths()
    )
    return Dataset(_name(root), classes, splits, fingerprint(classes, digests), tuple(notes))


def _open_flat(root: Path, listing: _Listing, notes: list[str]) -> Dataset:
    classes, by_class = listing.children(()), _by_class(listing, ())
    refuse_look_alikes(classes, printable(root))
    _refuse_too_few(root, (), classes, by_class)
    counts = {name: len(group) for name, group in by_class.items()}
    notes += notes_on_classes("the data", classes, counts)
    notes += _notes_on_stray(len(path) == 1 for path in listing.paths())
    whole = _file_split(root, by_class, classes)
    digests = file_digests(whole.paths)
    splits = cut_pool(whole, map(bytes, digests))
    sizes = ", ".join(f"{len(split):,} {name}" for name, split in splits.items())
    notes.append(f"no train folder: split 70/10/20 by class and file hash, seed 0: {sizes}")
    for name in ("val", "test"):
        present = Counter(classes[label] for label in splits[name].labels)
        kept = {c: present[c] for c in classes if counts.get(c)}
        notes += notes_on_classes(name, tuple(kept), kept)
    return Dataset(
        _name(root),
        classes,
        {name: split for name, split in splits.items() if len(split)},
        fingerprint(classes, {"": (whole.labels, map(bytes, digests))}),
        tuple(notes),
        cut=True,
    )


def _by_class(listing: _Listing, parent: Parts) -> dict[str, list[str]]:
    """Class name -> its pictures, at any depth below `parent`/<class>."""
    depth = len(parent)
    groups: dict[str, list[str]] = {}
    for picture, path in zip(listing.pictures, listing.paths(), strict=True):
        if len(path) > depth + 1 and path[:depth] == parent:
            groups.setdefault(path[depth], []).append(picture)
    return groups


def _refuse_too_few(
    root: Path, parent: Parts, classes: Sequence[str], by_class: Mapping[str, Sequence[str]]
) -> None:
    """Refuse fewer than two classes with pictures."""
    where = printable(root.joinpath(*parent))
    filled = [name for name in classes if by_class.get(name)]
    if not filled:
        raise DataError(f"{where}: pictures in no class folder; {_expected(root)}")
    if len(filled) > 1:
        return
    depth = len(parent)
    paths = (picture.split(BETWEEN) for picture in by_class[filled[0]])
    inner = {path[depth + 1] for path in paths if len(path) > depth + 2}
    nested = len(inner) > 1 or "train" in inner
    hint = f"; did you mean {where}/{printable(filled[0])}?" if nested else ""
    raise DataError(f"{where}: only one class has pictures, {filled[0]!r}; expected two{hint}")


def _expected(root: Path) -> str:
    base = printable(root)
    return (
        f"expected {base}/train/<class>/*.jpg with val/ or test/ beside train/, "
        f"or {base}/<class>/*.jpg"
    )


def _found_instead(listing: _Listing) -> str:
    if not listing.others:
        return f"the folder is empty; expected files ending in {' '.join(ENDINGS)}"
    kinds = ", ".join(
        f"{count:,} {printable(kind)}" for kind, count in listing.others.most_common(5)
    )
    return f"but {kinds}; expected files ending in {' '.join(ENDINGS)}"


def _file_split(
    root: Path, by_class: Mapping[str, Sequence[str]], classes: Sequence[str]
) -> FileSplit:
    groups = [by_class.get(name, ()) for name in classes]
    labels = np.repeat(np.arange(len(groups)), [len(group) for group in groups])
    pictures = itertools.chain.from_iterable(groups)
    return FileSplit(Paths((p.replace(BETWEEN, os.sep) for p in pictures), root), labels, root)


def file_digests(paths: Paths) -> UInt8[np.ndarray, "N 32"]:
    """SHA-256 of every file, in order; of many files, those that are unchanged are remembered."""
    if len(paths) < LEAST_REMEMBERED:
        return _digests(paths, np.arange(len(paths)))
    memory = Memory("digests", os.path.realpath(os.path.commonpath((paths[0], paths[-1]))), DIGEST)
    keys = file_keys(paths.texts())
    rows, known = memory.recall(keys)
    new = np.flatnonzero(~known)
    groups = [new[start : start + GROUP] for start in range(0, len(new), GROUP)]
    with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:
        for group, digests in zip(groups, pool.map(partial(_digests, paths), groups), strict=True):
            rows["sha256"][group] = digests
    known[:] = True
    memory.save()
    return np.asarray(rows["sha256"])


def _digests(paths: Paths, places: Int64[np.ndarray, " M"]) -> UInt8[np.ndarray, "M 32"]:
    digests = b"".join(map(_digest, paths.take(places).texts()))
    return np.frombuffer(digests, np.uint8).reshape(-1, 32)


def _digest(path: str) -> bytes:
    """SHA-256 of a file; of nothing where it cannot be read, which decoding it will report."""
    try:
        if stat.S_ISREG(os.stat(path).st_mode):
            with open(path, "rb") as handle:
                return hashlib.file_digest(handle, "sha256").digest()
    except OSError:
        pass
    return hashlib.sha256().digest()
