"""Every image is decoded once before a run; bad ones are refused or left out, results cached."""

import io
import os
import shutil
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from image_files import folder, save
from PIL import Image

import vitkit.data.datasets.dataset
from vitkit import DataError, check, open_dataset
from vitkit.data.checks import scan
from vitkit.data.checks.check import check_dataset, drop_or_refuse_unreadable
from vitkit.data.checks.scan import scan_split
from vitkit.data.datasets.dataset import FileSplit
from vitkit.data.datasets.pixel_cache import LEAST_CACHED, file_digests

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


def test_more_images_than_one_block(tmp_path: Path) -> None:
    good, bad = tmp_path / "good.png", tmp_path / "bad.png"
    good.write_bytes(image(1))
    bad.write_bytes(b"words")
    paths = [good] * 2500
    for index in (0, 1023, 1024, 2499):
        paths[index] = bad
    split = FileSplit([*map(str, paths)], np.zeros(2500, np.int64), tmp_path)
    assert [p.index for p in scan_split(split, workers=2).problems] == [0, 1023, 1024, 2499]


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "cache"
    monkeypatch.setenv("VITKIT_CACHE", str(path))
    return path


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    return folder(tmp_path / "data", {"train/a": 20, "train/b": 20, "val/a": 5, "val/b": 5})


@pytest.fixture
def decoded(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the files that are decoded."""
    names: list[str] = []
    decode = vitkit.data.datasets.dataset.decode_file

    def noting(source: Path, **options: object) -> object:
        names.append(Path(source).name)
        return decode(source, **options)

    monkeypatch.setattr(vitkit.data.datasets.dataset, "decode_file", noting)
    return names


def same_but_for_recalled(one: Any, other: Any) -> bool:
    return {**one.as_dict(), "recalled": 0} == {**other.as_dict(), "recalled": 0}


def test_an_unchanged_folder_is_not_decoded_again(photos: Path, decoded: list[str]) -> None:
    first = check(photos)
    assert (first.recalled, len(decoded)) == (0, 50)
    decoded.clear()
    second = check(photos)
    assert (second.recalled, decoded) == (50, [])
    assert same_but_for_recalled(first, second)
    assert drop_or_refuse_unreadable(open_dataset(photos), "refuse")[1].recalled == 50
    assert decoded == []


def test_what_changes_is_looked_at_again(photos: Path, decoded: list[str]) -> None:
    check(photos)
    decoded.clear()
    changed = photos / "train" / "a" / "3.png"
    stamps = changed.stat()
    content = changed.read_bytes()
    changed.write_bytes(bytes(len(content)))
    os.utime(changed, ns=(stamps.st_atime_ns, stamps.st_mtime_ns))  # same size, same time
    save(photos / "val" / "b" / "new.png", 999)
    (photos / "train" / "b" / "4.png").unlink()
    shutil.copy2(photos / "train" / "b" / "5.png", photos / "train" / "b" / "6.png")
    report = check(photos)
    assert sorted(decoded) == ["3.png", "6.png", "new.png"]
    assert [p.name for p in report.problems["train"]] == ["train/a/3.png"]
    assert report.recalled == 47


def test_bad_images_are_not_remembered(photos: Path, decoded: list[str]) -> None:
    bad = photos / "train" / "a" / "3.png"
    bad.write_bytes(b"words")
    for _ in range(2):
        decoded.clear()
        assert [p.index for p in check(photos).problems["train"]] == [
            [*open_dataset(photos).splits["train"].paths].index(str(bad))
        ]
    assert decoded == ["3.png"]


@pytest.mark.parametrize("damage", ["cut", "flip", "empty"])
def test_a_damaged_memory_is_an_empty_one(photos, cache, decoded, damage):
    first = check(photos)
    (file,) = (cache / "looks").glob("*.npy")
    content = bytearray(file.read_bytes())
    if damage == "flip":
        content[len(content) // 2] ^= 1
    file.write_bytes(content[: {"cut": len(content) - 7, "empty": 0}.get(damage, len(content))])
    decoded.clear()
    second = check(photos)
    assert len(decoded) == 50
    assert same_but_for_recalled(first, second)
    assert check(photos).recalled == 50


def test_a_check_that_is_broken_off_is_not_lost(photos, decoded, monkeypatch):
    monkeypatch.setattr(scan, "SCAN_BLOCK", 8)

    def break_off(count: int) -> None:
        if len(decoded) >= 24:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        check_dataset(open_dataset(photos), workers=1, advance=break_off)
    assert check(photos).recalled >= 16
    assert threading.active_count() < 20


def test_many_digests_are_remembered_and_follow_the_files(tmp_path: Path) -> None:
    paths = [str(tmp_path / f"{number:04}.bin") for number in range(LEAST_CACHED + 7)]
    for number, path in enumerate(paths):
        Path(path).write_bytes(b"%d" % number)
    first = [*map(bytes, file_digests(paths))]
    assert len(set(first)) == len(paths)
    assert all(len(digest) == 32 for digest in first)
    Path(paths[5]).write_bytes(b"x")
    (tmp_path / "9999.bin").symlink_to("nowhere")
    second = [*map(bytes, file_digests([*paths, str(tmp_path / "9999.bin")]))]
    assert [index for index, digest in enumerate(first) if digest != second[index]] == [5]
    assert second[:20] == [*map(bytes, file_digests(paths[:20]))]  # few files: hashed now
