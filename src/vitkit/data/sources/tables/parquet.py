"""Parquet files with images in them, as the Hub stores them: one file, or a folder of shards."""

from __future__ import annotations

from pathlib import Path

from vitkit.data.datasets.class_names import is_hidden
from vitkit.data.datasets.dataset import Dataset
from vitkit.data.sources.shard_patterns import files_by_split
from vitkit.data.sources.tables.open_tables import open_tables
from vitkit.messages import escape

PARQUET_ENDING = ".parquet"
DATA_FOLDER = "data"
"""The folder where repositories of the Hub have their files."""


def parquet_files(folder: Path) -> list[Path]:
    """Return the Parquet files of a folder, or of `data/` in it, in order.

    Empty where it cannot be listed, or has other folders: images are in those then.
    """
    try:
        for path in folder.iterdir():
            # The folder also holds images: the tables are lists of them.
            if path.is_dir() and path.name != DATA_FOLDER and not is_hidden(path.name):
                return []
        for parent in (folder, folder / DATA_FOLDER):
            tables = [
                path for path in parent.glob(f"*{PARQUET_ENDING}") if not is_hidden(path.name)
            ]
            if tables:
                return sorted(filter(Path.is_file, tables))
    except OSError:  # the folder cannot be listed: the error is raised when it is opened
        return []
    return []


def open_parquet(path: Path, *, ignore_extra_classes: bool = False) -> Dataset:
    """Open a Parquet file, or a folder of them; each is read through once.

    Files with train, val or test in their names are those splits, such as
    `train-00000-of-00002.parquet`; a set without such names is cut 70/10/20.

    Args:
        path: the file or the folder.
        ignore_extra_classes: leave out classes of val and test that train lacks.

    Raises:
        DataError, MissingExtraError: as `open_tables`.
    """
    files = parquet_files(path) if path.is_dir() else [path]
    where = escape(path)
    groups = files_by_split([file.name for file in files], where)
    by_split = {}
    for split, indices in groups.items():
        by_split[split] = [files[index] for index in indices]
    name = escape(path.absolute().name.removesuffix(PARQUET_ENDING)) or "data"
    return open_tables(name, where, by_split, "parquet", ignore_extra_classes=ignore_extra_classes)
