"""In which order the images of a split are trained on: a pure function of (seed, epoch)."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import numpy as np
from jaxtyping import Int64
from torch.utils.data import get_worker_info

from vitkit.data.datasets.dataset import Split, StoredSplit
from vitkit.data.datasets.scan import as_stored
from vitkit.data.sources.remote_shards import RemoteTars, fetch_ahead
from vitkit.errors import SettingError
from vitkit.randomness import hash64, permutation, permutation_by_group

AHEAD = 1 << 16
"""Images among which the next shard is looked for."""
MIXED = -2
"""What a hash is for: the order in which the images of balanced classes come."""


class EpochOrder:
    """One permutation of all images; of those in shards on a web server, shard by shard.

    The order is that of the split, whether or not its pixels are read from a cache. With `balance`
    every class comes as often as any other, and images of the rare ones several times.

    Raises:
        SettingError: `balance` for images that come shard by shard.
    """

    def __init__(self, split: Split, seed: int, *, balance: bool = False) -> None:
        self._seed, self._count = seed, len(split)
        self._labels = split.labels if balance else None
        self._store = remote_store(split)
        if self._store is not None:
            if balance:
                raise SettingError(
                    "balance draws images in any order, and these come shard by shard from a web "
                    "server; download the shards, or leave --balance out"
                )
            stored = as_stored(split)
            assert isinstance(stored, StoredSplit)
            self._shard = self._store.shard[stored.numbers]

    @lru_cache(maxsize=2)  # noqa: B019 - there is one order a run
    def __call__(self, epoch: int) -> Int64[np.ndarray, " N"]:
        """The places of N images in the split, in the order of this epoch."""
        if self._labels is not None:
            return balanced_order(self._seed, epoch, self._labels)
        if self._store is None:
            return permutation(self._seed, epoch, self._count)
        return permutation_by_group(self._seed, epoch, self._shard)

    @lru_cache(maxsize=2)  # noqa: B019 - likewise
    def turns(self, epoch: int) -> Int64[np.ndarray, " N"]:
        """How often the image at each place of the order has come before in this epoch."""
        order = self(epoch)
        if self._labels is None:
            return np.zeros_like(order)
        together = np.argsort(order, kind="stable")
        begins = np.flatnonzero(np.diff(order[together], prepend=-1))
        turns = np.empty_like(order)
        turns[together] = np.arange(len(order)) - np.repeat(
            begins, np.diff(begins, append=len(order))
        )
        return turns

    def fetch_ahead(self, epoch: int, place: int) -> None:
        """Have the shard fetched that comes after the one read at a place of the order.

        Worker processes do that; a thread of the main process would be alive when it forks.
        """
        if self._store is None or get_worker_info() is None:
            return
        coming = self._shard[self(epoch)[place : place + AHEAD]]
        if len(later := coming[coming != coming[0]]):
            fetch_ahead(self._store.shards[later[0]])


def remote_store(split: Split) -> RemoteTars | None:
    """Where the images of a split come from over the network; `None` where they are here."""
    stored = as_stored(split)
    store = stored.store if isinstance(stored, StoredSplit) else None
    return store if isinstance(store, RemoteTars) else None


def balanced_order(
    seed: int, epoch: int, labels: Int64[np.ndarray, " N"]
) -> Int64[np.ndarray, " N"]:
    """N places in which every class that has images comes as often as any other, or once more.

    The images of a rare class come again and again, each as often as any other of it, or once
    more; of a frequent class there are others in every epoch. Which classes come once more changes
    from epoch to epoch, too.
    """
    shuffled = permutation(seed, epoch, len(labels))
    by_class = shuffled[np.argsort(labels[shuffled], kind="stable")]
    _, starts, counts = np.unique(labels[by_class], return_index=True, return_counts=True)
    share, rest = divmod(len(labels), len(counts))
    quotas = share + ((np.arange(len(counts)) + epoch) % len(counts) < rest)
    place = np.arange(len(labels)) - np.repeat(np.cumsum(quotas) - quotas, quotas)
    drawn = by_class[np.repeat(starts, quotas) + place % np.repeat(counts, quotas)]
    return drawn[np.argsort(hash64(seed, epoch, MIXED, np.arange(len(labels))), kind="stable")]


def class_counts(labels: Int64[np.ndarray, " N"], classes: Sequence[str]) -> str:
    """A line on how uneven the classes are, and how often a balanced epoch draws each."""
    counts = np.bincount(labels, minlength=len(classes))
    there = np.flatnonzero(counts)
    fewest, most = there[counts[there].argmin()], there[counts[there].argmax()]
    share = len(labels) / len(there)
    return (
        f"balance: {counts[fewest]:,} ({classes[fewest]}) to {counts[most]:,} ({classes[most]}) "
        f"images a class, each class is drawn {share:,.0f} times an epoch; an image of "
        f"{classes[fewest]} comes {share / counts[fewest]:.1f} times"
    )
