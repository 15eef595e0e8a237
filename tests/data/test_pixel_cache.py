"""The cache of decoded images: the same bytes, made once, whole or not at all."""

import json
import multiprocessing
import os
import signal
import time
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from processes import wait_until
from shards import as_folder, samples, train_briefly

import vitkit
from vitkit import Dataset, ImageError, cli, open_dataset
from vitkit.data.checks.check import check_dataset, drop_or_refuse_unreadable
from vitkit.data.checks.scan import scan_split
from vitkit.data.datasets import pixel_cache
from vitkit.data.datasets.dataset import FileSplit
from vitkit.data.datasets.pixel_cache import CachedSplit, cached
from vitkit.data.datasets.splitting import with_validation


@pytest.fixture
def folder(tmp_path: Path) -> Dataset:
    return open_dataset(as_folder(tmp_path / "folder", samples()))


def decodes(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return a list that gets the name of every image decoded from now on."""
    seen: list[str] = []
    decode = vitkit.data.datasets.dataset.decode_file

    def noting(source: str, **options: Any) -> Any:
        seen.append(source)
        return decode(source, **options)

    monkeypatch.setattr(vitkit.data.datasets.dataset, "decode_file", noting)
    return seen


def whole(parent: Path) -> int:
    """The number of caches that are complete."""
    return len([*parent.glob("*/index.npz")])


def test_each_image_is_decoded_once_and_comes_back_the_same(folder, tmp_path, monkeypatch):
    before = [[s.read(i).copy() for i in range(len(s))] for s in folder.splits.values()]
    seen = decodes(monkeypatch)
    first = cached(folder, tmp_path / "c")
    assert len(seen) == len(set(seen)) == 30
    total = sum(image.nbytes for images in before for image in images)
    assert f"30 images, {total:,} bytes in" in first.notes[-1]
    again = cached(folder, tmp_path / "c")
    for dataset in (first, again):
        assert dataset.fingerprint == folder.fingerprint
        for split, images in zip(dataset.splits.values(), before, strict=True):
            assert isinstance(split, CachedSplit)
            for index, image in enumerate(images):
                np.testing.assert_array_equal(split.read(index), image)
    assert len(seen) == 30


def test_what_is_cut_and_skipped_afterwards_still_uses_it(folder, tmp_path, monkeypatch):
    plain = with_validation(
        Dataset("x", folder.classes, {"train": folder.splits["train"]}, "f"), 0.2
    )
    one = cached(
        Dataset("x", folder.classes, {"train": folder.splits["train"]}, "f"), tmp_path / "c"
    )
    both = with_validation(one, 0.2)
    expected = [plain.splits["val"].read(i).copy() for i in range(len(plain.splits["val"]))]
    seen = decodes(monkeypatch)
    for index, image in enumerate(expected):
        np.testing.assert_array_equal(both.splits["val"].read(index), image)
        assert both.splits["val"].name(index) == plain.splits["val"].name(index)
    assert len(expected) > 2
    assert seen == []


def test_images_that_cannot_be_decoded_stay_bad(folder: Dataset, tmp_path: Path) -> None:
    bad = tmp_path / "folder" / "train" / "1" / "3.png"
    bad.write_bytes(bad.read_bytes()[:-30])
    dataset = cached(open_dataset(tmp_path / "folder"), tmp_path / "c")
    train = dataset.splits["train"]
    index = next(i for i in range(len(train)) if train.name(i) == "train/1/3.png")
    with pytest.raises(ImageError, match="truncated"):
        train.read(index)
    rest, _ = drop_or_refuse_unreadable(dataset, "skip")
    assert isinstance(rest.splits["train"], CachedSplit)
    assert len(rest.splits["train"]) == 17
    np.testing.assert_array_equal(rest.splits["train"].read(index), train.read(index + 1))


def test_the_check_takes_its_pixels_from_the_cache(folder, tmp_path, monkeypatch):
    """And finds what it finds in the files: images that were turned or cut, too."""
    path = tmp_path / "folder" / "train" / "1"
    Image.new("RGBA", (12, 12), (9, 8, 7, 128)).save(path / "alpha.png")
    Image.new("CMYK", (12, 12), (9, 8, 7, 128)).save(path / "inks.jpg")
    turned = Image.Exif()
    turned[0x0112] = 6
    Image.new("L", (9, 12), 77).save(path / "turned.jpg", exif=turned)
    (path / "cut.png").write_bytes((path / "3.png").read_bytes()[:-30])
    plain = open_dataset(tmp_path / "folder")
    expected = {name: scan_split(split) for name, split in plain.splits.items()}
    seen = decodes(monkeypatch)
    with_cache = cached(plain, tmp_path / "c")
    report = check_dataset(with_cache)
    times = {Path(name).name: count for name, count in Counter(seen).items()}
    assert len(Counter(seen)) == 34
    assert {name for name, count in times.items() if count > 1} == {"cut.png"}
    for name, split in with_cache.splits.items():
        looks = scan_split(split)
        np.testing.assert_array_equal(looks.rows, expected[name].rows)
        assert looks.problems == expected[name].problems
    assert [problem.name for problem in report.problems["train"]] == ["train/1/cut.png"]


def test_other_images_and_other_decoders_have_other_caches(folder, tmp_path, monkeypatch):
    cached(folder, tmp_path / "c")
    assert whole(tmp_path / "c") == 1
    path = next((tmp_path / "folder" / "val").rglob("*.png"))
    Image.new("RGB", (6, 6), (1, 2, 3)).save(path)
    changed = cached(open_dataset(tmp_path / "folder"), tmp_path / "c")
    val = changed.splits["val"]
    pixels = [val.read(i)[0, 0].tolist() for i in range(len(val))]
    assert [1, 2, 3] in pixels
    assert whole(tmp_path / "c") == 2
    monkeypatch.setattr(pixel_cache, "DECODER", pixel_cache.DECODER + 1)
    cached(folder, tmp_path / "c")
    assert whole(tmp_path / "c") == 3


def test_a_damaged_cache_is_made_again(folder: Dataset, tmp_path: Path) -> None:
    cached(folder, tmp_path / "c")
    (pixels,) = (tmp_path / "c").rglob("pixels.bin")
    (index,) = (tmp_path / "c").rglob("index.npz")
    whole_pixels, whole_index = pixels.read_bytes(), index.read_bytes()
    for damaged, content in ((pixels, whole_pixels[:-1]), (index, whole_index[:99]), (index, b"")):
        damaged.write_bytes(content)
        dataset = cached(folder, tmp_path / "c")
        assert pixels.read_bytes() == whole_pixels
        expected = folder.splits["test"].read(1)
        np.testing.assert_array_equal(dataset.splits["test"].read(1), expected)


def test_damaged_pixels_are_read_from_their_files(folder: Dataset, tmp_path: Path) -> None:
    cached(folder, tmp_path / "c")
    (pixels,) = (tmp_path / "c").rglob("pixels.bin")
    pixels.write_bytes(bytes(pixels.stat().st_size))
    dataset = cached(folder, tmp_path / "c")
    for split in ("train", "test"):
        expected = folder.splits[split].read(1)
        np.testing.assert_array_equal(dataset.splits[split].read(1), expected)


def stuck(dataset: Dataset, path: Path, begun: Path) -> None:
    """Make a cache, and stop in the middle."""
    read = FileSplit.read

    def slowly(split: FileSplit, index: int) -> Any:
        if index == 4:
            begun.touch()
            time.sleep(600)
        return read(split, index)

    pixel_cache.IMAGES_AT_ONCE = 4
    FileSplit.read = slowly
    cached(dataset, path)


def test_a_run_that_is_killed_leaves_nothing_that_counts(folder: Dataset, tmp_path: Path) -> None:
    begun = tmp_path / "begun"
    process = multiprocessing.get_context("fork").Process(
        target=stuck, args=(folder, tmp_path / "c", begun), daemon=True
    )
    process.start()
    wait_until(begun.exists)
    (half,) = (tmp_path / "c").rglob("pixels.bin")
    os.kill(process.pid or 0, signal.SIGKILL)
    process.join()
    assert whole(tmp_path / "c") == 0
    dataset = cached(folder, tmp_path / "c")
    assert whole(tmp_path / "c") == 1
    assert not half.exists()
    np.testing.assert_array_equal(dataset.splits["val"].read(5), folder.splits["val"].read(5))


def test_a_full_disk_is_a_note_and_leaves_nothing(folder, tmp_path, monkeypatch):
    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(np, "savez", full)
    dataset = cached(folder, tmp_path / "c")
    assert dataset.splits == folder.splits
    assert "the run continues without it" in dataset.notes[-1]
    assert "No space left on device" in dataset.notes[-1]
    assert whole(tmp_path / "c") == 0


def test_images_in_memory_need_none(tmp_path: Path) -> None:
    digits = open_dataset("digits")
    dataset = cached(digits, tmp_path / "c")
    assert dataset.splits == digits.splits
    assert "not needed, the images are in memory" in dataset.notes[-1]
    assert not (tmp_path / "c").exists()


def test_a_run_with_a_cache_ends_as_one_without(tmp_path: Path) -> None:
    data, weights = as_folder(tmp_path / "folder", samples()), []
    for name, where in (("plain", None), ("first", tmp_path / "c"), ("second", tmp_path / "c")):
        run = train_briefly(data, tmp_path / name, cache=where and str(where))
        state = vitkit.load(run.last).model.state_dict()
        weights.append({key: value.numpy().tobytes() for key, value in state.items()})
    assert weights[0] == weights[1] == weights[2]
    assert "cache: 30 images" in (tmp_path / "second" / "train.log").read_text()
    assert "cache: " not in (tmp_path / "plain" / "train.log").read_text()
    assert whole(tmp_path / "c") == 1


def test_evaluation_takes_the_cache_of_training(tmp_path, monkeypatch, capsys):
    data = as_folder(tmp_path / "folder", samples())
    best = train_briefly(data, tmp_path / "run", cache=str(tmp_path / "c")).best
    plain = vitkit.evaluate(best, data)
    seen = decodes(monkeypatch)
    assert vitkit.evaluate(best, data, cache=tmp_path / "c") == plain
    assert cli.run(["eval", str(best), str(data), "--cache", str(tmp_path / "c"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out).items() >= plain.items()
    assert seen == []
    assert cli.run(["eval", str(best), str(data), "--cache", "--split", "val"]) == 0
    assert len(seen) == 30  # the user's own is another one
