"""The images of datasets with their labels, in the order of their source."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

from vitkit.data.sources.csv_list import read_rows
from vitkit.data.sources.open import LISTS, open_dataset
from vitkit.errors import DataError
from vitkit.messages import escape
from vitkit.prediction.image_list import Files, ImageGroup, dataset_parts


def open_parts(
    name: str | os.PathLike[str], split: str | None, data_root: str | os.PathLike[str] | None
) -> Iterator[ImageGroup]:
    """Yield the splits of a dataset, or one of them.

    Args:
        name: name of the dataset, its address or its path.
        split: the split; all where None.
        data_root: as for `open_dataset`.

    Raises:
        DataError: a split that does not exist, or a dataset that cannot be opened.
    """
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
