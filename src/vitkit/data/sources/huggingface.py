"""Datasets of the Hugging Face Hub, `hf://owner/name`, Parquet files, and folders of `datasets`.

The library `datasets` downloads and converts them; it keeps Arrow files in its own cache. Their
rows are read like those of a `datasets.Dataset` passed from Python. Datasets that bring code are
refused.
"""

import glob
import hashlib
import os
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import UInt8

from vitkit.data.datasets import dataset, splitting
from vitkit.data.datasets.split import Split
from vitkit.data.sources.shards import files_by_split
from vitkit.errors import DataError, ImageError, MissingExtraError
from vitkit.io.caches import Index, cached_index, file_stamp
from vitkit.messages import escape, progress_bar, quote_list

HUB_PREFIX = "hf://"
HUB_ADDRESS = re.compile(
    r"hf://(?P<name>[\w.-]+/[\w.-]+)(?:@(?P<revision>[\w./-]+))?(?::(?P<config>[\w.+-]+))?"
)
COMMIT = re.compile("[0-9a-f]{7,40}")
PARQUET_ENDING = ".parquet"
DATA_FOLDER = "data"
"""The folder where repositories of the Hub have their files."""
STATE, SPLITS = "state.json", "dataset_dict.json"
"""Files of a folder of `save_to_disk`: with one split, and with several."""


class Tables(NamedTuple):
    """A dataset as `datasets` reads it."""

    splits: Mapping[str, Any]
    """A `datasets.Dataset` for each of train, val and test, or for `POOL`."""
    name: str
    where: str
    """The file, folder or address, for messages."""
    notes: tuple[str, ...] = ()
    """Lines for the user."""


def load_hub(address: str) -> Tables:
    """Load a dataset of the Hub, downloaded if it is not in the cache.

    Args:
        address: `hf://owner/name`, with `@revision`, and `:config` where it has several.

    Raises:
        DataError: no such dataset, or not in the cache and the Hub out of reach; one that needs its
            own code.
        MissingExtraError: `datasets` is not installed.
    """
    match = HUB_ADDRESS.fullmatch(address)
    if match is None:
        raise DataError(
            f"{escape(address)}: expected hf://owner/name, hf://owner/name@revision or "
            f"hf://owner/name:config"
        )
    name, revision = match["name"], match["revision"] or ""
    # `load_dataset` prefers a local folder to the Hub.
    if os.path.exists(name):
        raise DataError(
            f"{address}: the working folder has {name}, which `datasets` would read instead of the "
            f"Hub's; start in another folder, or open that one by ./{name}"
        )
    with _errors_named(address) as datasets:
        splits = datasets.load_dataset(name, match["config"], revision=match["revision"])
    # Without a network `datasets` takes the newest of its cache, in a folder named by its commit.
    for part in splits.values():
        commit = Path(part.cache_files[0]["filename"]).parent.name if part.cache_files else ""
        known = COMMIT.fullmatch(revision) and len(commit) == 40
        if known and not commit.startswith(revision):
            raise DataError(
                f"{address}: the cache has {commit} of it, and the Hub cannot be reached; check "
                f"the network, or pass @{commit}"
            )
    return _tables(splits, name.partition("/")[2], address)


def parquet_files(folder: Path) -> list[Path]:
    """Return the Parquet files of a folder, or of `data/` in it, in order.

    Empty where it cannot be listed, or has other folders: images are in those then.
    """
    for parent in (folder, folder / DATA_FOLDER):
        _, folders, files = next(os.walk(parent), ("", [], []))
        # The folder also holds images: the tables are lists of them.
        if parent == folder and not all(
            name == DATA_FOLDER or splitting.is_hidden(name) for name in folders
        ):
            return []
        tables = [
            name
            for name in files
            if name.endswith(PARQUET_ENDING) and not splitting.is_hidden(name)
        ]
        if tables:
            return [parent / name for name in sorted(tables)]
    return []


def load_parquet(path: Path) -> Tables:
    """Load a Parquet file, or a folder of them; `datasets` converts each to Arrow once.

    Files with train, val or test in their names are those splits, such as
    `train-00000-of-00002.parquet`; a set without such names is cut 70/10/20.

    Args:
        path: the file or the folder.

    Raises:
        DataError, MissingExtraError: as `load_hub`.
    """
    files = parquet_files(path) if path.is_dir() else [path]
    where = escape(path)
    splits: dict[str, Any] = {}
    columns: dict[str, str] = {}
    for split, indices in files_by_split([file.name for file in files], where).items():
        chosen = [str(files[index]) for index in indices]
        for file in chosen:
            with _errors_named(escape(file)) as datasets:
                from pyarrow.parquet import read_schema

                schema = datasets.Features.from_arrow_schema(read_schema(file))
            # The numbers of all files are read with the class names of the first one.
            columns.setdefault(str(schema), file)
            if len(columns) > 1:
                first = Path(next(iter(columns.values()))).name
                raise DataError(
                    f"{escape(file)}: its columns or class names differ from those of "
                    f"{escape(first)}; write both with the same ones"
                )
        with _errors_named(where) as datasets:
            # as patterns, in which the names of files are literal
            splits[split] = datasets.Dataset.from_parquet([*map(glob.escape, chosen)])
    name = escape(path.absolute().name.removesuffix(PARQUET_ENDING)) or "data"
    return _tables(splits, name, where)


def is_saved(folder: Path) -> bool:
    """Return True if a folder was written by `save_to_disk`."""
    if os.path.isfile(folder / SPLITS):
        return True
    return os.path.isfile(folder / STATE) and any(folder.glob("*.arrow"))


def load_saved(folder: Path) -> Tables:
    """Load a folder that `save_to_disk` of `datasets` wrote; one without splits is cut 70/10/20.

    Args:
        folder: the folder.

    Raises:
        DataError, MissingExtraError: as `load_hub`; files that are listed and not there.
    """
    with _errors_named(escape(folder)) as datasets:
        loaded = datasets.load_from_disk(str(folder))
    splits = loaded if isinstance(loaded, dict) else {splitting.POOL: loaded}
    name = escape(folder.absolute().name) or "data"
    return _tables(splits, name, escape(folder))


def _tables(splits: Mapping[str, Any], name: str, where: str) -> Tables:
    """Return train, val and test of a dataset, or all of its images."""
    chosen: dict[str, Any] = {}
    unread = []
    for key, part in splits.items():
        split = dataset.SPLIT_WORDS.get(key.lower(), "")
        # `validation` and `dev` are both val: the first one counts.
        if key == splitting.POOL or (split and split not in chosen):
            chosen[split] = part
        else:
            unread.append(key)
    if not chosen:
        found = quote_list(unread) or "none"
        raise DataError(f"{where}: its splits are {found}; expected train, val or test")
    notes = (f"splits not read: {quote_list(unread)}",) if unread else ()
    return Tables(chosen, name, where, notes)


@contextmanager
def _errors_named(where: str) -> Iterator[Any]:
    """Yield the library `datasets`; turn its errors into one line that names the data.

    Raises:
        DataError: the block fails.
        MissingExtraError: `datasets` is not installed.
    """
    try:
        import datasets
    except ImportError:
        raise MissingExtraError(
            f"{where} needs datasets; install it: pip install 'vitkit[hub]'"
        ) from None
    if not sys.stderr.isatty():
        datasets.disable_progress_bars()
    try:
        yield datasets
    except Exception as error:  # whatever `datasets` and `pyarrow` raise for what they cannot read
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        if isinstance(error, ConnectionError):
            reason = (
                "not in the cache, and the Hub cannot be reached; check the network and "
                "HF_HUB_OFFLINE, or pass a folder of its files, as `hf download` writes it"
            )
        raise DataError(f"{where}: cannot be read by `datasets`: {reason}") from error


# Rows of a `datasets.Dataset`: the columns of images and labels are found by types and names.

IMAGE_NAMES = ("image", "img", "picture", "jpg", "png")
LABEL_NAMES = ("label", "labels", "fine_label", "class", "class_name", "target", "cls", "y")
"""Column names in order of preference, if several columns could be meant."""
LABEL_TYPES = re.compile(r"u?int\d+|bool|(large_)?string")
UNLABELLED = frozenset([None, -1, ""])
"""Values of rows without a label; the Hub uses -1 for unlabelled test images."""


class ObjectPart(NamedTuple):
    """The images of one split, or of all, before classes have numbers."""

    images: Split
    """The images; their labels are ignored."""
    labels: list[Any]
    """Each image's class number or class name (N,), None where it has none."""
    digests: UInt8[np.ndarray, "N 32"]
    """SHA-256 of each image."""
    classes: tuple[str, ...] = ()
    """The names of the class numbers, where they are known."""


def is_hub_dataset(data: object) -> bool:
    """Return True for a `datasets.Dataset` with a column of images that no transform changes."""
    features: Any = getattr(data, "features", None)
    # An `IterableDataset` has features, too, but no number of rows.
    if not (hasattr(features, "arrow_schema") and hasattr(data, "__len__")):
        return False
    # With a user's transform, which may change the images, they are read item by item.
    chosen = getattr(data, "format", {})
    if chosen.get("type") not in (None, "torch", "numpy", "python"):
        return False
    return any(type(feature).__name__ == "Image" for feature in features.values())


@dataclass(frozen=True, eq=False)
class RowStore(dataset.Store):
    """The encoded images in a column of a `datasets.Dataset`."""

    rows: Any
    """The dataset, its images not decoded."""
    column: str
    origin: str
    """Its name, for messages."""
    roots: Sequence[Path] | None
    """Folders of files that rows may name instead of holding their bytes; None: any folder."""

    def name(self, number: int) -> str:
        return f"{self.origin}[{number}]"

    def encoded(self, number: int) -> bytes:
        content = self.content(self.rows[number][self.column])
        if not content:
            raise ImageError(self.name(number), "empty", "expected an image, the row has no bytes")
        return content

    def content(self, value: Any) -> bytes:
        """Return the encoded image of a row, of bytes or {"bytes": ..., "path": ...}; maybe b""."""
        if isinstance(value, bytes):
            return value
        row: dict[str, Any] = value if isinstance(value, dict) else {}
        path = row.get("path")
        if row.get("bytes") or not isinstance(path, str):
            return bytes(row.get("bytes") or b"")
        try:
            # The path may be a stranger's: only files below the known folders are read.
            place = Path(path).resolve()
            known = self.roots is None or any(
                place.is_relative_to(root.resolve()) for root in self.roots
            )
            if known:
                return place.read_bytes()
            return b""
        except (OSError, ValueError):
            return b""

    def digests(self) -> Index:
        """Return the SHA-256 of every image; a missing one has that of no bytes."""
        digests = np.zeros((len(self.rows), 32), np.uint8)
        with progress_bar(len(digests), f"reading {self.origin}") as advance:
            for number, row in enumerate(self.rows):
                digest = hashlib.sha256(self.content(row[self.column])).digest()
                digests[number] = np.frombuffer(digest, np.uint8)
                advance(1)
        return Index({"digests": digests})


def read_table(data: Any, origin: str, *, is_opened: bool = False) -> ObjectPart:
    """Return the images of a `datasets.Dataset`, found by its features.

    Args:
        data: a dataset with one column of images and one of labels, numbers or text.
        origin: its name, for messages.
        is_opened: True if it was opened from files or an address: then its digests are cached, and
            of files that a row names only those in the caches of `datasets` are read.

    Raises:
        DataError: no such columns, or several; no rows.
    """
    image = _find_column(data.features, origin, "images")
    label = _find_column(data.features, origin, "labels")
    plain = data.with_format(None)  # a format for torch or numpy would decode the images again
    labels = [
        None if value in UNLABELLED else value for value in plain.select_columns([label])[:][label]
    ]
    if not labels:
        raise DataError(f"{origin} is empty: it has no rows")
    rows = plain.select_columns([image])
    feature = data.features[image]
    if type(feature).__name__ == "Image":
        rows = rows.cast_column(image, type(feature)(decode=False))
    store = RowStore(rows, image, origin, _hub_caches() if is_opened else None)
    files = []
    if is_opened:
        files = [Path(file["filename"]) for file in data.cache_files]
    if files:
        kind = f"{image} of {[(str(file), file_stamp(file)) for file in files]}"
        index = cached_index(files[0], kind, lambda _: store.digests())
    else:
        index = store.digests()
    # The labels are numbered by `assemble`, when all class names are known.
    split = dataset.StoredSplit(store, np.zeros(len(labels), np.int64), np.arange(len(labels)))
    classes = tuple(getattr(data.features[label], "names", None) or ())
    return ObjectPart(split, labels, index.arrays["digests"], classes)


def _hub_caches() -> tuple[Path, ...]:
    """Return the folders where `datasets` puts its downloads."""
    import datasets
    from huggingface_hub import constants

    return Path(datasets.config.HF_DATASETS_CACHE), Path(constants.HF_HUB_CACHE)


def _find_column(features: Mapping[str, Any], where: str, wanted: str) -> str:
    """Return the column of "images" or of "labels", by its type, then by its name.

    Raises:
        DataError: none, or several and no usual name among them.
    """
    usual = IMAGE_NAMES if wanted == "images" else LABEL_NAMES
    candidates: list[str] = []
    for name, feature in features.items():
        kind = type(feature).__name__
        if wanted == "images":
            content = feature.get("bytes") if isinstance(feature, Mapping) else feature
            if kind == "Image" or getattr(content, "dtype", "") in ("binary", "large_binary"):
                candidates.append(name)
        elif kind == "ClassLabel":
            candidates.append(name)
    # Only tables of `datasets` have a ClassLabel; in others the column name decides.
    if not candidates and wanted == "labels":
        for name, feature in features.items():
            if name in usual and LABEL_TYPES.fullmatch(str(getattr(feature, "dtype", ""))):
                candidates.append(name)
    # Of several columns, the first name in the list wins, not the first in the table.
    chosen = candidates if len(candidates) == 1 else [name for name in usual if name in candidates]
    if chosen:
        return chosen[0]
    found = quote_list(candidates) if candidates else "none"
    shown = ", ".join(f"{escape(name)}: {_type(feature)}" for name, feature in features.items())
    raise DataError(
        f"{where}: expected one column of {wanted}, found {found}; the columns are {shown}; images "
        "are bytes, labels are whole numbers, text, or true and false in a column called "
        f"{', '.join(LABEL_NAMES)}"
    )


def _type(feature: Any) -> str:
    return str(getattr(feature, "dtype", None) or type(feature).__name__)
