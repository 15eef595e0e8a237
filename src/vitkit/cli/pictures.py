"""Which pictures the arguments of a command mean."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

from vitkit.data.classes import is_hidden
from vitkit.data.folders import ENDINGS
from vitkit.errors import DataError, nearest_parent


def find_pictures(arguments: Iterable[str]) -> list[Path]:
    """Files as they are, folders as the pictures in them, sorted.

    Raises:
        DataError: nothing named, a path that is not there, or a folder without pictures.
    """
    found: list[Path] = []
    for argument in arguments:
        path = Path(argument)
        if not os.path.exists(path):
            raise DataError(f"{path}: no such picture; {nearest_parent(path)}")
        if not os.path.isdir(path):
            found.append(path)
            continue
        inside = sorted(p for p in path.rglob("*") if _is_picture(p, path))
        if not inside:
            raise DataError(f"{path}: no pictures in this folder ({', '.join(ENDINGS)})")
        found += inside
    if not found:
        raise DataError("no pictures were named; give files or folders")
    return found


def _is_picture(path: Path, root: Path) -> bool:
    """A file named like a picture, neither hidden itself nor in a hidden folder below `root`."""
    hidden = any(is_hidden(part) for part in path.relative_to(root).parts)
    return not hidden and path.suffix.lower() in ENDINGS and path.is_file()
