"""Parquet files with images in them, as the Hub stores them: one file, or a folder of shards."""

from __future__ import annotations

from pathlib import Path

from vitkit.data.datasets.class_names import is_hidden
from vitkit.data.datasets.dataset import Dataset
from vitkit.data.images.decode import escape
from vitkit.data.sources.tables import open_tables
from vitkit.data.sources.webdataset import shards_by_split

ENDING = ".parquet"
BELOW = "data"
"""Where repositories of the Hub have their files."""


def parquet_files(folder: Path) -> list[Path]:
    """The Parquet files of a folder, or of `data/` in it, in order.

    None where it cannot be listed, or has other folders: images are in those then.
    """
    try:
        folders = [p.name for p in folder.iterdir() if p.is_dir() and not is_hidden(p.name)]
        if set(folders) <= {BELOW}:
            for place in (folder, folder / BELOW):
                found = [p for p in place.glob(f"*{ENDING}") if not is_hidden(p.name)]
                if found:
                    return sorted(p for p in found if p.is_file())
    except OSError:
        pass
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
    groups = shards_by_split([file.name for file in files], where)
    by_split = {split: [files[place] for place in places] for split, places in groups.items()}
    name = escape(path.absolute().name.removesuffix(ENDING)) or "data"
    return open_tables(name, where, by_split, "parquet", ignore_extra_classes=ignore_extra_classes)
