"""The interface of a split: what a new source gets for free, and what wrappers hand on."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from PIL import Image

from vitkit.data.datasets.dataset import ArraySplit, Dataset, FileSplit, Store, StoredSplit
from vitkit.data.datasets.pixel_cache import cached
from vitkit.data.datasets.split import Split
from vitkit.data.loading.batch import EpochOrder


class Generated(Split):
    """Grey images made of their number: a source with nothing but the abstract methods."""

    def __init__(self, labels: np.ndarray) -> None:
        self.labels = labels

    def __len__(self) -> int:
        return len(self.labels)

    def name(self, index: int) -> str:
        return f"generated {index}"

    def read(self, index: int) -> np.ndarray:
        return np.full((4, 4, 1), index, np.uint8)

    def subset(self, indices: np.ndarray) -> Split:
        return Generated(self.labels[indices])

    def relabelled(self, labels: np.ndarray) -> Split:
        return Generated(labels)


class Far(Store):
    """Two remote files of three images each."""

    def __init__(self) -> None:
        self.asked: list[list[int]] = []

    is_remote = True

    def name(self, number: int) -> str:
        return f"far {number}"

    def encoded(self, number: int) -> bytes:
        raise AssertionError("not read here")

    def shards(self, numbers: np.ndarray) -> np.ndarray:
        return numbers // 3

    def prefetch(self, numbers: np.ndarray) -> None:
        self.asked.append(numbers.tolist())


def test_the_defaults_are_those_of_images_in_memory() -> None:
    split = Generated(np.zeros(3, int))
    pixels, properties = split.examine(2)
    assert (pixels == 2).all()
    assert properties == ()
    assert split.cache_keys().tolist() == [0, 0, 0]
    assert split.original() is split
    assert split.shards() is None
    assert split.folder() is None
    assert split.files() is None
    assert (split.in_memory, split.is_remote) == (False, False)


def test_a_wrapper_hands_on_what_it_wraps(tmp_path: Path) -> None:
    Image.new("RGB", (4, 4), "red").save(tmp_path / "a.png")
    files = FileSplit([str(tmp_path / "a.png")], np.zeros(1, int), tmp_path)
    arrays = ArraySplit(np.zeros((1, 4, 4, 3), np.uint8), np.zeros(1, int), "arrays")
    dataset = Dataset("two", ("a",), {"train": files, "val": arrays}, "0" * 64)
    splits = cached(dataset, tmp_path / "cache").splits
    assert splits["val"] is arrays  # images in memory need no cache
    wrapped = splits["train"]
    assert wrapped.original() is files
    assert wrapped.folder() == tmp_path
    assert wrapped.original().files() == [str(tmp_path / "a.png")]
    assert wrapped.files() is None  # the cache is read, and has images whose files are gone
    assert wrapped.cache_keys().tolist() == files.cache_keys().tolist()
    assert wrapped.name(0) == "a.png"


def test_remote_images_come_shard_by_shard() -> None:
    store = Far()
    split = StoredSplit(store, np.zeros(6, int), np.arange(6))
    assert split.is_remote
    order = EpochOrder(split, seed=0)(0)
    assert {*order[:3].tolist()} in ({0, 1, 2}, {3, 4, 5})
    split.subset(np.array([4, 1])).prefetch(np.array([1, 0]))
    assert store.asked == [[1, 4]]
