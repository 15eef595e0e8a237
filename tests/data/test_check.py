"""Every image is decoded once before a run: bad ones are refused by name or left out."""

from __future__ import annotations

import io
import os
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from vitkit import DataError, open_dataset
from vitkit.data.checks.check import Problem, drop_or_refuse_unreadable
from vitkit.data.checks.scan import scan_split
from vitkit.data.datasets.dataset import FileSplit

GOOD = 12


def image(value: int, format: str = "PNG") -> bytes:
    stream = io.BytesIO()
    noise = np.random.default_rng(value).integers(0, 256, (20, 20, 3), dtype=np.uint8)
    noise[0, 0] = value
    Image.fromarray(noise).save(stream, format)
    return stream.getvalue()


BAD = {
    "empty.jpg": (b"", "empty"),
    "page.jpg": (b"<html>not found</html>", "not an image"),
    "vector.png": (b"<svg/>", "format"),
    "cut.png": (image(90)[:700], "truncated"),
    "flipped.png": (image(91)[:500] + b"\0\0\0\0" + image(91)[504:], "damaged"),
    "long.png": (b"", "too long"),
}


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """12 good images of each class, whose first pixel tells which, and bad ones among them."""
    for split in ("train", "val"):
        for label, name in enumerate(("cat", "dog")):
            (tmp_path / split / name).mkdir(parents=True)
            for i in range(GOOD):
                (tmp_path / split / name / f"{i:02}.png").write_bytes(image(100 * label + i))
    for i, (name, (content, _)) in enumerate(BAD.items()):
        path = tmp_path / "train" / ("cat", "dog")[i % 2] / f"{i:02}-{name}"
        path.write_bytes(content)
        if name == "long.png":
            Image.new("L", (500, 1)).save(path)
    os.mkfifo(tmp_path / "train" / "cat" / "05-pipe.jpg")
    return tmp_path


def test_every_bad_image_is_named_with_its_reason_and_no_good_one(root: Path) -> None:
    dataset = open_dataset(root)
    expected = {f"{i:02}-{name}": reason for i, (name, (_, reason)) in enumerate(BAD.items())}
    expected["05-pipe.jpg"] = "not a file"
    for workers in (0, 1, 3):
        problems = scan_split(dataset.splits["train"], workers=workers).problems
        assert {p.name.rpartition("/")[2]: p.reason for p in problems} == expected
        assert [p.index for p in problems] == sorted(p.index for p in problems)
        assert all(dataset.splits["train"].name(p.index) == p.name for p in problems)
        assert all(p.detail and "\n" not in p.detail for p in problems)
    assert scan_split(dataset.splits["val"]).problems == []


def test_refusing_names_five_files_the_count_and_the_mend(root: Path) -> None:
    with pytest.raises(DataError) as caught:
        drop_or_refuse_unreadable(open_dataset(root), "refuse")
    message = str(caught.value)
    assert "7 of 55 images cannot be decoded" in message
    assert message.count("train/") == 5
    assert "train/cat/00-empty.jpg: empty: " in message
    assert "remove them or pass --bad-images skip" in message
    assert "\n" not in message


def test_skipping_leaves_the_bad_out_and_the_neighbours_labels_alone(root: Path) -> None:
    before = open_dataset(root)
    dataset, report = drop_or_refuse_unreadable(before, "skip")
    assert set(report.problems) == {"train"}
    assert len(report.problems["train"]) == 7
    train = dataset.splits["train"]
    assert len(train) == 2 * GOOD
    for i in range(len(train)):
        value = int(train.read(i)[0, 0, 0])
        assert train.labels[i] == value // 100
        assert train.name(i).endswith(f"{value % 100:02}.png")
    assert dataset.splits["val"] is before.splits["val"]
    assert dataset.fingerprint == before.fingerprint
    again, report = drop_or_refuse_unreadable(dataset, "refuse")
    assert again is dataset
    assert not report.refused


def test_a_split_of_bad_images_only_is_refused_either_way(tmp_path: Path) -> None:
    for name in ("cat", "dog"):
        for split in ("train", "val"):
            (tmp_path / split / name).mkdir(parents=True)
        (tmp_path / "train" / name / "a.png").write_bytes(image(1))
        (tmp_path / "val" / name / "a.png").write_bytes(b"words")
    with pytest.raises(
        DataError,
        match=r"2 of 4 images cannot be decoded .*val/cat/a\.png.* other images in each split",
    ):
        drop_or_refuse_unreadable(open_dataset(tmp_path), "skip")


def test_images_in_memory_are_sound() -> None:
    digits = open_dataset("digits")
    dataset, report = drop_or_refuse_unreadable(digits, "refuse")
    assert dataset is digits
    assert report.findings == ()
    assert report.total == 1797


def test_a_file_that_vanishes_is_a_problem_by_name(root: Path) -> None:
    split = open_dataset(root).splits["val"]
    assert isinstance(split, FileSplit)
    Path(split.paths[4]).unlink()
    Path(split.paths[7]).write_bytes(b"replaced")
    problems = scan_split(split).problems
    assert [(p.index, p.reason) for p in problems] == [(4, "missing"), (7, "not an image")]
    assert problems[0] == Problem(4, "val/cat/04.png", "missing", "no such file")


def test_more_images_than_one_block(tmp_path: Path) -> None:
    good, bad = tmp_path / "good.png", tmp_path / "bad.png"
    good.write_bytes(image(1))
    bad.write_bytes(b"words")
    paths = [good] * 2500
    for index in (0, 1023, 1024, 2499):
        paths[index] = bad
    split = FileSplit([*map(str, paths)], np.zeros(2500, np.int64), tmp_path)
    assert [p.index for p in scan_split(split, workers=2).problems] == [0, 1023, 1024, 2499]
