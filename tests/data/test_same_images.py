"""The same images from every source; crops by torch are near those by Pillow."""

import dataclasses
import hashlib
import pickle
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import skimage.data
import torch
from PIL import Image
from shards import CLASSES, Sample, as_csv, as_folder, as_parquet, as_tars, samples, train_briefly

import vitkit
from vitkit import Preprocess, open_dataset
from vitkit.data.datasets.pixel_cache import cached
from vitkit.data.images.decode import reduced_size
from vitkit.data.loading.crop_flip import (
    Augmentation,
    crop_box,
    largest_reduction,
    reduced_box,
    resized_crop,
)
from vitkit.data.loading.loader import TrainingSteps, batches

PHOTOGRAPH = skimage.data.astronaut()
SMALL = Preprocess(image_size=(32, 40))
SCALED = Augmentation(flip=0.5, crop_scale=0.1, scaled_jpeg=True)
BOXES = [(50, 30, 380, 370), (0, 0, 512, 512), (7, 11, 47, 43), (100, 100, 110, 130), (3, 4, 4, 5)]


@pytest.mark.parametrize("box", BOXES)
@pytest.mark.parametrize("interpolation", ["bicubic", "bilinear", "nearest"])
@pytest.mark.parametrize("channels", [1, 3])
def test_torch_resizes_as_pillow_does(box, interpolation, channels):
    preprocess = SMALL.replace(
        interpolation=interpolation, mean=(0.5,) * channels, std=(0.5,) * channels
    )
    ours, pillows = (
        resized_crop(PHOTOGRAPH, box, preprocess, resizer) for resizer in ("torch", "pillow")
    )
    assert ours.shape == pillows.shape == (32, 40, channels)
    difference = np.abs(ours.astype(int) - pillows)
    assert difference.max() <= (0 if interpolation == "nearest" else 2)
    assert difference.mean() < 0.05


def test_pixels_that_cannot_be_written_are_cropped_without_a_warning():
    fixed = PHOTOGRAPH.copy()
    fixed.flags.writeable = False
    crop = resized_crop(fixed, (0, 0, 512, 512), SMALL, "torch")
    np.testing.assert_array_equal(crop, resized_crop(PHOTOGRAPH, (0, 0, 512, 512), SMALL, "torch"))
    same = SMALL.replace(image_size=512)
    crop = resized_crop(fixed, (0, 0, 512, 512), same, "torch")
    np.testing.assert_array_equal(crop, fixed)


def test_no_crop_is_enlarged_because_of_the_factor():
    factors = set()
    draw = np.random.default_rng(0)
    for number in range(2000):
        size = tuple(draw.integers(64, 2000, 2).tolist())
        output = tuple(draw.integers(8, 300, 2).tolist())
        box = crop_box(size, 0.08, 0, 0, number)
        factor = largest_reduction(size, box, output)
        factors.add(factor)
        reduced = reduced_size(size, factor)
        left, top, right, bottom = reduced_box(box, size, reduced)
        assert 0 <= left < right <= reduced[1]
        assert 0 <= top < bottom <= reduced[0]
        if factor > 1:
            assert bottom - top >= output[0]
            assert right - left >= output[1]
        # where there is room for twice the output, and a pixel for rounding, it is used
        elif min((box[3] - box[1]) / output[0], (box[2] - box[0]) / output[1]) > 2:
            assert min(box[3] - box[1] - 2 * output[0], box[2] - box[0] - 2 * output[1]) <= 2
    assert factors == {1, 2, 4, 8}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Photographs larger and smaller than the crops need, JPEG and PNG, one turned by EXIF."""
    root = tmp_path_factory.mktemp("images")
    sides = Image.Exif()
    sides[0x0112] = 6
    for number in range(16):
        parent = root / "train" / ("cat", "dog")[number % 2]
        parent.mkdir(parents=True, exist_ok=True)
        width, height = 90 + 26 * number, 400 - 20 * number
        image = Image.fromarray(PHOTOGRAPH).resize((width, height), Image.Resampling.LANCZOS)
        if number % 5 == 4:
            image.save(parent / f"{number}.png")
        else:
            image.save(parent / f"{number}.jpg", quality=90, exif=sides if number == 6 else b"")
    return open_dataset(root)


def steps(split, augmentation=SCALED, **settings):
    return TrainingSteps(split, SMALL, augmentation, batch_size=8, seed=3, **settings)


def reductions(split) -> list[int]:
    return [steps(split).read(index, 0, SMALL).factor or 1 for index in range(len(split))]


def test_crops_of_jpegs_decoded_smaller_agree_with_whole_ones(folder):
    split = folder.splits["train"]
    assert {1, 2, 4} <= set(reductions(split))
    whole = dataclasses.replace(SCALED, scaled_jpeg=False)
    differences = []
    for index, factor in enumerate(reductions(split)):
        reduced, full = (steps(split, settings).read(index, 0, SMALL)
                         for settings in (SCALED, whole))  # fmt: skip
        assert reduced.pixels.shape[:2] == reduced_size(full.pixels.shape[:2], factor)
        crop = SCALED.resize(reduced.pixels, SMALL, 3, 0, index, reduced.size)
        expected = whole.resize(full.pixels, SMALL, 3, 0, index)
        assert crop.shape == expected.shape
        if factor == 1:
            np.testing.assert_array_equal(crop, expected)
        else:
            differences.append(np.abs(crop.astype(int) - expected).mean())
    assert 0 < np.mean(differences) < 8  # edges of the crop move by up to half a pixel


def pixels_of(source, workers=0):
    return torch.cat([batch.pixels for batch in batches(source, range(4), workers=workers)])


def test_the_pixels_do_not_depend_on_workers_or_cache(folder, tmp_path):
    expected = pixels_of(steps(folder.splits["train"]))
    assert torch.equal(pixels_of(steps(folder.splits["train"]), workers=2), expected)
    assert torch.equal(pixels_of(steps(cached(folder, tmp_path).splits["train"])), expected)
    full = dataclasses.replace(SCALED, scaled_jpeg=False)
    assert not torch.equal(pixels_of(steps(folder.splits["train"], full)), expected)


def test_views_of_one_batch_are_those_of_batches_of_their_own(folder):
    split = folder.splits["train"]
    source = steps(split, repeats=4)
    for batch in batches(source, range(2)):
        for row, (index, view) in enumerate(
            zip(batch.indices.tolist(), batch.views.tolist(), strict=True)
        ):
            alone = source.variants(np.array([index]), batch.epoch, np.array([view]))
            assert torch.equal(alone.pixels[0], batch.pixels[row])


def test_a_users_own_transform_has_whole_images(folder):
    split = folder.splits["train"]
    sizes = []

    def seen(pixels, key, index, name):
        sizes.append((index, pixels.shape))
        return pixels

    assert max(reductions(split)) > 1
    steps(split, transform=seen)[0]
    assert sizes == [(index, split.read(index).shape) for index, _ in sizes]


def test_the_transform_of_one_image_has_the_resizer_of_a_run(folder):
    image = folder.splits["train"].read(0)
    by_torch, by_default, by_pillow = (
        vitkit.training_transform(SMALL, **settings)(image, (0, 0, 0))
        for settings in ({"resizer": "torch"}, {}, {"resizer": "pillow"})
    )
    assert torch.equal(by_torch, by_default)
    assert not torch.equal(by_torch, by_pillow)
    assert (by_torch - by_pillow).abs().max() < 0.03


MAKERS: dict[str, Callable[[Path, Sequence[Sample]], str | Path]] = {
    "csv": as_csv,
    "parquet": as_parquet,
    "wds": as_tars,
}
TINY = Preprocess(image_size=8, fit="squash")


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VITKIT_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def as_files(tmp_path: Path) -> Any:
    return open_dataset(as_folder(tmp_path / "as_files", samples()))


@pytest.fixture(params=[*MAKERS, "cache"])
def other(request: pytest.FixtureRequest, tmp_path: Path, as_files: Any) -> Any:
    if request.param == "cache":
        return cached(as_files, tmp_path / "pixels")
    return open_dataset(MAKERS[request.param](tmp_path / "other", samples()))


def test_classes_labels_pixels_order_and_fingerprint(as_files: Any, other: Any) -> None:
    assert other.classes == as_files.classes == CLASSES
    assert list(other.splits) == ["train", "val", "test"]
    assert other.fingerprint == as_files.fingerprint
    assert not other.cut
    for name, split in as_files.splits.items():
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
    source = TrainingSteps(dataset.splits["train"], TINY, augmentation, batch_size=6, seed=0)
    return {
        (batch.epoch, index): hashlib.sha256(pixels.tobytes()).hexdigest()
        for batch in batches(source, range(6), workers=workers)
        for index, pixels in zip(batch.indices.tolist(), batch.pixels.numpy(), strict=True)
    }


def test_workers_see_what_one_process_sees(as_files: Any, other: Any) -> None:
    here = digests(as_files, 0)
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
    data: dict[str, str | Path] = {"as_files": as_folder(tmp_path / "as_files", samples())}
    data |= {name: make(tmp_path / name, samples()) for name, make in MAKERS.items()}
    weights = {}
    for name, where in data.items():
        run = train_briefly(where, tmp_path / "runs" / name)
        state = vitkit.load(run.last).model.state_dict()
        weights[name] = {key: value.numpy().tobytes() for key, value in state.items()}
    assert weights["csv"] == weights["as_files"]
    assert weights["parquet"] == weights["as_files"]
    assert weights["wds"] == weights["as_files"]
