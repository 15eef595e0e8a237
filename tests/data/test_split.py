"""The interface of a split: what a new source gets for free, and what wrappers hand on."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from PIL import Image

from vitkit import Dataset
from vitkit.data.datasets.dataset import ArraySplit, FileSplit
from vitkit.data.datasets.pixel_cache import cached
from vitkit.data.datasets.split import Split


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


def test_the_defaults_are_those_of_images_in_memory() -> None:
    split = Generated(np.zeros(3, int))
    decoded = split.decode(2)
    assert (decoded.pixels == 2).all()
    assert decoded[1:] == ((4, 4), None)
    assert split.cache_keys().tolist() == [0, 0, 0]
    assert split.original() is split
    assert split.folder() is None
    assert split.files() is None
    assert not split.in_memory


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
