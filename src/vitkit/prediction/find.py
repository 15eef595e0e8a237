"""Find images by what a user names: files, folders, patterns, addresses, lists and datasets."""

from __future__ import annotations

import fnmatch
import glob
import os
import sys
from collections.abc import Iterable, Iterator, Sequence
from os import PathLike, fspath
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

import numpy as np
from PIL import Image

from vitkit.data.images.integrity import IMAGE_ENDINGS
from vitkit.errors import DataError, ImageError, ImageReason, SettingError
from vitkit.io.download import is_web_address
from vitkit.messages import did_you_mean, escape, nearest_parent
from vitkit.prediction.images import (
    AnyImage,
    ImageGroup,
    ImageList,
    dataset_groups,
    files_group,
    named_group,
    unusable_group,
)

if TYPE_CHECKING:
    from vitkit.data.datasets.dataset import Dataset

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
        stdin: open file descriptor; the name `-` then stands for the paths and addresses that are
            read from it, one per line, or separated by zero bytes as by `find -print0`.
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
    groups: list[ImageGroup] = []
    warnings: list[str] = []
    errors: list[DataError] = []
    for name in names:
        if not isinstance(name, str | os.PathLike):
            groups += dataset_groups(_as_dataset(name), split)
            continue
        text = os.fspath(name)
        if not text:  # the folder would be the working folder
            raise DataError("a name of images is empty; '.' is the working folder")
        if text == STDIN and stdin is not None:
            groups.append(named_group(_read_lines(stdin)))
            continue
        try:
            groups += _find(text, split, data_root, warnings)
        except DataError as error:
            # a missing folder or dataset may mean many images, and ends the search
            is_image = text.lower().endswith(IMAGE_ENDINGS) and "://" not in text
            is_one = os.path.exists(text) or (is_image and not glob.has_magic(text))
            if not (missing_ok and split is None and len(names) > 1 and is_one):
                raise
            errors.append(error)
            reason: ImageReason = "not an image" if os.path.exists(text) else "missing"
            detail = str(error).removeprefix(f"{escape(text)}: ").removeprefix(f"{reason}; ")
            groups.append(unusable_group(ImageError(text, reason, detail)))
    if errors and len(errors) == len(names):
        raise errors[0]
    return ImageList(groups, warnings)


def _as_dataset(name: object) -> Dataset:
    from vitkit.data.datasets.dataset import Dataset

    if not isinstance(name, Dataset):
        raise DataError(
            f"a {type(name).__name__} is not a name; pass each name by itself, as in "
            "find_images(*names)"
        )
    return name


def _read_lines(descriptor: int) -> list[str]:
    with open(descriptor, "rb", closefd=False) as stream:
        content = stream.read()
    # a name may have a line break, but no zero byte
    lines = content.split(b"\0" if b"\0" in content else b"\n")
    names = [os.fsdecode(line.removesuffix(b"\r")) for line in lines if line.strip()]
    if not names:
        raise DataError(
            "-: no paths came on the standard input; expected one per line, such as those of "
            "`find photos -name '*.jpg'`"
        )
    return names


def _find(
    name: str, split: str | None, data_root: str | os.PathLike[str] | None, warnings: list[str]
) -> Iterator[ImageGroup]:
    """Yield the images of a name; add what is to be warned of to `warnings`."""
    if is_web_address(name):
        yield named_group([name])
        return
    # the usual case, without imports for the other kinds
    if split is None and name.lower().endswith(IMAGE_ENDINGS) and os.path.isfile(name):
        yield files_group([name])
        return
    from vitkit.data.sources.open import LISTS, NAMES, is_dataset, open_dataset

    path = Path(name)
    if is_dataset(name) or (split is not None and os.path.isdir(name)):
        # a list is read as it stands: in its order, also without labels or with a single class
        if split is None and path.suffix.lower() in LISTS and path.is_file():
            yield _list_group(path, path.parent if data_root is None else Path(data_root))
        else:
            dataset = open_dataset(name, data_root=data_root, follow_links=True)
            yield from dataset_groups(dataset, split, path)
    elif split is not None:
        raise DataError.about(
            "split",
            split,
            f"{escape(name)} is not a dataset; name a folder, a .csv or .parquet file, or one of "
            f"{', '.join(NAMES)}",
        )
    else:
        yield _find_files(name, warnings, NAMES)


def _list_group(path: Path, root: Path) -> ImageGroup:
    """Return the images of a CSV or TSV file."""
    from vitkit.data.sources.csv_list import read_rows

    rows = read_rows(path, root, follow_links=True, needs_labels=False)
    if not rows:
        raise DataError(f"{escape(path)}: no images")
    paths = [os.path.join(root, row.path) for row in rows]
    # equal texts become one object: a long list has few classes
    labels = [sys.intern(row.label) for row in rows]
    splits = [sys.intern(row.split) for row in rows]
    return files_group(paths, root, labels, splits, path)


def _find_files(name: str, warnings: list[str], datasets: Sequence[str]) -> ImageGroup:
    """Return the images of a file, a folder or a pattern, and add what is to be warned of."""
    from vitkit.data.sources.image_folder import list_folder

    path = Path(name)
    if os.path.isdir(path):
        # every link is followed, as the user named the folder
        listing = list_folder(path, follow_links=True)
        warnings += (f"{escape(path)}: {warning}" for warning in listing.warnings())
        if listing.images:
            return files_group([os.path.join(path, *parts) for parts in listing.images], path)
        problem = f"no images in this folder; {_EXPECTED}"
    elif os.path.exists(path):
        if path.suffix.lower() not in _HINTS:
            return files_group([name])  # a named file needs no image extension
        problem = f"not an image; {_HINTS[path.suffix.lower()].format(escape(name))}"
    elif glob.has_magic(name):
        files = _match_files(name)
        if files:
            return files_group(files, Path(os.path.commonpath(map(os.path.dirname, files))))
        problem = f"no image matches; {_EXPECTED}; {nearest_parent(path)}"
    elif "://" in name:
        problem = "expected an http:// or https:// address of an image, or a path"
    else:
        problem = f"no such image{did_you_mean(name, datasets)}; {nearest_parent(path)}"
    raise DataError(f"{escape(name)}: {problem}")


_HINTS = {
    ".tar": "open shards as wds:{}",
    ".txt": "if it is a list of paths, one per line, pass - and send the file: - < {}",
}
"""Ending of a file -> what to write instead of its name."""
_EXPECTED = f"expected files ending in {', '.join(IMAGE_ENDINGS)}"


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


# Glob patterns such as `photos/**/*.png`, which reach us if they are quoted in the shell.

ANY_FOLDERS = "**"


def _match_files(pattern: str) -> list[str]:
    """Return the images that match a pattern, sorted, each once."""
    from vitkit.data.sources.image_folder import list_folder
    from vitkit.data.sources.shards import literal_folder

    literal, wild = literal_folder(pattern)
    pattern = str(Path(glob.escape(str(literal)), wild))
    parts = Path(pattern).parts
    if ANY_FOLDERS not in parts:
        found = {name for name in glob.glob(pattern) if name.lower().endswith(IMAGE_ENDINGS)}
        for folder in filter(os.path.isdir, glob.glob(pattern)):
            for path in list_folder(Path(folder), follow_links=True).images:
                found.add(os.path.join(folder, *path))
        return sorted(name for name in found if not os.path.isdir(name))
    at = parts.index(ANY_FOLDERS)
    start, rest = Path(*parts[:at]), parts[at:]
    found = set()
    # folders before the stars may have wildcards, too
    for folder in filter(os.path.isdir, glob.glob(str(start)) if at else ["."]):
        # the listing follows links and ends where they lead in circles, which `glob` does not
        for path in list_folder(Path(folder), follow_links=True).images:
            if _matches(path, rest):
                found.add(os.path.join(folder, *path) if at else os.path.join(*path))
    return sorted(found)


def _matches(path: Sequence[str], pattern: Sequence[str]) -> bool:
    """Return True if the parts of a path match those of a pattern, `**` any number of them.

    A pattern that ends in `**` matches all files below.
    """
    if pattern[:1] == (ANY_FOLDERS,):
        if not pattern[1:]:
            return True
        return any(_matches(path[skipped:], pattern[1:]) for skipped in range(len(path)))
    if not pattern or not path:
        return not pattern and not path
    return fnmatch.fnmatchcase(path[0], pattern[0]) and _matches(path[1:], pattern[1:])
