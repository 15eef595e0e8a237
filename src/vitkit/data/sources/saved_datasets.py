"""Folders that `Dataset.save_to_disk` of the library `datasets` wrote: Arrow files, listed as JSON.

One split is a folder with `state.json`, which names its files; several are folders of that kind
beside `dataset_dict.json`, which names the splits.
"""

from __future__ import annotations

import json
from pathlib import Path

from vitkit.data.datasets.build import POOL
from vitkit.data.datasets.class_names import quote_list
from vitkit.data.datasets.dataset import SPLIT_WORDS, Dataset
from vitkit.data.images.decode import escape
from vitkit.data.sources.tables import open_tables
from vitkit.errors import DataError

STATE, SPLITS = "state.json", "dataset_dict.json"


def is_saved(folder: Path) -> bool:
    """Whether a folder was written by `save_to_disk`."""
    try:
        return (folder / SPLITS).is_file() or (
            (folder / STATE).is_file() and any(folder.glob("*.arrow"))
        )
    except OSError:
        return False


def open_saved(folder: Path, *, ignore_extra_classes: bool = False) -> Dataset:
    """Open a folder of `save_to_disk`; one without splits is cut 70/10/20.

    Args:
        folder: the folder that `save_to_disk` was given.
        ignore_extra_classes: leave out classes of val and test that train lacks.

    Raises:
        DataError, MissingExtraError: as `open_tables`; files that are named and not there.
    """
    where, notes = escape(folder), []
    files: dict[str, list[Path]] = {}
    if (folder / SPLITS).is_file():
        names = _strings(folder / SPLITS, _json(folder / SPLITS).get("splits"))
        for name in names:
            split = SPLIT_WORDS.get(name.lower())
            if split is not None and split not in files:
                files[split] = _files(folder / name)
        if not files:
            raise DataError(
                f"{where}: its splits are {quote_list(names)}; expected train, val or test"
            )
        unread = [name for name in names if SPLIT_WORDS.get(name.lower()) is None]
        notes = [f"splits not read: {quote_list(unread)}"] if unread else []
    else:
        files[POOL] = _files(folder)
    return open_tables(
        escape(folder.absolute().name) or "data",
        where,
        files,
        "arrow",
        ignore_extra_classes=ignore_extra_classes,
        notes=notes,
    )


def _files(folder: Path) -> list[Path]:
    entries = _json(folder / STATE).get("_data_files")
    entries = entries if isinstance(entries, list) else []
    named = [entry.get("filename") for entry in entries if isinstance(entry, dict)]
    # A name is never a path: nothing outside of the folder is read.
    files = [folder / Path(name).name for name in _strings(folder / STATE, named)]
    missing = [file for file in files if not file.is_file()]
    if missing or not files:
        raise DataError(f"{escape(missing[0] if missing else folder)}: no such Arrow file")
    return files


def _json(path: Path) -> dict[str, object]:
    try:
        said = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise DataError(f"{escape(path)}: cannot be read: {error}") from None
    return said if isinstance(said, dict) else {}


def _strings(path: Path, said: object) -> list[str]:
    if isinstance(said, list) and all(isinstance(each, str) for each in said):
        return said
    raise DataError(f"{escape(path)}: expected a list of names, got {str(said)[:80]!r}")
