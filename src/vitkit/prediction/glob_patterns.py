"""Glob patterns such as `photos/**/*.png`, which reach us if they are quoted in the shell."""

from __future__ import annotations

import fnmatch
import glob
import os
from collections.abc import Iterator, Sequence
from pathlib import Path

from vitkit.data.images.file_types import IMAGE_ENDINGS
from vitkit.data.sources.folder_listing import list_folder

ANY_FOLDERS = "**"


def is_pattern(text: str) -> bool:
    """Return True for a text with `*`, `?` or `[`.

    >>> is_pattern("photos/*.png"), is_pattern("photos/a.png")
    (True, False)
    """
    return glob.has_magic(text)


def match_files(pattern: str) -> list[str]:
    """Return the images that match a pattern, sorted, each once.

    `**` stands for any number of folders; hidden files and folders are left out. A folder that
    matches a pattern without `**` stands for all images in it, as it does in a shell.

    Args:
        pattern: a path with wildcards.

    Raises:
        DataError: a folder that cannot be listed.
    """
    parts = Path(pattern).parts
    if ANY_FOLDERS not in parts:
        return sorted(_images_of(glob.glob(pattern)))
    at = parts.index(ANY_FOLDERS)
    start, rest = Path(*parts[:at]), parts[at:]
    found: set[str] = set()
    # folders before the stars may have wildcards, too
    for folder in filter(os.path.isdir, glob.glob(str(start)) if at else ["."]):
        # the listing follows links and ends where they lead in circles, which `glob` does not
        for path in list_folder(Path(folder), follow_links=True).paths():
            if matches(path, rest):
                found.add(os.path.join(folder, *path) if at else os.path.join(*path))
    return sorted(found)


def literal_folder(pattern: str) -> Path:
    """Return the folders at the beginning of a pattern that have no wildcard.

    >>> literal_folder("photos/2024/*/a.png").as_posix()
    'photos/2024'
    """
    folder = Path()
    for part in Path(pattern).parts[:-1]:
        if is_pattern(part):
            break
        folder /= part
    return folder


def matches(path: Sequence[str], pattern: Sequence[str]) -> bool:
    """Return True if the parts of a path match those of a pattern, `**` any number of them.

    A pattern that ends in `**` matches all files below.

    >>> matches(("a", "b", "1.png"), ("**", "*.png")), matches(("1.png",), ("**", "a", "*"))
    (True, False)
    """
    if not pattern:
        return not path
    first, *rest = pattern
    if first == ANY_FOLDERS:
        if not rest:
            return True
        return any(matches(path[skipped:], rest) for skipped in range(len(path)))
    return bool(path) and fnmatch.fnmatchcase(path[0], first) and matches(path[1:], rest)


def _images_of(names: Sequence[str]) -> Iterator[str]:
    """Yield files with the ending of an image, and the images in folders."""
    for name in names:
        if os.path.isdir(name):
            for path in list_folder(Path(name), follow_links=True).paths():
                yield os.path.join(name, *path)
        elif name.lower().endswith(IMAGE_ENDINGS):
            yield name
