"""Images in the columns of tables: Parquet files, and the Arrow files that `datasets` keeps.

A table has one column of images, {bytes, path} or plain bytes, and one of labels, numbers or
text. Class names come from the features that `datasets` writes into a table's schema, where it did.
Each file is read through once, for labels and hashes, and its index kept.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from vitkit.data.datasets.build import Part, assemble
from vitkit.data.datasets.class_names import quote_list
from vitkit.data.datasets.dataset import Dataset, StoredSplit
from vitkit.data.images.decode import escape
from vitkit.data.sources.table_store import MOST_KEPT, Kind, TableStore, groups_of, image_bytes
from vitkit.errors import DataError, MissingExtraError
from vitkit.io.index_cache import Index, cached_index, stamp

if TYPE_CHECKING:
    import pyarrow as pa

IMAGE_NAMES = ("image", "img", "image", "jpg", "png")
LABEL_NAMES = ("label", "labels", "fine_label", "class", "class_name", "target", "cls", "y")
"""Which column is meant where several could be: the first of these that is there."""


@dataclass(frozen=True)
class Columns:
    """Where images and labels are in a table."""

    image: str
    label: str
    classes: tuple[str, ...]
    """The names of the numbers in `label`; empty where the table does not tell."""


def open_tables(
    name: str,
    where: str,
    files: Mapping[str, Sequence[Path]],
    kind: Kind,
    *,
    roots: Sequence[Path] = (),
    ignore_extra_classes: bool = False,
    notes: Sequence[str] = (),
) -> Dataset:
    """The data set in tables that have the same columns.

    Args:
        name: the data set's name.
        where: what to call it in a message.
        files: split -> its files, in order.
        kind: "parquet", or "arrow" as `datasets` caches it.
        roots: folders whose files rows may name by their path, instead of holding their bytes.
        ignore_extra_classes: leave out classes of val and test that train lacks.
        notes: lines for the user that there are already.

    Raises:
        DataError: files that are damaged or differ in their columns; no column of images or of
            labels; labels that are missing or out of range, by row; and what `assemble` raises.
        MissingExtraError: pyarrow is not installed.
    """
    _require_pyarrow(where)
    columns = _common_columns([file for group in files.values() for file in group], kind)
    index, notes, parts, held = _Indexing(columns, kind, roots), list(notes), {}, 0
    for split, group in files.items():
        indexes = [cached_index(file, f"{kind} {columns} {roots}", index) for file in group]
        held += sum(int(index.arrays["groups"][:, 1].sum()) for index in indexes)
        if split == "test" and not any(any(index.texts["labels"]) for index in indexes):
            notes.append("test has no labels and is left out")
            continue
        _refuse_unlabelled(group, indexes)
        parts[split] = _part(_store(group, indexes, columns, kind, roots), indexes)
    if kind == "parquet" and held > MOST_KEPT:
        notes.append("images are read a row group at a time, which is slow at random; try --cache")
    return assemble(
        name,
        where,
        parts,
        classes=columns.classes,
        ignore_extra_classes=ignore_extra_classes,
        notes=notes,
    )


def find_columns(schema: pa.Schema, where: str) -> Columns:
    """The columns of images and labels, by their types, then by their names.

    Raises:
        DataError: none, or several and no usual name among them.
    """
    features = _features(schema)
    kinds = {field.name: features.get(field.name, {}).get("_type") for field in schema}
    images = [f.name for f in schema if kinds[f.name] == "Image" or _holds_bytes(f.type)]
    labels = [f.name for f in schema if kinds[f.name] == "ClassLabel"]
    if not labels:
        labels = [f.name for f in schema if f.name in LABEL_NAMES and _holds_labels(f.type)]
    shown = ", ".join(f"{escape(f.name)}: {str(f.type)[:40]}" for f in schema)
    image = _chosen(images, IMAGE_NAMES, f"{where}: {{}} of images among {shown}")
    known = ", ".join(LABEL_NAMES)
    usual = f"labels are numbers, text or true and false in a column named one of {known}"
    label = _chosen(labels, LABEL_NAMES, f"{where}: {{}} of labels among {shown}; {usual}")
    names = features.get(label, {}).get("names") if kinds[label] == "ClassLabel" else ()
    if not isinstance(names, list | tuple) or not all(isinstance(name, str) for name in names):
        raise DataError(f"{where}: the names of {label!r} are no list of class names")
    if len({*names}) < len(names):
        raise DataError(f"{where}: the class names of {label!r} are not all different")
    return Columns(image, label, tuple(names))


def _common_columns(files: Sequence[Path], kind: Kind) -> Columns:
    """The columns of the first file, which all others must have, too."""
    found = [find_columns(groups_of(file, kind).schema, escape(file)) for file in files]
    for file, columns in zip(files, found, strict=True):
        if columns != found[0]:
            raise DataError(
                f"{escape(file)}: its columns or class names are not those of {files[0].name}"
            )
    return found[0]


class _Indexing:
    """Reads a table through: labels by name ("" where there is none), SHA-256 of every image."""

    def __init__(self, columns: Columns, kind: Kind, roots: Sequence[Path]) -> None:
        self.columns, self.kind, self.roots = columns, kind, roots

    def __call__(self, path: Path) -> Index:
        groups = groups_of(path, self.kind)
        labels: list[str] = []
        digests, sizes = [], []
        for number in range(len(groups)):
            table = groups.read(number, [self.columns.image, self.columns.label])
            labels += self._labels(path, table.column(self.columns.label), len(labels))
            images = table.column(self.columns.image)
            sizes.append((len(images), images.nbytes))
            for scalar in images:
                content = image_bytes(scalar.as_py(), self.roots) or b""
                digests.append(hashlib.sha256(content).digest())
        arrays: dict[str, np.ndarray] = {
            "groups": np.array(sizes, np.int64).reshape(-1, 2),
            "digests": np.frombuffer(b"".join(digests), np.uint8).reshape(-1, 32),
        }
        return Index(arrays, {"labels": labels})

    def _labels(self, path: Path, column: pa.ChunkedArray, first: int) -> list[str]:
        classes, named = self.columns.classes, []
        for row, label in enumerate(column.to_pylist(), first):
            if label in (None, -1, ""):
                named.append("")
            elif isinstance(label, int) and not 0 <= label < (len(classes) or label + 1):
                expected = f"below {len(classes)}" if classes else "of 0 or more"
                raise DataError(
                    f"{escape(path)}: expected labels {expected}, got {label} in row {row}"
                )
            else:
                named.append(classes[label] if classes else str(label))
        return named


def _refuse_unlabelled(files: Sequence[Path], indexes: Sequence[Index]) -> None:
    for file, index in zip(files, indexes, strict=True):
        missing = [row for row, label in enumerate(index.texts["labels"]) if not label]
        if missing:
            raise DataError(
                f"{escape(file)}: row {missing[0]} has no label (None, -1 or empty), and "
                f"{len(missing):,} rows in all; label them or remove them"
            )


def _part(store: TableStore, indexes: Sequence[Index]) -> Part:
    labels = [label for index in indexes for label in index.texts["labels"]]
    digests = [row.tobytes() for index in indexes for row in index.arrays["digests"]]
    images = StoredSplit(store, np.zeros(len(labels), np.int64), np.arange(len(labels)))
    return Part(images, labels, digests)


def _store(
    files: Sequence[Path],
    indexes: Sequence[Index],
    columns: Columns,
    kind: Kind,
    roots: Sequence[Path],
) -> TableStore:
    rows = [index.arrays["groups"][:, 0] for index in indexes]
    return TableStore(
        tuple(files),
        tuple(stamp(file) for file in files),
        kind,
        columns.image,
        np.repeat(np.arange(len(files)), [len(counts) for counts in rows]),
        np.concatenate([np.arange(len(counts)) for counts in rows]),
        np.concatenate([[0], np.cumsum(np.concatenate(rows))]).astype(np.int64),
        np.concatenate([[0], np.cumsum([counts.sum() for counts in rows])]).astype(np.int64),
        tuple(roots),
    )


def _features(schema: pa.Schema) -> dict[str, Any]:
    """What `datasets` says about each column; nothing where it did not write the table."""
    try:
        said = json.loads((schema.metadata or {})[b"huggingface"])["info"]["features"]
        return {name: about for name, about in said.items() if isinstance(about, dict)}
    except (KeyError, ValueError, TypeError, AttributeError, RecursionError):
        return {}


def _holds_bytes(kind: pa.DataType) -> bool:
    import pyarrow as pa

    if pa.types.is_struct(kind):
        place = kind.get_field_index("bytes")
        return place >= 0 and _holds_bytes(kind.field(place).type)
    return bool(pa.types.is_binary(kind) or pa.types.is_large_binary(kind))


def _holds_labels(kind: pa.DataType) -> bool:
    import pyarrow as pa

    if pa.types.is_dictionary(kind):
        kind = kind.value_type
    return bool(pa.types.is_integer(kind) or pa.types.is_string(kind)
                or pa.types.is_large_string(kind) or pa.types.is_boolean(kind))  # fmt: skip


def _chosen(found: Sequence[str], usual: Sequence[str], problem: str) -> str:
    """The one column that is meant."""
    if len(found) == 1:
        return found[0]
    for name in usual:
        if name in found:
            return name
    if found:
        raise DataError(problem.format(f"expected one column, got {quote_list(found)}"))
    raise DataError(problem.format("expected a column, got none"))


def _require_pyarrow(where: str) -> None:
    try:
        import pyarrow  # noqa: F401 - only whether it is there
    except ImportError:
        raise MissingExtraError(
            f"{where} needs pyarrow; install it: pip install 'vitkit[hub]'"
        ) from None
