"""Stratified parts, and fingerprints that change with the data and with nothing else."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from image_files import (
    folder,
    save,
)

from vitkit import DataError, SettingError, open_dataset
from vitkit.data.datasets.splitting import stratified_split, with_validation

CHANGES: dict[str, Callable[[Path], None]] = {
    "an image": lambda root: save(root / "train/a/0.png", 900),
    "a label": lambda root: (root / "train/a/0.png").rename(root / "train/b/x.png") and None,
    "an image more": lambda root: save(root / "val/b/9.png", 901),
    "an image less": lambda root: (root / "val/b/1.png").unlink(),
    "a class name": lambda root: (root / "train/c").rename(root / "train/d") and None,
    "an empty class": lambda root: (root / "train/e").mkdir(),
    "a split": lambda root: (root / "val").rename(root / "test") and None,
}


@pytest.mark.parametrize("change", CHANGES)
def test_the_fingerprint_changes_with(tmp_path: Path, change: str) -> None:
    root = folder(tmp_path, {"train/a": 2, "train/b": 2, "train/c": 1, "val/a": 2, "val/b": 2})
    before = open_dataset(root).fingerprint
    assert len(before) == 64
    assert open_dataset(root).fingerprint == before
    CHANGES[change](root)
    assert open_dataset(root).fingerprint != before


def test_the_fingerprint_stays_with_dates_places_and_notes(tmp_path: Path) -> None:
    one = folder(tmp_path / "one", {"a": 12, "b": 12})
    two = folder(tmp_path / "two", {"a": 12, "b": 12, ".hidden": 1})
    os.utime(two / "a" / "0.png", (0, 0))
    assert open_dataset(one).fingerprint == open_dataset(two).fingerprint


def test_parts_have_the_classes_in_proportion() -> None:
    labels = np.repeat([0, 1, 2], [100, 37, 8])[np.random.default_rng(0).permutation(145)]
    parts = stratified_split(labels, (0.7, 0.1, 0.2))
    assert [len(part) for part in parts] == [102, 14, 29]
    assert sorted(np.concatenate(parts).tolist()) == list(range(145))
    for part, fraction in zip(parts, (0.7, 0.1, 0.2), strict=True):
        assert (np.diff(part) > 0).all()
        np.testing.assert_allclose(
            np.bincount(labels[part], minlength=3), np.array([100, 37, 8]) * fraction, atol=1
        )


def test_small_classes_together_fill_a_small_part() -> None:
    labels = np.repeat(np.arange(10), 4)
    train, val = stratified_split(labels, (0.9, 0.1))
    assert len(val) == 4
    assert len(set(labels[val])) == 4
    assert len(train) == 36


def test_a_class_keeps_its_last_image_in_the_first_part() -> None:
    labels = np.arange(30)
    train, test = stratified_split(labels, (0.5, 0.5))
    assert len(train) == 30
    assert len(test) == 0


def test_the_cut_depends_on_seed_and_keys_and_on_nothing_else() -> None:
    labels = np.repeat([0, 1], 50)
    keys = np.random.default_rng(1).integers(0, 2**63, 100).astype(np.uint64)
    first = stratified_split(labels, (0.8, 0.2), 0, keys)[1]
    assert first.tolist() == stratified_split(labels, (0.8, 0.2), 0, keys)[1].tolist()
    assert first.tolist() != stratified_split(labels, (0.8, 0.2), 1, keys)[1].tolist()
    order = np.random.default_rng(2).permutation(100)
    second = stratified_split(labels[order], (0.8, 0.2), 0, keys[order])[1]
    assert set(keys[first].tolist()) == set(keys[order][second].tolist())


@pytest.mark.parametrize("fractions", [(), (0.5, 0.4), (1.5, -0.5), (1.0, 0.0)])
def test_fractions_that_make_no_whole(fractions: tuple[float, ...]) -> None:
    with pytest.raises(SettingError, match="sum to 1"):
        stratified_split(np.zeros(4, np.int64), fractions)


def test_validation_is_taken_from_train() -> None:
    digits = open_dataset("digits")
    dataset = with_validation(digits, 0.1)
    assert list(dataset.splits) == ["train", "val", "test"]
    assert [len(split) for split in dataset.splits.values()] == [1294, 144, 359]
    assert dataset.fingerprint == digits.fingerprint
    names = {split.name(i) for split in dataset.splits.values() for i in range(len(split))}
    assert len(names) == 1797
    assert dataset.notes[-1].startswith("validation: 144 of 1,438 train images")
    assert with_validation(dataset, 0.5) is dataset
    again = with_validation(digits, 0.1).splits["val"]
    assert [again.name(i) for i in range(9)] == [dataset.splits["val"].name(i) for i in range(9)]
    other = with_validation(digits, 0.1, seed=1).splits["val"]
    assert [again.name(i) for i in range(9)] != [other.name(i) for i in range(9)]


def test_validation_that_cannot_be_taken(tmp_path: Path) -> None:
    dataset = open_dataset(folder(tmp_path, {"train/a": 1, "train/b": 1}))
    with pytest.raises(
        DataError, match=r"2 images, too few to use 10% .* or pass --val-fraction 0"
    ):
        with_validation(dataset, 0.1)
    with pytest.raises(SettingError, match="between 0 and 1"):
        with_validation(dataset, 1.0)
