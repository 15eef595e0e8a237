"""Image folders: layouts, class maps, links, and every refusal and note."""

import os
import random
import threading
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from image_files import contents, folder, refusal, save

from vitkit import check, open_dataset
from vitkit.data.checks.check import drop_or_refuse_unreadable


@pytest.mark.parametrize("val", ["val", "valid", "validation", "Val", "dev", "eval"])
def test_train_val_and_test_folders(tmp_path: Path, val: str) -> None:
    test = "Testing" if val == "eval" else "test"
    counts = {"train/cat": 3, "train/dog": 2, f"{val}/cat": 1, f"{val}/dog": 1, f"{test}/dog": 2}
    dataset = open_dataset(folder(tmp_path / "pets", counts))
    assert dataset.name == "pets"
    assert dataset.classes == ("cat", "dog")
    assert list(dataset.splits) == ["train", "val", "test"]
    assert contents(dataset) == {
        "train": {("cat", 0), ("cat", 1), ("cat", 2), ("dog", 3), ("dog", 4)},
        "val": {("cat", 5), ("dog", 6)},
        "test": {("dog", 7), ("dog", 8)},
    }
    assert dataset.notes == ("test has no images of class 'cat'",)
    train = dataset.splits["train"]
    assert train.name(3) == "train/dog/0.png"
    assert train.labels.dtype == np.int64
    assert train.read(0).shape == (4, 5, 3)


def test_any_nesting_and_any_case_of_ending(tmp_path: Path) -> None:
    names = ["a.jpg", "b.JPEG", "c.Png", "d.webp", "e.bmp", "f.gif", "g.tif", "x/y/h.TIFF"]
    for i, name in enumerate(names):
        save(tmp_path / "train" / "cat" / name, i)
        save(tmp_path / "train" / "dog" / name, 100 + i)
    (tmp_path / "train" / "dog" / "notes.txt").write_text("no image")
    dataset = open_dataset(tmp_path)
    assert Counter(dataset.splits["train"].labels.tolist()) == {0: 8, 1: 8}
    assert contents(dataset)["train"] >= {("cat", 7), ("dog", 107)}


def test_folders_that_all_hold_the_same_folders_are_warned_of(tmp_path: Path) -> None:
    folds = folder(tmp_path / "folds", {f"fold{f}/{c}": 10 for f in (1, 2) for c in "abc"})
    (warning,) = open_dataset(folds).warnings
    assert (
        "'fold1', 'fold2' all hold the folders 'a', 'b', 'c', which may be the classes" in warning
    )
    turned = folder(tmp_path / "t", {f"{c}/{s}": 10 for c in "ab" for s in ("train", "test")})
    (warning,) = open_dataset(turned).warnings
    assert "put the splits above the classes: train/<class>, test/<class>" in warning
    nested = folder(tmp_path / "n", {"a/2020": 10, "a/2021": 10, "b/2020": 10})
    assert open_dataset(nested).warnings == ()


def test_files_with_other_endings_are_counted(tmp_path: Path) -> None:
    root = folder(tmp_path, {"train/a": 2, "train/b": 2})
    for number in range(3):
        save(root / "train" / "b" / f"{number}.jfif", 500 + number)
        save(root / "train" / "a" / f"{number}.JPE", 600 + number)
        (root / "train" / "a" / f"{number}.HEIC").touch()
    save(root / "train" / "b" / "copy.jfif", 500)
    for name in ("labels.json", "readme", "notes.txt", "more.txt"):
        (root / name).touch()
    dataset = open_dataset(root)
    assert len(dataset.splits["train"]) == 11
    (warning,) = dataset.warnings
    assert "not read: 3 .heic; convert them" in warning
    assert "not read: 2 .txt, 1 .json, 1 without an ending" in dataset.notes
    report = check(dataset)
    assert warning in report.warnings()
    order = ["error", "warning", "note"]
    assert {f.severity for f in report.findings} >= {"warning", "note"}
    severities = [order.index(finding.severity) for finding in report.findings]
    assert severities == sorted(severities)
    assert warning in drop_or_refuse_unreadable(dataset, "refuse")[1].warnings()


def test_a_flat_folder_is_split_70_10_20(tmp_path: Path) -> None:
    dataset = open_dataset(folder(tmp_path, {"cat": 100, "dog": 50}))
    sizes = {name: Counter(split.labels.tolist()) for name, split in dataset.splits.items()}
    assert sizes == {"train": {0: 70, 1: 35}, "val": {0: 10, 1: 5}, "test": {0: 20, 1: 10}}
    parts = contents(dataset)
    assert len(set.union(*parts.values())) == 150
    assert any("70/10/20" in n and "105 train, 15 val, 30 test" in n for n in dataset.notes)


def test_a_flat_split_follows_the_images_and_not_their_names(tmp_path: Path) -> None:
    first = folder(tmp_path / "first", {"cat": 40, "dog": 40})
    values = list(range(80))
    random.Random(0).shuffle(values)
    for value in values:  # made in another order, named in another order, nested elsewhere
        name = "cat" if value < 40 else "dog"
        save(tmp_path / "second" / name / f"{value % 3}" / f"{(value * 37) % 101:03}.png", value)
    one, two = open_dataset(first), open_dataset(tmp_path / "second")
    assert contents(one) == contents(two)
    assert len(one.splits["train"]) == 56


def test_the_order_is_not_the_file_systems(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = folder(tmp_path, {"train/a": 9, "train/b": 9, "val/b": 3, "val/a": 3})
    once = open_dataset(root)
    scandir = os.scandir

    class Shuffled:
        def __init__(self, path: Path) -> None:
            with scandir(path) as found:
                entries = list(found)
            random.Random(len(str(path))).shuffle(entries)
            self.entries = iter(entries)

        def __next__(self) -> os.DirEntry[str]:
            return next(self.entries)

        def __iter__(self) -> Iterable[os.DirEntry[str]]:
            return self.entries

        def __enter__(self) -> Any:
            return self

        def __exit__(self, *_: object) -> None: ...

    monkeypatch.setattr(os, "scandir", Shuffled)
    again = open_dataset(root)
    assert again.fingerprint == once.fingerprint
    for name, split in once.splits.items():
        assert split.paths == again.splits[name].paths


def test_one_class_only(tmp_path: Path) -> None:
    assert "only one class has images, 'cat'" in refusal(folder(tmp_path / "a", {"cat": 3}))
    assert "only one class" in refusal(folder(tmp_path / "b", {"train/cat": 3, "val/dog": 1}))
    assert "only one class" in refusal(folder(tmp_path / "c", {"cat": 3, "dog": 0}))
    nested = folder(tmp_path / "d", {"pets/train/cat": 2, "pets/train/dog": 2})
    assert f"did you mean {nested}/pets?" in refusal(nested)


def test_validation_classes_that_train_lacks(tmp_path: Path) -> None:
    counts = {"train/a": 2, "train/c": 2, "val/a": 1, "val/b": 2, "val/d": 1, "val/e": 0}
    root = folder(tmp_path, counts)
    message = refusal(root)
    assert "val has 2 classes that train lacks: 'b', 'd'" in message
    assert "--ignore-extra-classes" in message
    dataset = open_dataset(root, ignore_extra_classes=True)
    assert dataset.classes == ("a", "c")
    assert contents(dataset)["val"] == {("a", 4)}
    assert "val classes that train lacks are left out: 'b', 'd'" in dataset.notes
    assert "val has no images of class 'c'" in dataset.notes


def test_an_empty_class_is_noted_and_keeps_its_number(tmp_path: Path) -> None:
    dataset = open_dataset(folder(tmp_path / "s", {"train/a": 2, "train/b": 0, "train/c": 2}))
    assert dataset.classes == ("a", "b", "c")
    assert dataset.splits["train"].labels.tolist() == [0, 0, 2, 2]
    assert dataset.notes == ("train has no images of class 'b'",)
    flat = open_dataset(folder(tmp_path / "f", {"a": 20, "b": 0, "c": 20}))
    assert flat.classes == ("a", "b", "c")
    assert set(flat.splits["train"].labels.tolist()) == {0, 2}
    assert "train has no images of class 'b'" in flat.notes


def test_hidden_folders_are_skipped_and_counted(tmp_path: Path) -> None:
    counts = {"train/a": 2, "train/b": 2, "train/.ipynb_checkpoints": 1, "__MACOSX/train/a": 3}
    root = folder(tmp_path, {**counts, ".git": 1, "train/@eaDir": 1})
    save(root / "train" / "a" / "._0.png", 5)
    dataset = open_dataset(root)
    assert dataset.classes == ("a", "b")
    assert len(dataset.splits["train"]) == 4
    assert dataset.notes == ("4 hidden folders skipped",)


def test_what_is_not_read_is_noted(tmp_path: Path) -> None:
    root = folder(tmp_path, {"train/a": 1, "train/b": 1, "extra/a": 2, "val": 0})
    save(root / "cover.png", 1)
    save(root / "train" / "stray.png", 2)
    notes = open_dataset(root).notes
    assert "folders beside 'train', 'val' are not read: 'extra'" in notes
    assert "2 images outside the class folders not read" in notes
    assert "val has no images and is left out" in notes


def test_links_out_of_the_root_are_refused_unless_followed(tmp_path: Path) -> None:
    root = folder(tmp_path / "data", {"train/a": 2, "train/b": 2})
    folder(tmp_path / "elsewhere", {"images": 3})
    (root / "train" / "c").symlink_to(tmp_path / "elsewhere" / "images")
    (root / "train" / "a" / "linked.png").symlink_to(tmp_path / "elsewhere" / "images" / "0.png")
    message = refusal(root)
    assert "2 symbolic links lead out of the folder, the first is train/a/linked.png" in message
    assert "--follow-links" in message
    dataset = open_dataset(root, follow_links=True)
    assert Counter(dataset.splits["train"].labels.tolist()) == {0: 3, 1: 2, 2: 3}
    assert dataset.splits["train"].name(7) == "train/c/2.png"
    # a sibling whose name starts like the root is outside
    root = folder(tmp_path / "one", {"train/a": 1, "train/b": 1})
    folder(tmp_path / "one-private", {"x": 1})
    (root / "train" / "c").symlink_to(tmp_path / "one-private" / "x")
    assert "lead out of the folder" in refusal(root)


def test_links_inside_the_root_are_followed(tmp_path: Path) -> None:
    root = folder(tmp_path / "real", {"all/a": 2, "all/b": 2})
    (root / "train").mkdir()
    for name in "ab":
        (root / "train" / name).symlink_to(f"../all/{name}")
    (tmp_path / "alias").symlink_to(root)
    dataset = open_dataset(tmp_path / "alias")
    assert len(dataset.splits["train"]) == 4


@pytest.mark.parametrize("follow_links", [False, True])
def test_loops_end(tmp_path: Path, follow_links: bool) -> None:
    root = folder(tmp_path, {"train/a": 2, "train/b": 2})
    (root / "train" / "a" / "up").symlink_to(root / "train")
    (root / "train" / "b" / "me").symlink_to("me")
    (root / "train" / "b" / "me.png").symlink_to("me.png")
    for i in range(10):  # folders full of links to each other: ten factorial ways through them
        (root / "train" / "b" / f"f{i}").mkdir()
    for i in range(10):
        for j in range(10):
            (root / "train" / "b" / f"f{i}" / f"l{j}").symlink_to(f"../f{j}")
    opened: list[Any] = []
    worker = threading.Thread(
        target=lambda: opened.append(open_dataset(root, follow_links=follow_links)), daemon=True
    )
    worker.start()
    worker.join(30)
    assert opened, "hangs"
    assert any("loop" in note for note in opened[0].notes)
    assert {"train/a/0.png", "train/b/me.png"} <= {
        opened[0].splits["train"].name(i) for i in range(len(opened[0].splits["train"]))
    }
