"""Results of a scan are cached until the file changes, and never longer."""

from __future__ import annotations

import os
import shutil
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from image_files import folder, save

import vitkit.data.datasets.dataset
from vitkit import Dataset, ImageError, check, open_dataset
from vitkit.data.checks import scan
from vitkit.data.checks.check import check_dataset, drop_or_refuse_unreadable
from vitkit.data.datasets.dataset import Store, StoredSplit
from vitkit.data.datasets.pixel_cache import LEAST_CACHED, cached, file_digests
from vitkit.io.caches import UNKNOWN, FileCache, file_keys

ROW = np.dtype([("value", np.uint32)])


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "cache"
    monkeypatch.setenv("VITKIT_CACHE", str(path))
    return path


@pytest.fixture
def root(tmp_path: Path) -> Path:
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


def test_an_unchanged_folder_is_not_decoded_again(root: Path, decoded: list[str]) -> None:
    first = check(root)
    assert (first.recalled, len(decoded)) == (0, 50)
    decoded.clear()
    second = check(root)
    assert (second.recalled, decoded) == (50, [])
    assert same_but_for_recalled(first, second)
    assert drop_or_refuse_unreadable(open_dataset(root), "refuse")[1].recalled == 50
    assert decoded == []


def test_what_changes_is_looked_at_again(root: Path, decoded: list[str]) -> None:
    check(root)
    decoded.clear()
    changed = root / "train" / "a" / "3.png"
    stamps = changed.stat()
    content = changed.read_bytes()
    changed.write_bytes(bytes(len(content)))
    os.utime(changed, ns=(stamps.st_atime_ns, stamps.st_mtime_ns))  # same size, same time
    save(root / "val" / "b" / "new.png", 999)
    (root / "train" / "b" / "4.png").unlink()
    shutil.copy2(root / "train" / "b" / "5.png", root / "train" / "b" / "6.png")
    report = check(root)
    assert sorted(decoded) == ["3.png", "6.png", "new.png"]
    assert [p.name for p in report.problems["train"]] == ["train/a/3.png"]
    assert report.recalled == 47


def test_bad_images_are_not_remembered(root: Path, decoded: list[str]) -> None:
    bad = root / "train" / "a" / "3.png"
    bad.write_bytes(b"words")
    for _ in range(2):
        decoded.clear()
        assert [p.index for p in check(root).problems["train"]] == [
            [*open_dataset(root).splits["train"].paths].index(str(bad))
        ]
    assert decoded == ["3.png"]


@pytest.mark.parametrize("damage", ["cut", "flip", "empty"])
def test_a_damaged_memory_is_an_empty_one(
    root: Path, cache: Path, decoded: list[str], damage: str
) -> None:
    first = check(root)
    (file,) = (cache / "looks").glob("*.npy")
    content = bytearray(file.read_bytes())
    if damage == "flip":
        content[len(content) // 2] ^= 1
    file.write_bytes(content[: {"cut": len(content) - 7, "empty": 0}.get(damage, len(content))])
    decoded.clear()
    second = check(root)
    assert len(decoded) == 50
    assert same_but_for_recalled(first, second)
    assert check(root).recalled == 50


def test_a_cache_that_cannot_be_written_costs_nothing_but_time(root: Path, cache: Path) -> None:
    cache.write_text("a file where a folder should be")
    for _ in range(2):
        assert check(root).recalled == 0


def test_a_check_that_is_broken_off_is_not_lost(
    root: Path, decoded: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scan, "SCAN_BLOCK", 8)

    def break_off(count: int) -> None:
        if len(decoded) >= 24:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        check_dataset(open_dataset(root), workers=1, advance=break_off)
    assert check(root).recalled >= 16
    assert threading.active_count() < 20


def test_a_name_does_not_matter_and_neither_does_the_way_to_it(root: Path, tmp_path: Path) -> None:
    check(root)
    (tmp_path / "alias").symlink_to(root)
    assert check_dataset(open_dataset(tmp_path / "alias")).recalled == 50


def test_images_with_decoded_copies_are_not_decoded_again(
    root: Path, tmp_path: Path, decoded: list[str]
) -> None:
    copies = cached(open_dataset(root), tmp_path / "pixels")
    decoded.clear()
    report = check(copies)
    assert decoded == []
    assert report.recalled == 0
    assert not report.problems
    assert check(root).findings == report.findings


class Shelf(Store):
    """A `Store` in memory."""

    def __init__(self, contents: list[bytes]) -> None:
        self.contents = contents

    def name(self, number: int) -> str:
        return f"shelf[{number}]"

    def encoded(self, number: int) -> bytes:
        if not self.contents[number]:
            raise ImageError(self.name(number), "missing", "no such image")
        return self.contents[number]


def test_images_inside_larger_files_are_remembered_by_their_bytes(
    root: Path,
) -> None:
    contents = [path.read_bytes() for path in sorted((root / "train").rglob("*.png"))]
    shelf = Shelf([*contents, b"", b"words"])
    split = StoredSplit(shelf, np.arange(42) % 2, np.arange(42))
    dataset = Dataset("shelf", ("a", "b"), {"train": split}, "0" * 64)
    first = check(dataset)
    assert [(p.name, p.reason) for p in first.problems["train"]] == [
        ("shelf[40]", "missing"),
        ("shelf[41]", "not an image"),
    ]
    assert (first.recalled, check(dataset).recalled) == (0, 40)
    shelf.contents[3] = shelf.contents[4]
    report = check(dataset)
    assert report.recalled == 40
    assert any(finding.kind == "two labels" for finding in report.findings)


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


def test_rows_by_key(tmp_path: Path) -> None:
    keys = np.array([9, UNKNOWN, 4], np.uint64)
    memory = FileCache("numbers", "here", ROW)
    rows, known = memory.get_many(keys)
    assert not known.any()
    rows["value"], known[:] = [90, 0, 40], True
    memory.save()
    rows, known = FileCache("numbers", "here", ROW).get_many(
        np.array([4, 5, 9, 0, 2**63], np.uint64)
    )
    assert known.tolist() == [True, False, True, False, False]
    assert rows["value"].tolist() == [40, 0, 90, 0, 0]
    assert not FileCache("numbers", "there", ROW).get_many(keys)[1].any()
    assert not FileCache("numbers", "here", np.dtype([("other", np.int32)])).get_many(keys)[1].any()


def test_rows_of_files_that_are_gone_do_not_gather() -> None:
    keys = np.arange(1, 101, dtype=np.uint64)
    for start in range(0, 1000, 100):
        memory = FileCache("numbers", "here", ROW)
        memory.get_many(keys + np.uint64(start))[1][:] = True
        memory.save()
    assert memory.path.stat().st_size < 200 * 12 + 200


def test_keys_of_what_is_no_file(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "file").touch()
    paths = [tmp_path / name for name in ("fifo", "file", "gone", "null\0")] + [tmp_path]
    assert (file_keys(paths) != UNKNOWN).tolist() == [False, True, False, False, False]
