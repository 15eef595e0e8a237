"""The columns of a table that hold images and labels, and the class names in its schema."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vitkit.data.sources.tables.table_store import TableKind, groups_of
from vitkit.errors import DataError
from vitkit.messages import escape, quote_list

if TYPE_CHECKING:
    import pyarrow as pa

IMAGE_NAMES = ("image", "img", "picture", "jpg", "png")
LABEL_NAMES = ("label", "labels", "fine_label", "class", "class_name", "target", "cls", "y")
"""Column names in order of preference, if several columns could be meant."""
TYPE_SHOWN = 40
"""Characters of a column's type in a message."""


@dataclass(frozen=True)
class Columns:
    """The columns of images and labels of a table."""

    image: str
    label: str
    classes: tuple[str, ...]
    """The names of the numbers in `label`; empty where the table has none."""


def find_columns(schema: pa.Schema, where: str) -> Columns:
    """Find the columns of images and labels, by their types, then by their names.

    Args:
        schema: schema of the table.
        where: the file's name for messages.

    Raises:
        DataError: none, or several and no usual name among them.
    """
    features = _features(schema)
    images: list[str] = []
    labels: list[str] = []
    for column in schema:
        feature = features.get(column.name, {}).get("_type")
        if feature == "Image" or _holds_bytes(column.type):
            images.append(column.name)
        if feature == "ClassLabel":
            labels.append(column.name)
    # Only tables of `datasets` have a ClassLabel; in others the column name decides.
    if not labels:
        labels = [f.name for f in schema if f.name in LABEL_NAMES and _holds_labels(f.type)]
    shown = ", ".join(f"{escape(f.name)}: {str(f.type)[:TYPE_SHOWN]}" for f in schema)
    image = _choose(images, IMAGE_NAMES, f"{where}: expected one column of images", shown)
    known = ", ".join(LABEL_NAMES)
    usual = f"labels are whole numbers, text, or true and false in a column called {known}"
    label = _choose(
        labels, LABEL_NAMES, f"{where}: expected one column of labels", f"{shown}; {usual}"
    )
    return Columns(image, label, _class_names(features.get(label, {}), label, where))


def common_columns(files: Sequence[Path], kind: TableKind) -> Columns:
    """Return the columns of the first file, which all others must have, too.

    Raises:
        DataError: another file has others, or as `find_columns`.
    """
    columns_of = [find_columns(groups_of(file, kind).schema, escape(file)) for file in files]
    for file, columns in zip(files, columns_of, strict=True):
        if columns != columns_of[0]:
            raise DataError(
                f"{escape(file)}: its columns or class names differ from those of {files[0].name}"
            )
    return columns_of[0]


def _class_names(feature: dict[str, Any], label: str, where: str) -> tuple[str, ...]:
    """Return the class names that `datasets` wrote for the label column; none for another type."""
    if feature.get("_type") != "ClassLabel":
        return ()
    names = feature.get("names")
    if not isinstance(names, list | tuple) or not all(isinstance(name, str) for name in names):
        raise DataError(f"{where}: the names of {label!r} are not a list of class names")
    # a label is an index into the names
    if len({*names}) < len(names):
        raise DataError(f"{where}: {label!r} has the same class name twice")
    return tuple(names)


def _features(schema: pa.Schema) -> dict[str, dict[str, Any]]:
    """Return the features that `datasets` wrote into a schema, by column; none for other tables."""
    try:
        features = json.loads((schema.metadata or {})[b"huggingface"])["info"]["features"]
        return {name: feature for name, feature in features.items() if isinstance(feature, dict)}
    except (KeyError, ValueError, TypeError, AttributeError, RecursionError):
        return {}


def _holds_bytes(kind: pa.DataType) -> bool:
    import pyarrow as pa

    if pa.types.is_struct(kind):
        index = kind.get_field_index("bytes")
        return index >= 0 and _holds_bytes(kind.field(index).type)
    return bool(pa.types.is_binary(kind) or pa.types.is_large_binary(kind))


def _holds_labels(kind: pa.DataType) -> bool:
    import pyarrow as pa

    if pa.types.is_dictionary(kind):
        kind = kind.value_type
    is_text = pa.types.is_string(kind) or pa.types.is_large_string(kind)
    return bool(pa.types.is_integer(kind) or pa.types.is_boolean(kind) or is_text)


def _choose(candidates: Sequence[str], usual: Sequence[str], expected: str, shown: str) -> str:
    """Return the one column that is meant.

    Args:
        candidates: all that it could be.
        usual: names that decide between several.
        expected: the beginning of the message if there is none, or more than one.
        shown: the columns of the table, and hints, for the end of that message.
    """
    if len(candidates) == 1:
        return candidates[0]
    # Of several columns, the first name in this list wins, not the first in the table.
    for name in usual:
        if name in candidates:
            return name
    found = quote_list(candidates) if candidates else "none"
    raise DataError(f"{expected}, found {found}; the columns are {shown}")
