"""Open a dataset by its name, its address or its files."""

from __future__ import annotations

import os
from pathlib import Path

from vitkit.data.datasets.dataset import Dataset
from vitkit.data.sources.benchmarks import IDX_CLASSES, idx_folders, open_digits, open_idx
from vitkit.data.sources.cifar import CIFAR_CLASSES, cifar_folders, open_cifar
from vitkit.data.sources.csv_list import open_csv
from vitkit.data.sources.huggingface import HUB_PREFIX, open_hub
from vitkit.data.sources.image_folder import open_folder
from vitkit.data.sources.remote_webdataset import is_remote, open_remote_webdataset
from vitkit.data.sources.tables.parquet import PARQUET_ENDING, open_parquet, parquet_files
from vitkit.data.sources.tables.saved_datasets import is_saved, open_saved
from vitkit.data.sources.webdataset import WEBDATASET_PREFIX, open_webdataset
from vitkit.errors import DataError
from vitkit.messages import did_you_mean, escape, nearest_parent

NAMES = ("digits", *IDX_CLASSES, *CIFAR_CLASSES)
LISTS = (".csv", ".tsv")


def refuse_objects(data: object) -> None:
    """Raise `DataError` for data that is no path and no name, such as an array."""
    if not isinstance(data, str | os.PathLike):
        raise DataError(
            f"data is a {type(data).__name__}; pass the path of a folder, a CSV or a Parquet "
            "file, or a name such as 'digits'"
        )


def open_dataset(
    data: str | os.PathLike[str],
    *,
    data_root: str | os.PathLike[str] | None = None,
    ignore_extra_classes: bool = False,
    follow_links: bool = False,
) -> Dataset:
    """Open a dataset without decoding its images.

    `checks.check.drop_or_refuse_unreadable` decodes them.

    Args:
        data: one of

            - "digits", "mnist", "fashion-mnist", "cifar10", "cifar100";
            - an image folder: `train/<class>/**.jpg` with `val/` or `test/`, or `<class>/**.jpg`,
              which is split 70/10/20;
            - a CSV with the columns `path,label` and perhaps `split`;
            - a Parquet file, or a folder with such files at its top or in `data/`;
            - a folder that `Dataset.save_to_disk` of `datasets` wrote;
            - "wds:shards-{0000..0099}.tar", WebDataset shards, local or at an https address;
            - "hf://owner/name", a dataset of the Hugging Face Hub.

            A known name wins over a folder of that name, which is `./digits` then.
        data_root: the folder where the files of named datasets are looked for first; for a CSV the
            folder that its paths begin at, its own where absent.
        ignore_extra_classes: leave out classes of val and test that train lacks.
        follow_links: follow symbolic links that lead out of the folder.

    Raises:
        DataError: nothing of that name, or a dataset that cannot be trained on.
        MissingExtraError: a Parquet file or a set of the Hub, without `vitkit[hub]`.
    """
    # `Path.expanduser` raises for an unknown user.
    root = None if data_root is None else Path(os.path.expanduser(data_root))
    # Names and addresses are text; a `Path` is always a path.
    if isinstance(data, str) and data in NAMES:
        return _open_named(data, root)
    if isinstance(data, str) and data.startswith(HUB_PREFIX):
        return open_hub(data, ignore_extra_classes=ignore_extra_classes)
    if isinstance(data, str) and data.startswith(WEBDATASET_PREFIX):
        opened = open_remote_webdataset if is_remote(data) else open_webdataset
        return opened(data, ignore_extra_classes=ignore_extra_classes)
    path = Path(os.path.expanduser(data))
    if not os.path.exists(path):
        name = escape(data)
        if path.suffix.lower() in (*LISTS, PARQUET_ENDING):
            raise DataError(f"{name}: no such file; {nearest_parent(path)}")
        near = did_you_mean(name, NAMES)
        where = near or f"; {nearest_parent(path)}"
        raise DataError(
            f"{name}: no such folder, and no dataset of that name{where}; datasets are "
            f"{', '.join(NAMES)}"
        )
    return _open_path(path, root, ignore_extra_classes, follow_links)


def _open_path(
    path: Path, root: Path | None, ignore_extra_classes: bool, follow_links: bool
) -> Dataset:
    """Open a file or a folder by its ending and its contents."""
    # Tables first: a folder of Parquet files may also hold images, such as those of a readme.
    ending = path.suffix.lower()
    is_folder = os.path.isdir(path)
    if ending == PARQUET_ENDING or (is_folder and parquet_files(path)):
        return open_parquet(path, ignore_extra_classes=ignore_extra_classes)
    if is_folder and is_saved(path):
        return open_saved(path, ignore_extra_classes=ignore_extra_classes)
    if is_folder:
        return open_folder(
            path, ignore_extra_classes=ignore_extra_classes, follow_links=follow_links
        )
    if os.path.isfile(path) and ending in LISTS:
        return open_csv(
            path, root=root, ignore_extra_classes=ignore_extra_classes, follow_links=follow_links
        )
    hint = f"; open shards as wds:{escape(path)}" if ending == ".tar" else ""
    raise DataError(
        f"{escape(path)} is not a folder; expected an image folder, a .csv, a {PARQUET_ENDING} "
        f"file or one of {', '.join(NAMES)}{hint}"
    )


def _open_named(name: str, root: Path | None) -> Dataset:
    if name == "digits":
        return open_digits()
    if name in CIFAR_CLASSES:
        return open_cifar(name, cifar_folders(name, root))
    return open_idx(name, idx_folders(name, root))
