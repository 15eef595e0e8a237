"""Open datasets that are Python objects, and keep them while a run is made of them."""

from __future__ import annotations

import hashlib
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

from vitkit.data.datasets.build import POOL, assemble
from vitkit.data.datasets.dataset import SPLIT_WORDS, Dataset
from vitkit.data.sources.objects.arrays import is_arrays, is_pairs, read_arrays, read_pairs
from vitkit.data.sources.objects.hub_dataset import is_hub_dataset, is_unlabelled, read_hub_dataset
from vitkit.data.sources.objects.item_split import read_items
from vitkit.data.sources.objects.items import MapStyle
from vitkit.data.sources.objects.object_part import ObjectPart
from vitkit.errors import DataError
from vitkit.io.import_path import MEMORY_PREFIX, find_given, given, is_given
from vitkit.messages import did_you_mean

ACCEPTED = (
    "a path or a name, (images, labels) as arrays, a list of (path, label) or (image, label), a "
    "map-style torch Dataset, a datasets.Dataset, or a dict of these by split"
)


@dataclass(frozen=True, eq=False)
class ObjectData:
    """A dataset object whose items were read once: labels and digests, by split.

    Attributes:
        name: how it was given, such as `arrays`, or the name of its class.
        parts: by split, or all of it as `POOL`.
        classes: the names of the class numbers, where they are known.
        notes: lines for the user.
    """

    name: str
    parts: Mapping[str, ObjectPart]
    classes: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def address(self) -> str:
        """Its name in the settings: how it was given, and a digest of its content."""
        digest = hashlib.sha256(repr(self.classes).encode())
        for split, part in self.parts.items():
            digest.update(repr((split, part.labels)).encode())
            digest.update(part.digests.tobytes())
        return f"{MEMORY_PREFIX}{self.name}-{digest.hexdigest()[:8]}"

    @property
    def class_names(self) -> set[str]:
        """The labels as text."""
        return {str(label) for part in self.parts.values() for label in part.labels}

    @property
    def is_numbered(self) -> bool:
        """True if all labels are class numbers and nothing names them."""
        return not self.classes and all(
            isinstance(label, int) for part in self.parts.values() for label in part.labels
        )

    def as_split(self, split: str) -> ObjectData:
        """Return images that belong to no split as one; an object with splits as it is."""
        # Data to evaluate are one split: they must not be divided into three.
        if set(self.parts) != {POOL}:
            return self
        return replace(self, parts={split: self.parts[POOL]})

    def open(self, *, ignore_extra_classes: bool = False) -> Dataset:
        """Return the dataset; images without a split are divided 70/10/20.

        Raises:
            DataError: labels outside of the classes, or as `build.assemble`.
        """
        notes = [*self.notes, *(note for part in self.parts.values() for note in part.notes)]
        return assemble(
            self.name,
            self.name,
            {split: part.named(self.classes) for split, part in self.parts.items()},
            classes=self.classes,
            ignore_extra_classes=ignore_extra_classes,
            notes=notes,
        )


def read_object(data: object, classes: Sequence[str] = ()) -> ObjectData:
    """Read a dataset object once: the label and the digest of every item.

    Args:
        data: one of the kinds that `open_dataset` lists.
        classes: names of the class numbers; those of the object itself where absent.

    Raises:
        DataError: an object of another kind; items that cannot be used, by index; or classes that
            are no list of different names.
    """
    # A string is a sequence, too: its letters would be taken for class names.
    if isinstance(classes, str) or not all(isinstance(name, str) for name in classes):
        raise DataError(f"classes = {classes!r}: expected a list of names such as ['cat', 'dog']")
    notes: list[str] = []
    parts = _splits(data, notes) if isinstance(data, Mapping) else {POOL: _part(data, _name(data))}
    names = dict.fromkeys(part.kind for part in parts.values())
    found = dict.fromkeys(part.classes for part in parts.values() if part.classes)
    if len(found) > 1 and not classes:
        one, other = [*found][:2]
        raise DataError(f"the splits have other classes: {one} and {other}; expected the same")
    known = tuple(classes) or next(iter(found), ())
    name = "-".join(names)
    # images are matched by the name of their class, so two numbers would become one class
    repeated = [known_name for known_name, count in Counter(known).items() if count > 1]
    if repeated:
        raise DataError(
            f"{name}: the class name {repeated[0]!r} occurs twice; give each class its own name"
        )
    return ObjectData(name, parts, known, tuple(notes))


def _splits(data: Mapping[Any, Any], notes: list[str]) -> dict[str, ObjectPart]:
    """Return the parts of a dict of splits; add a line to `notes` where one is left out."""
    parts: dict[str, ObjectPart] = {}
    for key, value in data.items():
        split = SPLIT_WORDS.get(str(key).lower())
        if split is None:
            near = did_you_mean(str(key), SPLIT_WORDS)
            raise DataError(f"there is no split {key!r}{near}; expected train, val or test")
        if split in parts:
            raise DataError(f"two entries of the dict are the split {split}; keep one")
        if isinstance(value, Mapping):
            raise DataError(f"the split {key!r} is a dict; expected {ACCEPTED}")
        origin = f"{_name(value)}/{split}"
        # benchmarks may publish test images without labels; the other splits are complete
        may_lack = split == "test" and len(data) > 1 and is_hub_dataset(value)
        if may_lack and is_unlabelled(value, origin):
            notes.append("test has no labels and is left out")
            continue
        parts[split] = _part(value, origin)
    if not parts:
        raise DataError("the dict of splits is empty; expected train, val or test")
    return parts


def _name(data: object) -> str:
    """Return the name of an object for messages and addresses."""
    if is_arrays(data):
        return "arrays"
    if is_pairs(data):
        return "pairs"
    if is_hub_dataset(data):
        return "datasets"
    if isinstance(data, list | tuple):
        return "items"
    # a class of a notebook may have any name, and the name becomes part of a folder's
    return re.sub(r"\W+", "-", type(data).__name__)


def _part(data: Any, origin: str) -> ObjectPart:
    """Read the images of one split."""
    if is_arrays(data):
        images, labels = data
        return read_arrays(images, labels, origin)
    if is_pairs(data):
        return read_pairs(data, origin)
    if is_hub_dataset(data):
        return read_hub_dataset(data, origin)
    _refuse_other_kinds(data)
    split, labels, notes = read_items(data, origin)
    return ObjectPart(_name(data), split, labels, split.digests, _classes_of(data), tuple(notes))


def _classes_of(data: object) -> tuple[str, ...]:
    """Return the class names that a dataset has as `classes`, as torchvision's do; or none."""
    # for a `Subset`, as of `random_split`, the classes of the whole dataset
    while not hasattr(data, "classes") and hasattr(data, "dataset"):
        data = data.dataset
    own = getattr(data, "classes", ())
    is_names = isinstance(own, list | tuple) and all(isinstance(name, str) for name in own)
    return tuple(own) if is_names else ()


def _refuse_other_kinds(data: object) -> None:
    """Raise `DataError` for objects without indexed items: streams, loaders, bare arrays."""
    # By their attributes: neither torch nor pandas is imported for this.
    kind = type(data).__name__
    if hasattr(data, "batch_sampler") and hasattr(data, "dataset"):
        raise DataError(f"data is a {kind}; pass its dataset: {kind.lower()}.dataset")
    if hasattr(data, "iloc"):
        raise DataError(f"data is a {kind}; pass pairs: list(zip(table.path, table.label))")
    if hasattr(data, "shape") and hasattr(data, "dtype"):
        raise DataError(
            f"data is one {kind} of the shape {tuple(data.shape)}; pass (images, labels)"
        )
    is_stream = hasattr(data, "__iter__") and not hasattr(data, "__getitem__")
    if is_stream or any(base.__name__ == "IterableDataset" for base in type(data).__mro__):
        raise DataError(
            f"data is a {kind}, which can only be read in one order; pass list(data) where it fits "
            "into memory, or write its images as WebDataset shards and pass wds:SHARDS.tar"
        )
    if isinstance(data, str | bytes) or not isinstance(data, MapStyle):
        raise DataError(f"data is a {kind}; expected {ACCEPTED}")


@contextmanager
def kept(data: ObjectData | Dataset) -> Iterator[str]:
    """Keep a dataset under an address while the block runs; yields the address."""
    if isinstance(data, Dataset):
        address = f"{MEMORY_PREFIX}{data.name}-{data.fingerprint[:8]}"
    else:
        address = data.address
    with given({address: data}):
        yield address


def find_object(address: str) -> ObjectData | None:
    """Return the object of an address; None for any other address, and for an opened dataset."""
    data = find_given(address) if is_given(address) else None
    return data if isinstance(data, ObjectData) else None


def open_kept(address: str, *, ignore_extra_classes: bool = False) -> Dataset:
    """Return the dataset of an address.

    Raises:
        DataError: the call did not pass it.
    """
    if not is_given(address):
        raise DataError(
            f"{address} stands for data that were passed from Python and are not stored; pass the "
            "same object again: vitkit.train(data, resume=RUN), vitkit.evaluate(RUN, data)"
        )
    data = find_given(address)
    if isinstance(data, Dataset):
        return data
    opened: Dataset = data.open(ignore_extra_classes=ignore_extra_classes)
    return opened
