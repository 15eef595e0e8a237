"""Open a dataset by its name, its address or its files."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeAlias

from vitkit.data.datasets.dataset import Dataset
from vitkit.data.sources.benchmarks import (
    CIFAR_CLASSES,
    IDX_CLASSES,
    known_folders,
    open_cifar,
    open_digits,
    open_idx,
)
from vitkit.data.sources.csv_list import open_csv
from vitkit.data.sources.huggingface import (
    HUB_PREFIX,
    PARQUET_ENDING,
    Tables,
    is_saved,
    load_hub,
    load_parquet,
    load_saved,
    parquet_files,
)
from vitkit.data.sources.image_folder import open_folder
from vitkit.data.sources.objects import MapStyle, ObjectData, read_object
from vitkit.data.sources.shards import WEBDATASET_PREFIX, open_webdataset
from vitkit.errors import DataError
from vitkit.io.results import GIVEN, MEMORY_PREFIX, given
from vitkit.messages import did_you_mean, escape, nearest_parent

NAMES = ("digits", *IDX_CLASSES, *CIFAR_CLASSES)
ADDRESSES = (HUB_PREFIX, WEBDATASET_PREFIX)
LISTS = (".csv", ".tsv")

DataObject: TypeAlias = MapStyle | Sequence[Any] | tuple[Any, Any]
"""A dataset as an object: map-style, a list of pairs, or arrays of images and labels."""
DataSource: TypeAlias = str | os.PathLike[str] | Dataset | DataObject | Mapping[str, DataObject]
"""Everything that `open_dataset` opens."""


@contextmanager
def kept_data(data: DataSource | None) -> Iterator[str | None]:
    """Keep a dataset that is an object while the block runs; yields what stands for it in settings.

    A path or a name stands for itself; None without data.

    Raises:
        DataError: an object that is no dataset, or items that cannot be used, by index.
    """
    if data is None:
        yield None
    elif isinstance(data, str | os.PathLike):
        yield os.fspath(data)
    else:
        read = data if isinstance(data, Dataset) else read_object(data)
        if isinstance(read, Dataset):
            address = f"{MEMORY_PREFIX}{read.name}-{read.fingerprint[:8]}"
        else:
            address = read.address
        with given({address: read}):
            yield address


def open_dataset(
    data: DataSource,
    *,
    classes: Sequence[str] = (),
    data_root: str | os.PathLike[str] | None = None,
    ignore_extra_classes: bool = False,
    follow_links: bool = False,
) -> Dataset:
    """Open a dataset: its class names and its splits, `.classes` and `.splits`.

    The images in files are not decoded here; every item of a dataset object is read once, for its
    label and a digest of its pixels.

    >>> import numpy as np
    >>> images, labels = np.eye(20, 64, dtype=np.uint8).reshape(20, 8, 8), np.arange(20) % 2
    >>> dataset = open_dataset((images, labels), classes=["cat", "dog"])
    >>> {name: len(split) for name, split in dataset.splits.items()}
    {'train': 14, 'val': 2, 'test': 4}

    Args:
        data: one of

            - "digits", "mnist", "fashion-mnist", "cifar10", "cifar100";
            - an image folder: `train/<class>/**.jpg` with `val/` or `test/`, or `<class>/**.jpg`,
              which is split 70/10/20;
            - a CSV with the columns `path,label` and perhaps `split`;
            - a Parquet file, or a folder with such files at its top or in `data/`;
            - a folder that `Dataset.save_to_disk` of `datasets` wrote;
            - "wds:shards-{0000..0099}.tar", WebDataset shards, local or at an https address;
            - "hf://owner/name", a dataset of the Hugging Face Hub;
            - (images, labels): arrays (N, H, W) or (N, H, W, C), or tensors (N, C, H, W), uint8
              [0, 255] or float [0, 1], and N class numbers or names;
            - a list of (path, label) or (image, label), or a map-style `torch.utils.data.Dataset`
              of (image, label): a PIL image, an array or a tensor, without random changes;
            - a `datasets.Dataset` with a column of images and one of labels;
            - a dict of these, {"train": ..., "val": ..., "test": ...}; or an opened dataset.

            Images in no split are divided 70/10/20. A folder with a known name is `./digits`.
        classes: names of the class numbers of a dataset object, such as ["cat", "dog"]; those of
            the object itself (its `classes`, or its features) where absent.
        data_root: the folder where the files of named datasets are looked for first; for a CSV the
            folder that its paths begin at, its own where absent.
        ignore_extra_classes: leave out classes of val and test that train lacks.
        follow_links: follow symbolic links that lead out of the folder.

    Raises:
        DataError: nothing of that name, or unusable data; an unusable item is named by its index.
        MissingExtraError: a Parquet file or a set of the Hub, without `vitkit[hub]`.
    """
    if not isinstance(data, str | os.PathLike | Dataset):
        return read_object(data, classes).open(ignore_extra_classes)
    if classes:
        raise DataError("classes are for data passed as an object; all others have their own")
    if isinstance(data, Dataset):
        return data
    if isinstance(data, str) and data.startswith(MEMORY_PREFIX):
        if data not in GIVEN:
            raise DataError(
                f"{data} stands for data that were passed from Python and are not stored; pass the "
                "same object again: vitkit.train(data, resume=RUN), vitkit.evaluate(RUN, data)"
            )
        found: Dataset | ObjectData = GIVEN[data]
        if isinstance(found, ObjectData):
            return found.open(ignore_extra_classes)
        return found
    # `Path.expanduser` raises for an unknown user.
    root = None if data_root is None else Path(os.path.expanduser(data_root))
    # Names and addresses are text; a `Path` is always a path.
    if isinstance(data, str) and (data in NAMES or data.startswith(ADDRESSES)):
        return _open_known(data, root, ignore_extra_classes)
    return _open_path(data, root, follow_links, ignore_extra_classes)


def _open_known(data: str, root: Path | None, ignore_extra_classes: bool) -> Dataset:
    """Open a dataset by its name or its address."""
    if data.startswith(HUB_PREFIX):
        return _open_tables(load_hub(data), ignore_extra_classes)
    if data.startswith(WEBDATASET_PREFIX):
        return open_webdataset(data, ignore_extra_classes=ignore_extra_classes)
    if data in CIFAR_CLASSES:
        return open_cifar(data, known_folders(data, root))
    if data in IDX_CLASSES:
        return open_idx(data, known_folders(data, root))
    return open_digits()


def _open_tables(tables: Tables, ignore_extra_classes: bool) -> Dataset:
    return read_object(tables).open(ignore_extra_classes, where=tables.where)


def is_dataset(data: str | os.PathLike[str]) -> bool:
    """Return True for a name, an address or a file of a dataset, and a folder of its files.

    A folder of images is left to the caller: it may be a dataset or not.
    """
    path = Path(data)
    if isinstance(data, str) and (data in NAMES or data.startswith(ADDRESSES)):
        return True
    if os.path.isdir(path):
        return bool(parquet_files(path)) or is_saved(path)
    return path.suffix.lower() in (*LISTS, PARQUET_ENDING)


def _open_path(
    data: str | os.PathLike[str],
    root: Path | None,
    follow_links: bool,
    ignore_extra_classes: bool,
) -> Dataset:
    """Open a file or a folder by its ending and its contents."""
    path, name = Path(os.path.expanduser(data)), escape(data) or "''"
    ending = path.suffix.lower()
    is_folder = os.path.isdir(path)
    # As a path, an empty text would be the working folder.
    if not os.path.exists(path) or not os.fspath(data):
        where = did_you_mean(name, NAMES) or f"; {nearest_parent(path)}"
        raise DataError(
            f"{name}: no such file or folder, and no dataset of that name{where}; datasets known "
            f"by name: {', '.join(NAMES)}"
        )
    # Tables first: a folder of Parquet files may also hold images, such as for a readme.
    if ending == PARQUET_ENDING or (is_folder and parquet_files(path)):
        return _open_tables(load_parquet(path), ignore_extra_classes)
    if is_folder and is_saved(path):
        return _open_tables(load_saved(path), ignore_extra_classes)
    links = {"ignore_extra_classes": ignore_extra_classes, "follow_links": follow_links}
    if is_folder:
        return open_folder(path, **links)
    # A pipe may be called photos.csv, too; reading it would wait for a writer.
    if os.path.isfile(path) and ending in LISTS:
        return open_csv(path, root=root, **links)
    hint = f"; open shards as wds:{name}" if ending == ".tar" else ""
    raise DataError(
        f"{name} is not a folder; expected an image folder, a .csv, a {PARQUET_ENDING} "
        f"file or one of {', '.join(NAMES)}{hint}"
    )
