"""Open a dataset by its name, its address or its files."""

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeAlias

from vitkit import errors, messages
from vitkit.data.datasets.dataset import Dataset
from vitkit.data.sources import benchmarks, csv_list, huggingface, image_folder, objects, shards
from vitkit.io.results import GIVEN, MEMORY_PREFIX, given

NAMES = ("digits", *benchmarks.IDX_CLASSES, *benchmarks.CIFAR_CLASSES)
ADDRESSES = (huggingface.HUB_PREFIX, shards.WEBDATASET_PREFIX)
LISTS = (".csv", ".tsv")

DataObject: TypeAlias = objects.MapStyle | Sequence[Any] | tuple[Any, Any]
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
        read = data if isinstance(data, Dataset) else objects.read_object(data)
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
        return objects.read_object(data, classes).open(ignore_extra_classes)
    if classes:
        raise errors.DataError(
            "classes are for data passed as an object; all others have their own"
        )
    if isinstance(data, Dataset):
        return data
    if isinstance(data, str) and data.startswith(MEMORY_PREFIX):
        if data not in GIVEN:
            raise errors.DataError(
                f"{data} stands for data that were passed from Python and are not stored; pass the "
                "same object again: vitkit.train(data, resume=RUN), vitkit.evaluate(RUN, data)"
            )
        found: Dataset | objects.ObjectData = GIVEN[data]
        if isinstance(found, objects.ObjectData):
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
    if data.startswith(huggingface.HUB_PREFIX):
        return _open_tables(huggingface.load_hub(data), ignore_extra_classes)
    if data.startswith(shards.WEBDATASET_PREFIX):
        return shards.open_webdataset(data, ignore_extra_classes=ignore_extra_classes)
    if data in benchmarks.CIFAR_CLASSES:
        return benchmarks.open_cifar(data, benchmarks.known_folders(data, root))
    if data in benchmarks.IDX_CLASSES:
        return benchmarks.open_idx(data, benchmarks.known_folders(data, root))
    return benchmarks.open_digits()


def _open_tables(tables: huggingface.Tables, ignore_extra_classes: bool) -> Dataset:
    return objects.read_object(tables).open(ignore_extra_classes, where=tables.where)


def is_dataset(data: str | os.PathLike[str]) -> bool:
    """Return True for a name, an address or a file of a dataset, and a folder of its files.

    A folder of images is left to the caller: it may be a dataset or not.
    """
    path = Path(data)
    if isinstance(data, str) and (data in NAMES or data.startswith(ADDRESSES)):
        return True
    if os.path.isdir(path):
        return bool(huggingface.parquet_files(path)) or huggingface.is_saved(path)
    return path.suffix.lower() in (*LISTS, huggingface.PARQUET_ENDING)


def _open_path(
    data: str | os.PathLike[str],
    root: Path | None,
    follow_links: bool,
    ignore_extra_classes: bool,
) -> Dataset:
    """Open a file or a folder by its ending and its contents."""
    path, name = Path(os.path.expanduser(data)), messages.escape(data) or "''"
    ending = path.suffix.lower()
    is_folder = os.path.isdir(path)
    # As a path, an empty text would be the working folder.
    if not os.path.exists(path) or not os.fspath(data):
        where = messages.did_you_mean(name, NAMES) or f"; {messages.nearest_parent(path)}"
        raise errors.DataError(
            f"{name}: no such file or folder, and no dataset of that name{where}; datasets known "
            f"by name: {', '.join(NAMES)}"
        )
    # Tables first: a folder of Parquet files may also hold images, such as for a readme.
    if ending == huggingface.PARQUET_ENDING or (is_folder and huggingface.parquet_files(path)):
        return _open_tables(huggingface.load_parquet(path), ignore_extra_classes)
    if is_folder and huggingface.is_saved(path):
        return _open_tables(huggingface.load_saved(path), ignore_extra_classes)
    links = {"ignore_extra_classes": ignore_extra_classes, "follow_links": follow_links}
    if is_folder:
        return image_folder.open_folder(path, **links)
    # A pipe may be called photos.csv, too; reading it would wait for a writer.
    if os.path.isfile(path) and ending in LISTS:
        return csv_list.open_csv(path, root=root, **links)
    hint = f"; open shards as wds:{name}" if ending == ".tar" else ""
    raise errors.DataError(
        f"{name} is not a folder; expected an image folder, a .csv, a {huggingface.PARQUET_ENDING} "
        f"file or one of {', '.join(NAMES)}{hint}"
    )
