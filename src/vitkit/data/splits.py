"""What an opened data set is: a `Dataset` of `Split`s, and how one split is cut in parts."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, runtime_checkable

import numpy as np
from jaxtyping import Int, Int64, UInt8, UInt64

from vitkit.data.images import decode, printable
from vitkit.data.paths import Paths
from vitkit.data.randomness import hash64
from vitkit.errors import DataError, SettingError

POOL_FRACTIONS: dict[str, float] = {"train": 0.7, "val": 0.1, "test": 0.2}
SPLIT_WORDS = {
    "train": "train",
    "val": "val",
    "valid": "val",
    "validation": "val",
    "test": "test",
}
"""What folders, files and columns call the splits, in lower case."""


@runtime_checkable
class Split(Protocol):
    """One part of a data set: N labelled pictures in a fixed order."""

    @property
    def labels(self) -> Int64[np.ndarray, " N"]:
        """Class numbers (N,)."""

    def __len__(self) -> int:
        """N."""

    def name(self, index: int) -> str:
        """What to call a picture in a message."""

    def read(self, index: int) -> UInt8[np.ndarray, "H W C"]:
        """One picture, (H, W, 3) RGB or (H, W, 1) grey, uint8 [0, 255].

        Raises:
            ImageError: it cannot be read or decoded.
        """

    def subset(self, indices: Int[np.ndarray, " M"]) -> Split:
        """The pictures at `indices`, in that order, under their old names."""

    def relabelled(self, labels: Int64[np.ndarray, " N"]) -> Split:
        """The same pictures under other class numbers (N,)."""


@dataclass(frozen=True, eq=False)
class ArraySplit:
    """Pictures in memory, all of one size."""

    images: UInt8[np.ndarray, "N H W C"]
    """(N, H, W, C) uint8, C 3 for RGB or 1 for grey."""
    labels: Int64[np.ndarray, " N"]
    """Class numbers (N,)."""
    origin: str
    """Where they come from, such as "digits/train"."""
    numbers: Int64[np.ndarray, " N"] | None = None
    """Each picture's number at the origin; its place here where absent."""

    def __len__(self) -> int:
        return len(self.images)

    def name(self, index: int) -> str:
        return f"{self.origin}[{index if self.numbers is None else self.numbers[index]}]"

    def read(self, index: int) -> UInt8[np.ndarray, "H W C"]:
        return self.images[index]

    def subset(self, indices: Int[np.ndarray, " M"]) -> ArraySplit:
        numbers = np.arange(len(self)) if self.numbers is None else self.numbers
        return ArraySplit(self.images[indices], self.labels[indices], self.origin, numbers[indices])

    def relabelled(self, labels: Int64[np.ndarray, " N"]) -> ArraySplit:
        return dataclasses.replace(self, labels=labels)


@dataclass(frozen=True, eq=False)
class FileSplit:
    """Pictures in files, decoded when they are read."""

    paths: Paths
    labels: Int64[np.ndarray, " N"]
    """Class numbers (N,)."""
    root: Path
    """The folder that names are told from."""
    lines: Int64[np.ndarray, " N"] | None = None
    """Each picture's line in the list that names it, where there is one."""

    def __len__(self) -> int:
        return len(self.paths)

    def name(self, index: int) -> str:
        name = printable(self.paths[index].relative_to(self.root).as_posix())
        return name if self.lines is None else f"{name} (line {self.lines[index]})"

    def read(self, index: int) -> UInt8[np.ndarray, "H W 3"]:
        return decode(self.paths[index], name=self.name(index))

    def subset(self, indices: Int[np.ndarray, " M"]) -> FileSplit:
        lines = None if self.lines is None else self.lines[indices]
        return FileSplit(self.paths.take(indices), self.labels[indices], self.root, lines)

    def relabelled(self, labels: Int64[np.ndarray, " N"]) -> FileSplit:
        return dataclasses.replace(self, labels=labels)


@runtime_checkable
class Store(Protocol):
    """Encoded pictures inside larger files, told by their number.

    It can be pickled, and used by several threads and by forked processes at once.
    """

    def name(self, number: int) -> str:
        """What to call a picture in a message."""

    def encoded(self, number: int) -> bytes:
        """The picture's file, as it was stored.

        Raises:
            ImageError: it is not there, or cannot be read.
        """


@dataclass(frozen=True, eq=False)
class StoredSplit:
    """Pictures in a `Store`, decoded when they are read."""

    store: Store
    labels: Int64[np.ndarray, " N"]
    """Class numbers (N,)."""
    numbers: Int64[np.ndarray, " N"]
    """Each picture's number in the store."""

    def __len__(self) -> int:
        return len(self.numbers)

    def name(self, index: int) -> str:
        return printable(self.store.name(int(self.numbers[index])))

    def read(self, index: int) -> UInt8[np.ndarray, "H W 3"]:
        return decode(self.store.encoded(int(self.numbers[index])), name=self.name(index))

    def subset(self, indices: Int[np.ndarray, " M"]) -> StoredSplit:
        return StoredSplit(self.store, self.labels[indices], self.numbers[indices])

    def relabelled(self, labels: Int64[np.ndarray, " N"]) -> StoredSplit:
        return dataclasses.replace(self, labels=labels)


@dataclass(frozen=True, eq=False)
class Dataset:
    """An opened data set."""

    name: str
    """Its name, or its folder's."""
    classes: tuple[str, ...]
    """Class names; a label is a place in this tuple, in every split."""
    splits: dict[str, Split]
    """"train", "val" and "test", those that are there."""
    fingerprint: str
    """SHA-256 (hex) of classes, labels and pictures as they were found; cutting and skipping
    afterwards do not change it."""
    notes: tuple[str, ...] = ()
    """What the user should know, a line each."""
    cut: bool = False
    """Whether test was cut from one pool of pictures here, and not set apart by the user."""


def fingerprint(
    classes: Sequence[str], parts: Mapping[str, tuple[Int64[np.ndarray, " N"], Iterable[bytes]]]
) -> str:
    """SHA-256 (hex) over class names and each part's labels and pictures' digests, in order."""
    total = hashlib.sha256(json.dumps([*classes]).encode())
    for part, (labels, digests) in sorted(parts.items()):
        total.update(json.dumps([part, len(labels)]).encode())
        total.update(labels.astype("<i8").tobytes())
        for digest in digests:
            total.update(digest)
    return total.hexdigest()


def stratified_split(
    labels: Int64[np.ndarray, " N"],
    fractions: Sequence[float],
    seed: int = 0,
    keys: UInt64[np.ndarray, " N"] | None = None,
) -> list[Int64[np.ndarray, " M"]]:
    """Cut N pictures in parts that all have the classes in the same proportions.

    Every part gets round(fraction * N) pictures. A class gives to each part the whole number below
    its share; what is missing comes from the classes with the largest remainders. A class never
    gives its last picture away from the first part. Which pictures go is decided by
    `hash64(seed, key)`: it depends on nothing but the seed and the keys.

    Args:
        labels: class numbers (N,).
        fractions: shares of the parts, positive, summing to 1; the first part takes what is left.
        seed: another seed, another cut.
        keys: one number for each picture that stays with it when the order changes, such as the
            first 64 bits of its file's hash; its place where absent.

    Returns:
        For each part its places in `labels`, ascending.

    Raises:
        SettingError: fractions that are not positive or do not sum to 1.
    """
    if min(fractions, default=0) <= 0 or abs(sum(fractions) - 1) > 1e-9:
        raise SettingError(f"fractions must be positive and sum to 1, got {list(fractions)}")
    keys = np.arange(len(labels), dtype=np.uint64) if keys is None else keys
    order = np.lexsort((hash64(seed, keys), labels))
    parts: list[Int64[np.ndarray, " M"]] = []
    for last in range(len(fractions) - 1, 0, -1):
        share = fractions[last] / sum(fractions[: last + 1])
        taken = _take_from_each_class(labels[order], share)
        parts.append(np.sort(order[taken]))
        order = order[~taken]
    return [np.sort(order), *reversed(parts)]


def cut_pool(whole: Split, digests: Iterable[bytes]) -> dict[str, Split]:
    """One pool of pictures cut 70/10/20, stratified, seed 0, by the pictures' own SHA-256.

    Args:
        whole: all pictures, labelled.
        digests: their SHA-256; another order of the pictures gives the same cut.

    Returns:
        "train", "val" and "test", any of which may be empty.
    """
    keys = np.frombuffer(b"".join(digest[:8] for digest in digests), ">u8").astype(np.uint64)
    parts = stratified_split(whole.labels, tuple(POOL_FRACTIONS.values()), 0, keys)
    return {name: whole.subset(part) for name, part in zip(POOL_FRACTIONS, parts, strict=True)}


def with_validation(dataset: Dataset, fraction: float, seed: int = 0) -> Dataset:
    """The data set with a validation split: its own, or a stratified part of train.

    Args:
        dataset: returned as it is where it has "val".
        fraction: part of train to take, in (0, 1).
        seed: another seed, another part.

    Raises:
        SettingError: a fraction out of range.
        DataError: no train split, or too few pictures in it to take any.
    """
    if "val" in dataset.splits:
        return dataset
    if not 0 < fraction < 1:
        raise SettingError(f"the validation fraction must lie between 0 and 1, got {fraction:g}")
    train = dataset.splits.get("train")
    if train is None:
        raise DataError(f"{dataset.name} has no train split; it has {', '.join(dataset.splits)}")
    kept, taken = stratified_split(train.labels, (1 - fraction, fraction), seed)
    if len(taken) == 0:
        raise DataError(
            f"{dataset.name}: train has {len(train)} pictures, too few to take {fraction:.0%} "
            f"for validation; add pictures or a val folder"
        )
    splits = {"train": train.subset(kept), "val": train.subset(taken)}
    note = f"validation: {len(taken):,} of {len(train):,} train pictures, stratified, seed {seed}"
    return dataclasses.replace(
        dataset,
        splits=splits | {k: v for k, v in dataset.splits.items() if k != "train"},
        notes=(*dataset.notes, note),
    )


def _take_from_each_class(labels: Int64[np.ndarray, " N"], share: float) -> np.ndarray:
    """Which of the pictures, sorted by class, go: bool (N,), `round(share * N)` of them set."""
    _, starts, counts = np.unique(labels, return_index=True, return_counts=True)
    shares = counts * share
    take = np.floor(shares + 1e-9).astype(np.int64)  # a product may be a hair off
    missing = round(round(float(shares.sum()), 6)) - int(take.sum())
    by_remainder = np.argsort(-(shares - take), kind="stable")
    able = by_remainder[(take < counts - 1)[by_remainder]]
    take[able[: max(missing, 0)]] += 1
    rank = np.arange(len(labels)) - np.repeat(starts, counts)
    return np.asarray(rank < np.repeat(take, counts))
