"""Datasets passed as Python objects: arrays, pairs, torch's map-style datasets, `datasets`."""

from __future__ import annotations

import hashlib
import os
import re
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import filterfalse
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import numpy as np
from jaxtyping import Int, Int64, UInt8

from vitkit.data.datasets import pixel_cache, splitting
from vitkit.data.datasets.dataset import (
    SPLIT_WORDS,
    ArraySplit,
    Dataset,
    FileSplit,
    array_digests,
    numbered_path,
)
from vitkit.data.datasets.split import Split
from vitkit.data.images.read import as_array, as_bytes, as_pixels
from vitkit.data.sources import huggingface
from vitkit.errors import DataError, Interrupted
from vitkit.io.results import GIVEN, MEMORY_PREFIX
from vitkit.messages import did_you_mean, progress_bar

ACCEPTED = (
    "a path or a name, (images, labels) as arrays, a list of (path, label) or (image, label), a "
    "map-style torch Dataset, a datasets.Dataset, or a dict of these by split"
)


@runtime_checkable
class MapStyle(Protocol):
    """Anything with a length and items (image, label): a `torch.utils.data.Dataset`, or a list."""

    def __len__(self) -> int:
        """Return the number of items N."""

    def __getitem__(self, index: int, /) -> Any:
        """Return the item of an index in [0, N): (image, label), or a mapping of both."""


@dataclass(frozen=True, eq=False)
class ObjectData:
    """A dataset object whose items were read once: labels and digests, by split."""

    name: str
    """How it was given, such as `arrays`, or the name of its class."""
    parts: Mapping[str, huggingface.ObjectPart]
    """By split, or all of it as `POOL`."""
    classes: tuple[str, ...] = ()
    """The names of the class numbers, where they are known."""
    notes: tuple[str, ...] = ()
    """Lines for the user."""

    @property
    def address(self) -> str:
        """Its name in the settings: how it was given, and a digest of its content."""
        digest = hashlib.sha256(repr(self.classes).encode())
        for split, part in self.parts.items():
            digest.update(repr((split, part.labels)).encode())
            digest.update(part.digests.tobytes())
        return f"{MEMORY_PREFIX}{self.name}-{digest.hexdigest()[:8]}"

    def with_classes(self, classes: Sequence[str]) -> ObjectData:
        """Name the class numbers by `classes`, where the data have nothing but numbers."""
        labels = set[int | str]().union(*(part.labels for part in self.parts.values()))
        is_named = self.classes or {*map(type, labels)} != {int}
        if is_named or {*map(str, labels)} <= {*classes}:
            return self
        return replace(self, classes=tuple(classes))

    def as_split(self, split: str) -> ObjectData:
        """Return images that belong to no split as one; an object with splits as it is."""
        # Data to evaluate are one split: they must not be divided into three.
        if set(self.parts) != {splitting.POOL}:
            return self
        return replace(self, parts={split: self.parts[splitting.POOL]})

    def open(self, ignore_extra_classes: bool = False, *, where: str = "") -> Dataset:
        """Return the dataset; images without a split are divided 70/10/20.

        Args:
            ignore_extra_classes: leave out classes of val and test that train lacks.
            where: the file or address that the object was read from, for messages.

        Raises:
            DataError: labels outside of the classes, or as `assemble`.
        """
        return splitting.assemble(
            self.name,
            where or self.name,
            {split: _named(part, self.classes) for split, part in self.parts.items()},
            classes=self.classes,
            ignore_extra_classes=ignore_extra_classes,
            notes=self.notes,
        )


def _named(part: huggingface.ObjectPart, classes: Sequence[str]) -> splitting.NamedImages:
    """Return the images with their class names; without `classes` a number is its own name."""
    known = set(classes)
    names = []
    for index, label in enumerate(part.labels):
        name = str(label)
        if known and isinstance(label, int):
            name = classes[label] if label < len(classes) else ""
        if known and name not in known:
            raise DataError(
                f"{part.images.name(index)} has the label {label!r}; expected 0 to "
                f"{len(classes) - 1}, or one of the {len(classes)} class names"
                f"{did_you_mean(str(label), classes)}"
            )
        names.append(name)
    return splitting.NamedImages(part.images, names, [*map(bytes, part.digests)])


def read_object(data: object, classes: Sequence[str] = ()) -> ObjectData:
    """Read a dataset object once: the label and the digest of every item.

    Args:
        data: one of the kinds that `open_dataset` lists, or `Tables` that were opened from files.
        classes: names of the class numbers; those of the object itself where absent.

    Raises:
        DataError: an object of another kind; items that cannot be used, by index; or classes that
            are no list of different names.
    """
    is_opened = isinstance(data, huggingface.Tables)
    given, notes = "", list[str]()
    if isinstance(data, huggingface.Tables):
        by_split, given, notes = data.splits, data.name, [*data.notes]
    else:
        by_split = _by_split(data)
    parts: dict[str, huggingface.ObjectPart] = {}
    names: dict[str, None] = {}
    for split, value in by_split.items():
        name = given or _name(value)
        names[name] = None
        origin = f"{name}/{split}" if split else name
        if not is_opened and not huggingface.is_hub_dataset(value):
            parts[split] = _part(value, origin)
            continue
        rows = huggingface.read_table(value, origin, is_opened=is_opened)
        # benchmarks may publish test images without labels; the other splits are complete
        if split == "test" and len(by_split) > 1 and {*rows.labels} == {None}:
            notes.append("test has no labels and is left out")
            continue
        labels = [as_label(label, rows.images.name(i)) for i, label in enumerate(rows.labels)]
        parts[split] = rows._replace(labels=labels)
    found = dict.fromkeys(part.classes for part in parts.values() if part.classes)
    known = tuple(classes) or next(iter(found), ())
    # images are matched by the name of their class, so two numbers would become one class; the
    # letters of a text would be taken for names
    is_list = not isinstance(classes, str) and all(isinstance(name, str) for name in known)
    if not is_list or len({*known}) < len(known) or (len(found) > 1 and not classes):
        shown = classes or " and ".join(map(str, found))
        raise DataError(
            f"classes = {shown}: expected different names, such as ['cat', 'dog'], the same in all "
            "splits"
        )
    return ObjectData("-".join(names), parts, known, tuple(notes))


def _by_split(data: object) -> Mapping[str, Any]:
    """Return the object of each split of a dict; `POOL` for any other object."""
    if not isinstance(data, Mapping):
        return {splitting.POOL: data}
    splits: dict[str, Any] = {}
    for key, value in data.items():
        splits[SPLIT_WORDS.get(str(key).lower(), splitting.POOL)] = value
    if splitting.POOL in splits or not 0 < len(splits) == len(data):
        keys = [*map(str, data)]
        near = did_you_mean(next(filterfalse(SPLIT_WORDS.__contains__, keys), ""), SPLIT_WORDS)
        raise DataError(f"a dict of {keys}{near}; expected train, val and test, each at most once")
    return splits


def _name(data: object) -> str:
    """Return the name of an object for messages and addresses."""
    if _is_arrays(data):
        return "arrays"
    if _is_pairs(data):
        return "pairs"
    if huggingface.is_hub_dataset(data):
        return "datasets"
    if isinstance(data, list | tuple):
        return "items"
    # a class of a notebook may have any name, and the name becomes part of a folder's
    return re.sub(r"\W+", "-", type(data).__name__)


def _part(data: Any, origin: str) -> huggingface.ObjectPart:
    """Read the images of one split."""
    if _is_arrays(data):
        return _read_arrays(data[0], data[1], origin)
    if _is_pairs(data):
        return _read_pairs(data, origin)
    _refuse_other_kinds(data)
    return _read_items(data, origin)


def _refuse_other_kinds(data: Any) -> None:
    """Raise `DataError` for objects without indexed items: streams, loaders, bare arrays."""
    # By their attributes: neither torch nor pandas is imported for this.
    kind = type(data).__name__
    is_stream = hasattr(data, "__iter__") and not hasattr(data, "__getitem__")
    if hasattr(data, "batch_sampler") and hasattr(data, "dataset"):
        cure = f"pass its dataset: {kind.lower()}.dataset"
    elif hasattr(data, "iloc"):
        cure = "pass pairs: list(zip(table.path, table.label))"
    elif hasattr(data, "shape") and hasattr(data, "dtype"):
        cure = f"it has the shape {tuple(data.shape)}; pass (images, labels)"
    elif is_stream or any(base.__name__ == "IterableDataset" for base in type(data).__mro__):
        cure = (
            "it can only be read in one order; pass list(data) where it fits into memory, or write "
            "its images as WebDataset shards and pass wds:SHARDS.tar"
        )
    elif isinstance(data, str | bytes | Mapping) or not isinstance(data, MapStyle):
        cure = f"expected {ACCEPTED}"
    else:
        return
    raise DataError(f"data is a {kind}; {cure}")


def find_object(address: str) -> ObjectData | None:
    """Return the object of an address; None for any other address, and for an opened dataset."""
    data = GIVEN.get(address)
    if isinstance(data, ObjectData):
        return data
    return None


def as_label(label: Any, name: str) -> int | str:
    """Return a label as a class number from 0 or a class name.

    Args:
        label: a whole number of any kind (Python, numpy, a tensor without axes), or text.
        name: the item's name in messages.

    Raises:
        DataError: none, a float, a negative number, empty text, or several values.
    """
    # A number of numpy or torch has a shape, too: ().
    shape = getattr(label, "shape", ())
    value = label.item() if hasattr(label, "item") and not len(shape) else label
    # True is an int, too; as in tables it is the class 'True', not class 1.
    if isinstance(value, bool):
        return str(value)
    if (isinstance(value, int) and value >= 0) or (isinstance(value, str) and value.strip()):
        return value
    got = f"the label {value!r:.80}"
    if len(shape):
        got = f"a label of the shape {tuple(shape)}; for probabilities or one-hot pass the argmax"
    elif value in (None, ""):
        got = "no label"
    raise DataError(f"{name} has {got}; expected a class number from 0 or a class name")


# Images and labels in two arrays, or paths and labels in pairs.


def _is_arrays(data: object) -> bool:
    """Return True for (images, labels), the images an array or a tensor of all of them."""
    return isinstance(data, tuple) and len(data) == 2 and len(getattr(data[0], "shape", ())) > 0


def _read_arrays(images: Any, labels: Any, origin: str) -> huggingface.ObjectPart:
    """Return the images of an array; arrays that are uint8 already are not copied."""
    pixels, expected = images, "(N, H, W), (N, H, W, 1) or (N, H, W, 3)"
    if not isinstance(images, np.ndarray):
        pixels, expected = as_array(images, origin), "(N, H, W), (N, 1, H, W) or (N, 3, H, W)"
        if pixels.ndim == 4:
            pixels = np.moveaxis(pixels, 1, -1)
    if pixels.ndim == 3:
        pixels = pixels[..., None]
    shape = tuple(getattr(labels, "shape", ()))
    if isinstance(labels, Sequence) and not isinstance(labels, str):
        shape = (len(labels),)
    is_images = pixels.ndim == 4 and pixels.shape[-1] in (1, 3) and pixels.size > 0
    if not is_images or shape != pixels.shape[:1]:
        raise DataError(
            f"{origin}: images of the shape {tuple(images.shape)} and labels of the shape {shape}; "
            f"expected {expected}, none of them 0, and labels (N,), for one-hot ones the argmax; "
            "for images of several sizes pass a list of (image, label)"
        )
    values = [as_label(label, f"{origin}[{index}]") for index, label in enumerate(labels)]
    pixels = np.ascontiguousarray(as_bytes(pixels, origin))
    digests = np.frombuffer(b"".join(array_digests(pixels)), np.uint8).reshape(-1, 32)
    return huggingface.ObjectPart(
        ArraySplit(pixels, np.zeros(len(pixels), np.int64), origin), values, digests
    )


def _is_pairs(data: object) -> bool:
    """Return True for a list of (path, label)."""
    return isinstance(data, list | tuple) and len(data) > 0 and _is_pair(data[0])


def _is_pair(item: Any) -> bool:
    is_two = isinstance(item, list | tuple) and len(item) == 2
    return is_two and isinstance(item[0], str | os.PathLike)


def _read_pairs(pairs: Sequence[Any], origin: str) -> huggingface.ObjectPart:
    """Return the images of a list of (path, label); the files are read when they are needed."""
    paths: list[str] = []
    labels: list[int | str] = []
    for index, pair in enumerate(pairs):
        name = f"{origin}[{index}]"
        if not _is_pair(pair):
            raise DataError(f"{name} is {pair!r:.80}; expected (path, label)")
        paths.append(os.path.abspath(os.path.expanduser(pair[0])))
        labels.append(as_label(pair[1], name))
    # names in messages are relative to the folder that all files are in
    root = Path(os.path.commonpath([os.path.dirname(path) for path in paths]))
    split = FileSplit(paths, np.zeros(len(paths), np.int64), root)
    return huggingface.ObjectPart(split, labels, np.asarray(pixel_cache.file_digests(paths)))


# Map-style datasets: every item is read once when the dataset is opened, for its digest.

ONE_AT_A_TIME = threading.Lock()
"""Held while an item is read: torch's datasets are never called by two threads at once."""


def _image_and_label(items: MapStyle, index: int, name: str) -> tuple[Any, Any]:
    """Return the two parts of an item.

    Raises:
        DataError: the dataset raises at this index, or the item is neither a pair nor a mapping
            with an image and a label.
    """
    try:
        item = items[index]
    except Interrupted:
        raise
    except Exception as error:  # whatever a user's own dataset raises
        raise DataError(f"{name} raised {type(error).__name__}: {error}") from error
    if isinstance(item, Mapping):
        image = next(filter(item.__contains__, huggingface.IMAGE_NAMES), None)
        label = next(filter(item.__contains__, huggingface.LABEL_NAMES), None)
        if image is not None and label is not None:
            return item[image], item[label]
        raise DataError(
            f"{name} is a mapping of {[*item]!r:.80}; expected one of the keys "
            f"{', '.join(huggingface.IMAGE_NAMES)} and one of {', '.join(huggingface.LABEL_NAMES)}"
        )
    if isinstance(item, tuple | list) and len(item) == 2:
        return item[0], item[1]
    raise DataError(f"{name} is a {type(item).__name__}; expected (image, label)")


@dataclass(frozen=True, eq=False)
class ItemSplit(Split):
    """Images of a map-style dataset, one item each."""

    items: MapStyle
    labels: Int64[np.ndarray, " N"]
    """Class numbers (N,)."""
    origin: str
    """Name of the dataset, for messages."""
    numbers: Int64[np.ndarray, " N"]
    """Each image's index in `items`."""
    digests: UInt8[np.ndarray, "M 32"]
    """SHA-256 of each item's pixels (M items), as it was when the dataset was opened."""

    def __len__(self) -> int:
        return len(self.numbers)

    @property
    def in_memory(self) -> bool:
        if not isinstance(self.items, list | tuple):
            return False
        # A list of paths or of files' bytes is decoded at every reading.
        image, _ = _image_and_label(self.items, 0, self.origin)
        return not isinstance(image, str | bytes | os.PathLike)

    def name(self, index: int) -> str:
        return f"{self.origin}[{self.numbers[index]}]"

    def path(self, index: int) -> str:
        return numbered_path(self.origin, int(self.numbers[index]))

    def read(self, index: int) -> UInt8[np.ndarray, "H W C"]:
        number = int(self.numbers[index])
        name = self.name(index)
        with ONE_AT_A_TIME:
            image, _ = _image_and_label(self.items, number, name)
        pixels = as_pixels(image, name)
        # A run must read the images that were fingerprinted, or it could not be repeated.
        if _pixels_digest(pixels) != self.digests[number].tobytes():
            raise DataError(
                f"{name} is another image than when the data were opened; leave random changes "
                "out of the dataset: training makes its own (flip, crop_scale, aa ...), and "
                "transform=FUNCTION adds yours"
            )
        return pixels

    def subset(self, indices: Int[np.ndarray, " M"]) -> ItemSplit:
        return replace(self, labels=self.labels[indices], numbers=self.numbers[indices])

    def relabelled(self, labels: Int64[np.ndarray, " N"]) -> ItemSplit:
        return replace(self, labels=labels)


def _pixels_digest(pixels: UInt8[np.ndarray, "H W C"]) -> bytes:
    """Return the SHA-256 of an image's shape and pixels."""
    # 2 x 3 and 3 x 2 pixels may have the same bytes
    digest = hashlib.sha256(repr(pixels.shape).encode())
    digest.update(np.ascontiguousarray(pixels).data)
    return digest.digest()


def _read_items(items: MapStyle, origin: str) -> huggingface.ObjectPart:
    """Read every item once: its label, and the digest of its pixels."""
    count = len(items)
    digests = np.zeros((count, 32), np.uint8)
    labels: list[int | str] = []
    with progress_bar(count, f"reading {origin}") as advance:
        for index in range(count):
            name = f"{origin}[{index}]"
            image, label = _image_and_label(items, index, name)
            digests[index] = np.frombuffer(_pixels_digest(as_pixels(image, name)), np.uint8)
            labels.append(as_label(label, name))
            advance(1)
    split = ItemSplit(items, np.zeros(count, np.int64), origin, np.arange(count), digests)
    return huggingface.ObjectPart(split, labels, digests, _classes_of(items))


def _classes_of(data: Any) -> tuple[str, ...]:
    """Return the class names that a dataset has as `classes`, as torchvision's do; or none."""
    # for a `Subset`, as of `random_split`, the classes of the whole dataset
    while not hasattr(data, "classes") and hasattr(data, "dataset"):
        data = data.dataset
    own = getattr(data, "classes", ())
    if isinstance(own, list | tuple) and all(isinstance(name, str) for name in own):
        return tuple(own)
    return ()
