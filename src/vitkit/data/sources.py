"""Open a data set by its name or its folder: the door of this room."""

from __future__ import annotations

import os
from pathlib import Path

from vitkit.data.embedded import IDX_CLASSES, idx_places, open_digits, open_idx
from vitkit.data.folders import open_folder
from vitkit.data.images import printable
from vitkit.data.splits import (
    ArraySplit,
    Dataset,
    FileSplit,
    Split,
    stratified_split,
    with_validation,
)
from vitkit.errors import DataError, did_you_mean, nearest_parent

__all__ = [
    "ArraySplit",
    "Dataset",
    "FileSplit",
    "Split",
    "open_dataset",
    "stratified_split",
    "with_validation",
]

NAMES = ("digits", *IDX_CLASSES)


def open_dataset(
    data: str | os.PathLike[str],
    *,
    data_root: str | os.PathLike[str] | None = None,
    ignore_extra_classes: bool = False,
    follow_links: bool = False,
) -> Dataset:
    """Open a data set without decoding its pictures; `doctor.sound` does that.

    Args:
        data: "digits", "mnist", "fashion-mnist", or an image folder: `train/<class>/**.jpg` with
            `val/` or `test/`, or `<class>/**.jpg`, which is split 70/10/20. A known name wins over
            a folder of that name, which is `./digits` then.
        data_root: where the files of "mnist" and "fashion-mnist" are looked for first.
        ignore_extra_classes: leave out classes of val and test that train lacks.
        follow_links: follow symbolic links that lead out of the folder.

    Raises:
        DataError: nothing of that name, or a data set that cannot be trained on.
    """
    if data == "digits":
        return open_digits()
    if isinstance(data, str) and data in IDX_CLASSES:
        root = None if data_root is None else Path(data_root).expanduser()
        return open_idx(data, idx_places(data, root))
    try:
        path = Path(data).expanduser()
    except RuntimeError:  # ~nobody
        path = Path(data)
    if os.path.isdir(path):
        return open_folder(
            path, ignore_extra_classes=ignore_extra_classes, follow_links=follow_links
        )
    name, known = printable(data), ", ".join(NAMES)
    if os.path.exists(path):
        raise DataError(f"{name} is not a folder; expected an image folder or one of {known}")
    near = did_you_mean(name, NAMES)
    where = near if near else f"; {nearest_parent(path)}"
    raise DataError(f"{name}: no such folder, and no data set of that name ({known}){where}")
