"""Items of a map-style dataset, and the images of one split before classes have numbers."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, TypeAlias, runtime_checkable

import numpy as np
from jaxtyping import UInt8

from vitkit.data.datasets.build import NamedImages
from vitkit.data.datasets.dataset import Store, StoredSplit
from vitkit.data.datasets.split import Split
from vitkit.data.sources.tables import IMAGE_NAMES, LABEL_NAMES, find_columns, image_bytes
from vitkit.errors import DataError, ImageError
from vitkit.messages import did_you_mean, escape, progress_bar

# Items of a map-style dataset: an image of any usual kind and its label, checked by name.

Label: TypeAlias = int | str
"""A class number from 0, or a class name."""


@runtime_checkable
class MapStyle(Protocol):
    """Anything with a length and items (image, label): a `torch.utils.data.Dataset`, or a list."""

    def __len__(self) -> int:
        """Return the number of items N."""

    def __getitem__(self, index: int, /) -> Any:
        """Return the item of an index in [0, N): (image, label), or a mapping of both."""


def image_and_label(items: MapStyle, index: int, name: str) -> tuple[Any, Any]:
    """Return the two parts of an item.

    Raises:
        DataError: the dataset raises at this index, or the item is neither a pair nor a mapping
            with an image and a label.
    """
    try:
        item = items[index]
    except Exception as error:  # whatever a user's own dataset raises
        raise DataError(f"{name} raised {type(error).__name__}: {error}") from error
    if isinstance(item, Mapping):
        return _value(item, IMAGE_NAMES, "image", name), _value(item, LABEL_NAMES, "label", name)
    if isinstance(item, tuple | list) and len(item) == 2:
        return item[0], item[1]
    got = f"a {type(item).__name__}"
    if isinstance(item, tuple | list):
        got += f" of {len(item)}"
    raise DataError(f"{name} is {got}; expected (image, label)")


def _value(item: Mapping[str, Any], names: Sequence[str], part: str, where: str) -> Any:
    for name in names:
        if name in item:
            return item[name]
    raise DataError(
        f"{where} has no {part}; expected one of the keys {', '.join(names)}, got "
        f"{escape(', '.join(map(str, item)))}"
    )


def as_label(label: Any, name: str) -> Label:
    """Return a label as a class number from 0 or a class name.

    Args:
        label: a whole number of any kind (Python, numpy, a tensor without axes), or text.
        name: the item's name in messages.

    Raises:
        DataError: none, a float, a negative number, empty text, or several values.
    """
    value = label
    # A number of numpy or torch has a shape, too: ().
    shape = getattr(label, "shape", ())
    if len(shape):
        raise DataError(
            f"{name}: the label has the shape {tuple(shape)}; expected one class number; for "
            "probabilities or one-hot labels pass the argmax"
        )
    if hasattr(label, "item"):
        value = label.item()
    # True is an int, too; as in tables it is the class 'True', not class 1.
    if isinstance(value, bool):
        return str(value)
    if isinstance(value, int) and value >= 0:
        return value
    if isinstance(value, str) and value.strip():
        return value
    got = "no label" if value is None else f"the label {value!r}"
    raise DataError(f"{name} has {got}; expected a class number from 0 or a class name")


def named(
    labels: Sequence[Label], classes: Sequence[str], name_of: Callable[[int], str]
) -> list[str]:
    """Return the class name of every label.

    Args:
        labels: numbers or names.
        classes: the names of the numbers; without any a number is its own name.
        name_of: an item's index -> its name, for messages.

    Raises:
        DataError: a number that has no name, or a name that is none of the classes.
    """
    known = set(classes)
    result = []
    for index, label in enumerate(labels):
        name = str(label)
        if known and isinstance(label, int):
            if label >= len(classes):
                raise DataError(
                    f"{name_of(index)} has the label {label}; expected 0 to {len(classes) - 1}, as "
                    f"there are {len(classes)} classes"
                )
            name = classes[label]
        elif known and name not in known:
            raise DataError(
                f"{name_of(index)} has the label {name!r}, which is not one of the classes"
                f"{did_you_mean(name, classes)}"
            )
        result.append(name)
    return result


# `ObjectPart`: the images of one split of a dataset object, before classes have numbers.


@dataclass(frozen=True, eq=False)
class ObjectPart:
    """The images of one split, or of all.

    Attributes:
        kind: how they were given, in a word, such as `arrays`.
        images: its labels are ignored.
        labels: each image's class number or class name (N,).
        digests: SHA-256 of each image (N, 32).
        classes: the names of the class numbers, where the object has them.
        notes: lines for the user.
    """

    kind: str
    images: Split
    labels: Sequence[Label]
    digests: UInt8[np.ndarray, "N 32"] = field(repr=False)
    classes: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    def named(self, classes: Sequence[str]) -> NamedImages:
        """Return the images with their class names.

        Raises:
            DataError: a label outside of the classes.
        """
        # `assemble` matches the classes of the splits by name, so numbers become names here.
        names = named(self.labels, classes, self.images.name)
        return NamedImages(self.images, names, [row.tobytes() for row in self.digests])


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
