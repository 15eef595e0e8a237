"""The same images are the same dataset from a folder, a CSV, Parquet, tars and a cache."""

from __future__ import annotations

import hashlib
import pickle
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from shards import CLASSES, Sample, as_csv, as_folder, as_parquet, as_tars, samples, train_briefly

import vitkit
from vitkit import Preprocess, open_dataset
from vitkit.data.datasets.pixel_cache import cached
from vitkit.data.loading.crop_flip import Augmentation
from vitkit.data.loading.loader import TrainingSteps, batches

MAKERS: dict[str, Callable[[Path, Sequence[Sample]], str | Path]] = {
    "csv": as_csv,
    "parquet": as_parquet,
    "wds": as_tars,
}
SMALL = Preprocess(image_size=8, fit="squash")


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VITKIT_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def folder(tmp_path: Path) -> Any:
    return open_dataset(as_folder(tmp_path / "folder", samples()))


@pytest.fixture(params=[*MAKERS, "cache"])
def other(request: pytest.FixtureRequest, tmp_path: Path, folder: Any) -> Any:
    if request.param == "cache":
        return cached(folder, tmp_path / "pixels")
    return open_dataset(MAKERS[request.param](tmp_path / "other", samples()))


def test_classes_labels_pixels_order_and_fingerprint(folder: Any, other: Any) -> None:
    assert other.classes == folder.classes == CLASSES
    assert list(other.splits) == ["train", "val", "test"]
    assert other.fingerprint == folder.fingerprint
    assert not other.cut
    for name, split in folder.splits.items():
        theirs = other.splits[name]
        assert theirs.labels.tolist() == split.labels.tolist()
        for index in range(len(split)):
            np.testing.assert_array_equal(theirs.read(index), split.read(index))


def test_subsets_and_other_labels_keep_their_images(other: Any) -> None:
    split = other.splits["train"]
    places = np.array([7, 0, 12])
    part = split.subset(places).subset(np.array([2, 0]))
    assert part.labels.tolist() == split.labels[[12, 7]].tolist()
    assert [part.name(0), part.name(1)] == [split.name(12), split.name(7)]
    np.testing.assert_array_equal(part.read(0), split.read(12))
    renamed = part.relabelled(np.array([5, 6]))
    assert renamed.labels.tolist() == [5, 6]
    np.testing.assert_array_equal(renamed.read(1), split.read(7))


def digests(dataset: Any, workers: int) -> dict[tuple[int, int], str]:
    augmentation = Augmentation(flip=0.5, shift=1, crop_scale=0.3)
    source = TrainingSteps(dataset.splits["train"], SMALL, augmentation, batch_size=6, seed=0)
    return {
        (batch.epoch, index): hashlib.sha256(pixels.tobytes()).hexdigest()
        for batch in batches(source, range(6), workers=workers)
        for index, pixels in zip(batch.indices.tolist(), batch.pixels.numpy(), strict=True)
    }


def test_workers_see_what_one_process_sees(folder: Any, other: Any) -> None:
    here = digests(folder, 0)
    assert len(here) == 2 * 18
    assert digests(other, 0) == here
    assert digests(other, 2) == here


def test_splits_travel_to_other_processes(other: Any) -> None:
    split = other.splits["val"]
    before = split.read(3)
    sent = pickle.loads(pickle.dumps(split))
    np.testing.assert_array_equal(sent.read(3), before)
    assert sent.name(3) == split.name(3)


def test_training_on_each_gives_the_same_weights(tmp_path: Path) -> None:
    data: dict[str, str | Path] = {"folder": as_folder(tmp_path / "folder", samples())}
    data |= {name: make(tmp_path / name, samples()) for name, make in MAKERS.items()}
    weights = {}
    for name, where in data.items():
        run = train_briefly(where, tmp_path / "runs" / name)
        state = vitkit.load(run.last).model.state_dict()
        weights[name] = {key: value.numpy().tobytes() for key, value in state.items()}
    assert weights["csv"] == weights["folder"]
    assert weights["parquet"] == weights["folder"]
    assert weights["wds"] == weights["folder"]
