"""Folders that `Dataset.save_to_disk` of the library `datasets` wrote: Arrow files, listed as JSON.

One split is a folder with `state.json`, which names its files; several are folders of that kind
beside `dataset_dict.json`, which names the splits.
"""

from __future__ import annotations

import json
from pathlib import Path

from vitkit.data.datasets.build import POOL
from vitkit.data.datasets.dataset import SPLIT_WORDS, Dataset
from vitkit.data.sources.tables.open_tables import open_tables
from vitkit.errors import DataError
from vitkit.messages import escape, quote_list

STATE, SPLITS = "state.json", "dataset_dict.json"


def is_saved(folder: Path) -> bool:
    """Return True if a folder was written by `save_to_disk`."""
    try:
        if (folder / SPLITS).is_file():
            return True
        return (folder / STATE).is_file() and any(folder.glob("*.arrow"))
    except OSError:
        return False


def open_saved(folder: Path, *, ignore_extra_classes: bool = False) -> Dataset:
    """Open a folder of `save_to_disk`; one without splits is cut 70/10/20.

    Args:
        folder: the folder that `save_to_disk` wrote.
        ignore_extra_classes: leave out classes of val and test that train lacks.

    Raises:
        DataError, MissingExtraError: as `open_tables`; files that are listed and not there.
    """
    where = escape(folder)
    notes: list[str] = []
    files: dict[str, list[Path]] = {}
    if (folder / SPLITS).is_file():
        names = _strings(folder / SPLITS, _json(folder / SPLITS).get("splits"))
        unread = []
        for name in names:
            split = SPLIT_WORDS.get(name.lower())
            if split is None:
                unread.append(name)
            elif split not in files:
                files[split] = _files(folder / name)
        if not files:
            found = quote_list(names) or "none"
            raise DataError(f"{where}: its splits are {found}; expected train, val or test")
        if unread:
            notes.append(f"splits not read: {quote_list(unread)}")
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
    if not isinstance(entries, list):
        entries = []
    # [{"filename": "data-00000-of-00001.arrow"}, ...]
    names = [entry.get("filename") for entry in entries if isinstance(entry, dict)]
    # A name is never a path: nothing outside of the folder is read.
    files = [folder / Path(name).name for name in _strings(folder / STATE, names)]
    for file in files or [folder]:
        if not file.is_file():
            raise DataError(f"{escape(file)}: no such Arrow file")
    return files


def _json(path: Path) -> dict[str, object]:
    try:
        content = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise DataError(f"{escape(path)}: cannot be read: {error}") from None
    return content if isinstance(content, dict) else {}


def _strings(path: Path, content: object) -> list[str]:
    if isinstance(content, list) and all(isinstance(item, str) for item in content):
        return content
    raise DataError(f"{escape(path)}: expected a list of names, got {str(content)[:80]!r}")
