"""Find images by what a user names: files, folders, patterns, addresses, lists and datasets."""

from __future__ import annotations

import fnmatch
import glob
import os
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence, Sized
from os import PathLike, fspath
from pathlib import Path
from typing import TypeAlias

import numpy as np
from PIL import Image

from vitkit.data.datasets.dataset import Dataset
from vitkit.data.images.integrity import IMAGE_ENDINGS
from vitkit.data.sources.csv_list import read_rows
from vitkit.data.sources.image_folder import count_by_kind, list_folder
from vitkit.data.sources.open import LISTS, open_dataset
from vitkit.errors import DataError, SettingError
from vitkit.io.download import is_web_address
from vitkit.messages import did_you_mean, escape, nearest_parent, plural
from vitkit.prediction.image_list import (
    Address,
    Files,
    ImageGroup,
    ImageList,
    Lines,
    UnusableFile,
    dataset_parts,
)
from vitkit.prediction.images import AnyImage, LineStream

Images: TypeAlias = str | PathLike[str] | Iterable[AnyImage]
"""Images, or one name to find them by: a path, a folder, a pattern or an address."""
STDIN = "-"
"""The name that stands for paths on the standard input, one per line."""


def find_images(
    *names: str | os.PathLike[str] | Dataset,
    split: str | None = None,
    data_root: str | os.PathLike[str] | None = None,
    stdin: int | None = None,
    missing_ok: bool = False,
) -> ImageList:
    """Find images; none is read yet.

    Args:
        *names: image files; folders, searched at any depth; patterns such as `photos/**/*.png`;
            http(s) addresses of images; datasets: a `.csv`, `.tsv` or `.parquet` file,
            `wds:SHARDS.tar`, `hf://owner/name`, a name such as `mnist`, or what
            `vitkit.open_dataset` returns. Images of a dataset have labels. A CSV needs no column
            of labels. The images of a name are in a fixed order.
        split: `train`, `val` or `test`: take this split of each dataset; a folder is opened as a
            dataset then. Default: all images.
        data_root: folder of the named datasets, or the folder that the paths of a CSV begin at.
        stdin: open file descriptor; the name `-` then stands for the paths and addresses that come
            from it, one per line.
        missing_ok: keep the names of image files that do not exist, and of files and folders
            without images, such as those that `photos/*` also matches, if there are others: reading
            one raises `ImageError`, as for a broken image.

    Returns:
        An iterable of images with `.name` and `.label`, whose `.total` is their number.

    Raises:
        DataError: no names, a list of them, an empty name, a name that nothing is found under, a
            folder or a pattern without images, a split that does not exist, or a dataset that
            cannot be opened.
    """
    if not names:
        raise DataError("no images given; name files, folders or a dataset")
    parts: list[ImageGroup] = []
    warnings: list[str] = []
    is_lenient = missing_ok and split is None and len(names) > 1
    missing = _missing_files(names) if is_lenient else set()
    other: list[DataError] = []
    for name in names:
        if isinstance(name, Dataset):
            parts += dataset_parts(name, split)
            continue
        text = _as_text(name)
        if text == STDIN and stdin is not None:
            parts.append(_read_lines(stdin, parts))
        elif is_web_address(text):
            parts.append(Address(text))
        # the usual case, without imports for the other kinds
        elif split is None and text.lower().endswith(IMAGE_ENDINGS) and os.path.isfile(text):
            parts.append(Files([text]))
        elif text in missing:
            parts.append(UnusableFile(text, "missing", "no such file"))
        else:
            errors = other if is_lenient and os.path.exists(text) else None
            parts += _find_many(name, split, data_root, warnings, errors)
    if other and all(isinstance(part, UnusableFile) for part in parts):
        raise other[0]
    return ImageList(parts, warnings)


def _as_text(name: str | os.PathLike[str]) -> str:
    """Return a name as text; raise `DataError` for an empty one, and for anything else."""
    if not isinstance(name, str | os.PathLike):
        raise DataError(
            f"a {type(name).__name__} is not a name; pass each name by itself, as in "
            "find_images(*names)"
        )
    if not os.fspath(name):  # the folder would be the working folder
        raise DataError("a name of images is empty; '.' is the working folder")
    return os.fspath(name)


def _missing_files(names: Sequence[str | os.PathLike[str] | Dataset]) -> set[str]:
    """Return the names of image files that do not exist; none if all names are such."""
    missing = [name for name in names if isinstance(name, str | os.PathLike) and _is_missing(name)]
    return {os.fspath(name) for name in missing} if len(missing) < len(names) else set()


def _is_missing(name: str | os.PathLike[str]) -> bool:
    text = os.fspath(name)
    # a missing folder or dataset may mean many images, and ends the search
    is_image = text.lower().endswith(IMAGE_ENDINGS) and "://" not in text
    return is_image and not (os.path.exists(text) or _is_pattern(text))


def _read_lines(descriptor: int, before: Sequence[ImageGroup]) -> Lines:
    if any(isinstance(part, Lines) for part in before):
        raise DataError("- (the standard input) is given twice; name it once")
    stream = LineStream(descriptor)
    if not stream.wait():
        raise DataError(
            "-: no paths came on the standard input; expected one per line, such as those of "
            "`find photos -name '*.jpg'`"
        )
    return Lines(stream)


def _find_many(
    name: str | os.PathLike[str],
    split: str | None,
    data_root: str | os.PathLike[str] | None,
    warnings: list[str],
    errors: list[DataError] | None,
) -> list[ImageGroup]:
    """Return the images of a dataset, or those of a file, a folder or a pattern.

    Args:
        name: name of the images.
        split: as for `find_images`.
        data_root: as for `find_images`.
        warnings: what is to be warned of is added to these.
        errors: where not None, a name without images is an unusable file, and its error is added.
    """
    try:
        return [*_open(name, split, data_root, warnings)]
    except DataError as error:
        if errors is None:
            raise
        errors.append(error)
        text = os.fspath(name)
        detail = str(error).removeprefix(f"{escape(text)}: ").removeprefix(_NO_IMAGE)
        return [UnusableFile(text, "not an image", detail)]


def _open(
    name: str | os.PathLike[str],
    split: str | None,
    data_root: str | os.PathLike[str] | None,
    warnings: list[str],
) -> Iterator[ImageGroup]:
    """Yield the images of a dataset, or those of a file, a folder or a pattern."""
    # imported here: a single image does not wait for the formats of datasets
    from vitkit.data.sources.open import NAMES, is_dataset

    text = os.fspath(name)
    if is_dataset(name) or (split is not None and os.path.isdir(text)):
        yield from _open_parts(name, split, data_root)
    elif split is not None:
        raise DataError.about(
            "split",
            split,
            f"{escape(text)} is not a dataset; name a folder, a .csv or .parquet file, or one of "
            f"{', '.join(NAMES)}",
        )
    else:
        yield _find_files(text, warnings, NAMES)


def _find_files(name: str, warnings: list[str], datasets: Sequence[str]) -> Files:
    """Return the images of a file, a folder or a pattern, and add what is to be warned of."""
    path = Path(name)
    if os.path.isdir(path):
        # every link is followed, as the user named the folder
        listing = list_folder(path, follow_links=True)
        warnings += (f"{escape(path)}: {warning}" for warning in listing.warnings())
        if not listing.images:
            raise DataError(f"{escape(path)}: no images in this folder; {_EXPECTED}")
        return Files([os.path.join(path, *parts) for parts in listing.paths()], path)
    if os.path.exists(path):
        if path.suffix.lower() in _HINTS:
            hint = _HINTS[path.suffix.lower()].format(escape(name))
            raise DataError(f"{escape(name)}: {_NO_IMAGE}{hint}")
        return Files([name])  # a named file needs no image extension
    if _is_pattern(name):
        files = _match_files(name)
        folder = _literal_folder(name)
        if not files:
            raise DataError(f"{escape(name)}: no image matches; {_contents(folder)}")
        return Files(files, folder)
    if "://" in name:
        raise DataError(
            f"{escape(name)}: expected an http:// or https:// address of an image, or a path"
        )
    if os.path.islink(path):
        place = escape(os.readlink(path))
        raise DataError(f"{escape(name)}: no such image; this link leads to {place}, which is gone")
    near = did_you_mean(name, datasets)
    raise DataError(f"{escape(name)}: no such image{near}; {nearest_parent(path)}")


_NO_IMAGE = "not an image; "
_HINTS = {
    ".tar": "open shards as wds:{}",
    ".txt": "if it is a list of paths, one per line, pass - and send the file: - < {}",
}
"""Ending of a file -> what to write instead of its name."""
_EXPECTED = f"expected files ending in {', '.join(IMAGE_ENDINGS)}"


def _contents(folder: Path) -> str:
    """Describe the contents of a folder that a pattern may refer to."""
    if not os.path.isdir(folder):
        return nearest_parent(folder)
    try:
        entries = [*folder.iterdir()]
    except PermissionError:  # then no file in it matched
        return f"the folder {escape(folder)} cannot be listed"
    files = Counter(entry.suffix.lower() for entry in entries if not entry.is_dir())
    if files:
        return f"the folder {escape(folder)} has {count_by_kind(files)}; {_EXPECTED}"
    if entries:
        return f"the folder {escape(folder)} has {plural(len(entries), 'folder')} and no files"
    return f"the folder {escape(folder)} is empty"


def as_list(images: Images) -> Iterable[AnyImage]:
    """Return several images as they are; find those of one path, pattern or address.

    Raises:
        SettingError: one image, such as an array, which could be taken for a list of rows.
    """
    if isinstance(images, str | PathLike):
        return find_images(fspath(images))
    if isinstance(images, bytes | Image.Image | np.ndarray) or not isinstance(images, Iterable):
        raise SettingError(
            f"expected a list of images, got one {type(images).__name__}; write [image]"
        )
    return images


def count_images(images: Iterable[AnyImage]) -> int | None:
    """Return the number of images of a list, or None for a stream, whose end is not known."""
    if isinstance(images, ImageList):
        return images.total
    return len(images) if isinstance(images, Sized) else None


# Glob patterns such as `photos/**/*.png`, which reach us if they are quoted in the shell.

ANY_FOLDERS = "**"


def _is_pattern(text: str) -> bool:
    """Return True for a text with `*`, `?` or `[`.

    >>> _is_pattern("photos/*.png"), _is_pattern("photos/a.png")
    (True, False)
    """
    return glob.has_magic(text)


def _match_files(pattern: str) -> list[str]:
    """Return the images that match a pattern, sorted, each once."""
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
            if _matches(path, rest):
                found.add(os.path.join(folder, *path) if at else os.path.join(*path))
    return sorted(found)


def _literal_folder(pattern: str) -> Path:
    """Return the folders at the beginning of a pattern that have no wildcard.

    >>> _literal_folder("photos/2024/*/a.png").as_posix()
    'photos/2024'
    """
    folder = Path()
    for part in Path(pattern).parts[:-1]:
        if _is_pattern(part):
            break
        folder /= part
    return folder


def _matches(path: Sequence[str], pattern: Sequence[str]) -> bool:
    """Return True if the parts of a path match those of a pattern, `**` any number of them.

    A pattern that ends in `**` matches all files below.

    >>> _matches(("a", "b", "1.png"), ("**", "*.png")), _matches(("1.png",), ("**", "a", "*"))
    (True, False)
    """
    if not pattern:
        return not path
    first, *rest = pattern
    if first == ANY_FOLDERS:
        if not rest:
            return True
        return any(_matches(path[skipped:], rest) for skipped in range(len(path)))
    return bool(path) and fnmatch.fnmatchcase(path[0], first) and _matches(path[1:], rest)


def _images_of(names: Sequence[str]) -> Iterator[str]:
    """Yield files with the ending of an image, and the images in folders."""
    for name in names:
        if os.path.isdir(name):
            for path in list_folder(Path(name), follow_links=True).paths():
                yield os.path.join(name, *path)
        elif name.lower().endswith(IMAGE_ENDINGS):
            yield name


# The images of datasets with their labels, in the order of their source.


def _open_parts(
    name: str | os.PathLike[str], split: str | None, data_root: str | os.PathLike[str] | None
) -> Iterator[ImageGroup]:
    """Yield the splits of a dataset, or one of them."""
    path = Path(name)
    is_list = path.suffix.lower() in LISTS and path.is_file()
    # a list is read as it stands: in its order, also without labels or with a single class
    if is_list and split is None:
        yield _open_list(path, path.parent if data_root is None else Path(data_root))
        return
    dataset = open_dataset(name, data_root=data_root, follow_links=True)
    yield from dataset_parts(dataset, split, path)


def _open_list(path: Path, root: Path) -> Files:
    rows = read_rows(path, root, follow_links=True, needs_labels=False)
    if not rows:
        raise DataError(f"{escape(path)}: no images")
    paths: list[str] = []
    labels: list[str] = []
    splits: list[str] = []
    for row in rows:
        # equal texts become one object: a long list has few classes
        paths.append(os.path.join(root, row.path))
        labels.append(sys.intern(row.label))
        splits.append(sys.intern(row.split))
    return Files(paths, root, labels, splits, path)
