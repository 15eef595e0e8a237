"""`datasets.Dataset` of Hugging Face: its encoded images are read without decoding them twice."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from vitkit.data.datasets.dataset import Store, StoredSplit
from vitkit.data.sources.objects.items import Label, MapStyle, as_label
from vitkit.data.sources.objects.object_part import ObjectPart
from vitkit.data.sources.tables.columns import find_columns
from vitkit.data.sources.tables.table_store import image_bytes
from vitkit.errors import DataError, ImageError
from vitkit.io.progress import progress_bar

UNKNOWN = -1
"""The label value that the Hub uses for unlabelled test images."""
ANYWHERE = (Path("/"),)
"""Folders of files that a row may name: the dataset is the caller's own object."""


@dataclass(frozen=True, eq=False)
class RowStore(Store):
    """The encoded images in a column of a `datasets.Dataset`."""

    rows: Any
    """The dataset, its images not decoded."""
    column: str
    origin: str
    """Its name, for messages."""

    def name(self, number: int) -> str:
        return f"{self.origin}[{number}]"

    def encoded(self, number: int) -> bytes:
        content = image_bytes(self.rows[number][self.column], ANYWHERE)
        if not content:
            raise ImageError(self.name(number), "empty", "expected an image, the row has no bytes")
        return content


def is_hub_dataset(data: object) -> bool:
    """Return True for a `datasets.Dataset` with a column of images that no transform changes."""
    features: Any = getattr(data, "features", None)
    if not hasattr(features, "arrow_schema") or not hasattr(data, "cast_column"):
        return False
    # An `IterableDataset` has features, too, but no rows by index.
    if not isinstance(data, MapStyle):
        return False
    # With a user's transform, which may change the images, they are read item by item.
    chosen = getattr(data, "format", {})
    if chosen.get("type") not in (None, "torch", "numpy", "python"):
        return False
    return any(type(feature).__name__ == "Image" for feature in features.values())


def read_hub_dataset(data: Any, origin: str) -> ObjectPart:
    """Return the images of a `datasets.Dataset`, found by its features.

    Args:
        data: a dataset with one column of images and one of labels, numbers or text.
        origin: its name, for messages.

    Raises:
        DataError: no such columns, or several; a row without a label or with one out of range.
    """
    columns = find_columns(data.features.arrow_schema, origin)
    labels = _labels(data, columns.label, origin)
    if not labels:
        raise DataError(f"{origin} is empty: it has no rows")
    # a format for torch or numpy would decode the images again
    image = type(data.features[columns.image])
    rows = data.with_format(None).select_columns([columns.image])
    rows = rows.cast_column(columns.image, image(decode=False))
    store = RowStore(rows, columns.image, origin)
    digests = np.zeros((len(labels), 32), np.uint8)
    with progress_bar(len(labels), f"reading {origin}") as advance:
        for number, row in enumerate(rows):
            content = image_bytes(row[columns.image], ANYWHERE) or b""
            digests[number] = np.frombuffer(hashlib.sha256(content).digest(), np.uint8)
            advance(1)
    # The labels are numbered by `assemble`, when all class names are known.
    count = len(labels)
    split = StoredSplit(store, np.zeros(count, np.int64), np.arange(count))
    return ObjectPart("datasets", split, labels, digests, columns.classes)


def is_unlabelled(data: Any, origin: str) -> bool:
    """Return True if no row has a label: all are `UNKNOWN`, or missing.

    Args:
        data: as for `read_hub_dataset`.
        origin: its name, for messages.

    Raises:
        DataError: no column of labels, or several.
    """
    column = find_columns(data.features.arrow_schema, origin).label
    rows = data.with_format(None).select_columns([column])
    return len(rows) > 0 and set(rows[:][column]) <= {UNKNOWN, None}


def _labels(data: Any, column: str, origin: str) -> list[Label]:
    rows = data.with_format(None).select_columns([column])
    labels: list[Label] = []
    for number, label in enumerate(rows[:][column]):
        if label == UNKNOWN:
            label = None
        labels.append(as_label(label, f"{origin}[{number}]"))
    return labels
