"""Datasets by name: digits, and MNIST and Fashion-MNIST from IDX files."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from image_files import (
    refusal,
)

from vitkit.data.datasets.dataset import ArraySplit
from vitkit.data.sources.benchmarks import known_folders, open_idx, write_idx
from vitkit.data.sources.open import open_dataset
from vitkit.errors import DataError

datasets = pytest.importorskip("datasets")
constants = pytest.importorskip("huggingface_hub.constants")


def test_unknown_names_and_missing_paths(tmp_path: Path) -> None:
    assert "did you mean 'mnist'?" in refusal("mnits")
    assert "did you mean 'fashion-mnist'?" in refusal("fashion_mnist")
    (tmp_path / "flowers").mkdir()
    message = refusal(tmp_path / "flower" / "deep")
    assert f"the nearest folder that exists is {tmp_path}, with: flowers/" in message
    (tmp_path / "a.txt").write_text("path,label")
    assert "is not a folder" in refusal(tmp_path / "a.txt")
    refusal("null\0byte")
    assert "the name of the data is empty" in refusal("")


def test_a_path_object_is_never_a_known_name() -> None:
    assert "no such folder" in refusal(Path("digits"))


def test_digits_are_scikit_learns() -> None:
    load_digits = pytest.importorskip("sklearn.datasets").load_digits
    theirs, ours = load_digits(), open_dataset("digits")
    assert ours.classes == tuple("0123456789")
    assert [len(ours.splits[name]) for name in ("train", "test")] == [1438, 359]
    seen = set()
    for split in ours.splits.values():
        assert isinstance(split, ArraySplit)
        for i in range(len(split)):
            number = int(split.name(i).removeprefix("digits[").removesuffix("]"))
            seen.add(number)
            assert split.labels[i] == theirs.target[number]
            expected = np.floor(theirs.images[number] * 255 / 16 + 0.5)
            np.testing.assert_array_equal(split.read(i)[:, :, 0], expected)
    assert seen == set(range(1797))
    counts = np.bincount(ours.splits["test"].labels)
    np.testing.assert_allclose(counts, np.bincount(theirs.target) / 5, atol=1)


def test_digits_have_a_fingerprint_that_must_not_change() -> None:
    fingerprint = "ccdf5ef39534c9e3edada7e991b055fedc9580ffa3597a8fbc71abeeba0a4bf3"
    assert open_dataset("digits").fingerprint == fingerprint


def idx_set(root: Path, dot: str = "-", gz: str = "", classes: int = 10) -> Path:
    root.mkdir(parents=True, exist_ok=True)
    rng = np.random.default_rng(0)
    for prefix, count in (("train", 30), ("t10k", 20)):
        images = rng.integers(0, 256, (count, 28, 28), dtype=np.uint8)
        labels = (np.arange(count) % classes).astype(np.uint8)
        write_idx(root / f"{prefix}-images{dot}idx3-ubyte{gz}", images)
        write_idx(root / f"{prefix}-labels{dot}idx1-ubyte{gz}", labels)
    return root


@pytest.mark.parametrize("dot", ["-", "."])
@pytest.mark.parametrize("gz", ["", ".gz"])
@pytest.mark.parametrize("below", [False, True])
def test_idx_sets_under_their_usual_names(tmp_path: Path, dot: str, gz: str, below: bool) -> None:
    idx_set(tmp_path / "fashion-mnist" if below else tmp_path, dot, gz)
    dataset = open_dataset("fashion-mnist", data_root=tmp_path)
    assert dataset.classes[0] == "T-shirt/top"
    assert dataset.classes[9] == "Ankle boot"
    assert {name: len(split) for name, split in dataset.splits.items()} == {"train": 30, "test": 20}
    train = dataset.splits["train"]
    assert train.read(7).shape == (28, 28, 1)
    assert train.labels[7] == 7
    assert train.subset(np.array([7, 3])).name(0) == "fashion-mnist/train[7]"
    assert open_dataset("mnist", data_root=str(tmp_path / "fashion-mnist" if below else tmp_path))


def test_a_set_that_is_nowhere_says_where_it_was_looked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "datasets")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setenv("VITKIT_CACHE", str(tmp_path / "cache"))
    places = (tmp_path / "x", tmp_path / "y")
    with pytest.raises(DataError) as caught:
        open_idx("fashion-mnist", places)
    assert str(places[0]) in str(caught.value)
    assert str(places[1]) in str(caught.value)
    assert "dataset-fashion-mnist" in str(caught.value)
    assert "--data-root" in str(caught.value)
    assert "hf://zalando-datasets/fashion_mnist: not in the cache" in str(caught.value)
    looked = known_folders("mnist", tmp_path)
    assert looked[:3] == (tmp_path / "mnist", tmp_path, Path("/usr/share/datasets/mnist"))
    assert looked[3] == tmp_path / "cache" / "mnist"


def test_idx_sets_that_do_not_fit_together(tmp_path: Path) -> None:
    root = idx_set(tmp_path)
    (root / "t10k-labels-idx1-ubyte").unlink()
    with pytest.raises(DataError, match="t10k-labels-idx1-ubyte of mnist is missing"):
        open_idx("mnist", (root,))
    write_idx(root / "t10k-labels-idx1-ubyte", np.zeros(19, np.uint8))
    with pytest.raises(DataError, match=r"got \(20, 28, 28\) and \(19,\)"):
        open_idx("mnist", (root,))
    write_idx(root / "t10k-labels-idx1-ubyte", np.array([3] * 12 + [10] + [3] * 7, np.uint8))
    with pytest.raises(DataError, match="labels below 10, got 10 in row 12"):
        open_idx("mnist", (root,))


def test_the_idx_fingerprint_changes_with_images_and_labels(tmp_path: Path) -> None:
    root = idx_set(tmp_path)
    before = open_idx("mnist", (root,)).fingerprint
    assert open_idx("fashion-mnist", (root,)).fingerprint != before
    labels = (np.arange(20) % 10).astype(np.uint8)[::-1].copy()
    write_idx(root / "t10k-labels-idx1-ubyte", labels)
    changed = open_idx("mnist", (root,)).fingerprint
    assert changed != before
    write_idx(root / "t10k-images-idx3-ubyte", np.zeros((20, 28, 28), np.uint8))
    assert open_idx("mnist", (root,)).fingerprint not in (before, changed)
