"""Cut images into splits: a pool into three, or validation from train.

Copies, files of one class with the same content, stay together. An earlier rule separated them.
Where it gives another cut, the data set has a fingerprint of its own, so that a run begun with that
rule is not resumed on other splits, and a checkpoint is evaluated on the splits that it had.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Iterable, Mapping, Sequence
from typing import TypeAlias

import numpy as np
from jaxtyping import Int64, UInt64

from vitkit.data.datasets.dataset import Dataset, Split
from vitkit.errors import DataError, SettingError
from vitkit.randomness import hash64

POOL_FRACTIONS: dict[str, float] = {"train": 0.7, "val": 0.1, "test": 0.2}
Cut: TypeAlias = Mapping[str, Int64[np.ndarray, " _"]]
"""Split -> the places of its images in a pool."""


def stratified_split(
    labels: Int64[np.ndarray, " N"],
    fractions: Sequence[float],
    seed: int = 0,
    keys: UInt64[np.ndarray, " N"] | None = None,
    *,
    together: bool = True,
) -> list[Int64[np.ndarray, " M"]]:
    """Cut N images in parts that all have the classes in the same proportions.

    Every part gets round(fraction * N) images. A class gives to each part the whole number below
    its share; what is missing comes from the classes with the largest remainders. A class never
    gives its last image away from the first part. Which images go is decided by
    `hash64(seed, key)`: it depends on nothing but the seed and the keys. Images of one class with
    the same key go to the same part, which may make parts larger or smaller.

    Args:
        labels: class numbers (N,).
        fractions: shares of the parts, positive, summing to 1; the first part takes what is left.
        seed: another seed, another cut.
        keys: one number for each image that stays with it when the order changes, such as the
            first 64 bits of its file's hash; its place where absent.
        together: False lets images with the same key go to different parts.

    Returns:
        For each part its places in `labels`, ascending.

    Raises:
        SettingError: fractions that are not positive or do not sum to 1.
    """
    if min(fractions, default=0) <= 0 or abs(sum(fractions) - 1) > 1e-9:
        raise SettingError(f"fractions must be positive and sum to 1, got {list(fractions)}")
    keys = np.arange(len(labels), dtype=np.uint64) if keys is None else keys
    draws = hash64(seed, keys)
    order = np.lexsort((draws, labels))
    parts: list[Int64[np.ndarray, " M"]] = []
    for last in range(len(fractions) - 1, 0, -1):
        share = fractions[last] / sum(fractions[: last + 1])
        taken = _take_from_each_class(labels[order], share, draws[order] if together else None)
        parts.append(np.sort(order[taken]))
        order = order[~taken]
    return [np.sort(order), *reversed(parts)]


def pool_cuts(labels: Int64[np.ndarray, " N"], digests: Iterable[bytes]) -> tuple[Cut, Cut | None]:
    """Cut one pool of images 70/10/20, stratified, seed 0, by the images' own SHA-256.

    Args:
        labels: class numbers (N,).
        digests: their SHA-256; another order of the images gives the same cut.

    Returns:
        The places of "train", "val" and "test", in which copies are together; and the cut of the
        earlier rule, which separated copies, where that is another one.
    """
    keys = np.frombuffer(b"".join(digest[:8] for digest in digests), ">u8").astype(np.uint64)
    shares = tuple(POOL_FRACTIONS.values())
    now, before = (
        dict(
            zip(
                POOL_FRACTIONS, stratified_split(labels, shares, 0, keys, together=how), strict=True
            )
        )
        for how in (True, False)
    )
    return now, None if _same_cut(now.values(), before.values()) else before


def cut_pool(whole: Split, cut: Cut, dataset: Dataset, before: Cut | None) -> Dataset:
    """Give a data set the splits of a pool.

    Args:
        whole: all images, labelled.
        cut: the places of each split in it.
        dataset: everything but its splits.
        before: the cut of the earlier rule if that is another one; then the data set has a
            fingerprint of its own, and that cut is in `as_before`.
    """
    splits = {name: whole.subset(part) for name, part in cut.items() if len(part)}
    made = dataclasses.replace(dataset, splits=splits, cut=True)
    return made if before is None else _cut_anew(made, cut_pool(whole, before, dataset, None))


def with_validation(dataset: Dataset, fraction: float, seed: int = 0) -> Dataset:
    """The data set with a validation split: its own, or a stratified part of train.

    Args:
        dataset: returned as it is where it has "val".
        fraction: part of train to take, in (0, 1).
        seed: another seed, another part.

    Raises:
        SettingError: a fraction out of range.
        DataError: no train split, or too few images in it to take any.

    Copies in train stay together; where the earlier rule separated some, the data set has
    another fingerprint, and that cut is in `as_before`.
    """
    if "val" in dataset.splits:
        return dataset
    if not 0 < fraction < 1:
        raise SettingError(f"the validation fraction must lie between 0 and 1, got {fraction:g}")
    train = dataset.splits.get("train")
    if train is None:
        raise DataError(f"{dataset.name} has no train split; it has {', '.join(dataset.splits)}")
    shares = (1 - fraction, fraction)
    cut = stratified_split(train.labels, shares, seed)
    if not len(cut[1]):
        raise DataError(
            f"{dataset.name}: train has {len(train)} images, too few to take {fraction:.0%} "
            f"for validation; add images or a val folder"
        )
    made = _with_validation(dataset, cut, seed)
    if dataset.first_copies is None:
        return made
    keys = dataset.first_copies.astype(np.uint64)
    together = stratified_split(train.labels, shares, seed, keys)
    if _same_cut(cut, together) or not len(together[1]):
        return made
    return _cut_anew(_with_validation(dataset, together, seed), made)


def with_validation_of(dataset: Dataset, fingerprint: str, fraction: float) -> Dataset:
    """The data set with the validation split of a run, by today's rule or the earlier one.

    Args:
        dataset: returned as it is where the run was about other data.
        fingerprint: the run's, after its cut.
        fraction: the run's part of train.
    """
    if fingerprint not in (dataset.fingerprint, _copies_together(dataset.fingerprint)):
        return dataset
    now = with_validation(dataset, fraction)
    cuts = (cut for cut in (now, now.as_before) if cut and cut.fingerprint == fingerprint)
    return next(cuts, dataset)


def _with_validation(
    dataset: Dataset, cut: Sequence[Int64[np.ndarray, " _"]], seed: int
) -> Dataset:
    train, (kept, taken) = dataset.splits["train"], cut
    splits = {"train": train.subset(kept), "val": train.subset(taken)}
    note = f"validation: {len(taken):,} of {len(train):,} train images, stratified, seed {seed}"
    return dataclasses.replace(
        dataset,
        splits=splits | {k: v for k, v in dataset.splits.items() if k != "train"},
        notes=(*dataset.notes, note),
        first_copies=None,
        as_before=None,
    )


def _same_cut(
    one: Iterable[Int64[np.ndarray, " _"]], other: Iterable[Int64[np.ndarray, " _"]]
) -> bool:
    return all(map(np.array_equal, one, other))


def _take_from_each_class(
    labels: Int64[np.ndarray, " N"], share: float, draws: UInt64[np.ndarray, " N"] | None
) -> np.ndarray:
    """Which of the images, sorted by class and draw, go: bool (N,), `round(share * N)` of them
    set, or nearly as many where images of one draw have to stay together."""
    _, starts, counts = np.unique(labels, return_index=True, return_counts=True)
    shares = counts * share
    take = np.floor(shares + 1e-9).astype(np.int64)  # a product may be a hair off
    missing = round(round(float(shares.sum()), 6)) - int(take.sum())
    by_remainder = np.argsort(-(shares - take), kind="stable")
    able = by_remainder[(take < counts - 1)[by_remainder]]
    take[able[: max(missing, 0)]] += 1
    if draws is not None:
        take = _moved_to_edges(labels, draws, starts, counts, take)
    rank = np.arange(len(labels)) - np.repeat(starts, counts)
    return np.asarray(rank < np.repeat(take, counts))


def _moved_to_edges(
    labels: Int64[np.ndarray, " N"],
    draws: UInt64[np.ndarray, " N"],
    starts: Int64[np.ndarray, " K"],
    counts: Int64[np.ndarray, " K"],
    take: Int64[np.ndarray, " K"],
) -> Int64[np.ndarray, " K"]:
    """How many of each class go, moved to the nearest edge of a group of the same draw (K,)."""
    changes = (labels[1:] != labels[:-1]) | (draws[1:] != draws[:-1])
    edges = np.flatnonzero(np.concatenate([[True], changes, [True]]))
    place = np.searchsorted(edges, starts + take, "right") - 1
    before = edges[place] - starts
    after = edges[np.minimum(place + 1, len(edges) - 1)] - starts
    # A class keeps its last group in the first part.
    up = (after - take <= take - before) & (after < counts)
    return np.where(before == take, take, np.where(up, after, before))


def _cut_anew(now: Dataset, before: Dataset) -> Dataset:
    """A data set cut by today's rule, under a fingerprint of its own; `before` by the earlier."""
    mark = _copies_together(before.fingerprint)
    return dataclasses.replace(now, fingerprint=mark, as_before=before)


def _copies_together(fingerprint: str) -> str:
    return hashlib.sha256(f"{fingerprint}, copies together".encode()).hexdigest()


def first_copies(digests: Iterable[bytes]) -> Int64[np.ndarray, " N"] | None:
    """For each image the first place of its digest (N,); None where all differ."""
    seen: dict[bytes, int] = {}
    places = [seen.setdefault(digest[:8], place) for place, digest in enumerate(digests)]
    return None if len(seen) == len(places) else np.array(places, np.int64)
