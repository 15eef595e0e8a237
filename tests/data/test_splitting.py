"""Splits: stratified parts, copies that stay together, class names, fingerprints."""

import io
import itertools
import os
import unicodedata
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from image_files import folder, save
from PIL import Image

from vitkit import DataError, Dataset, SettingError, open_dataset
from vitkit.data.checks.check import drop_or_refuse_unreadable
from vitkit.data.datasets.splitting import (
    doubtful_names,
    match_classes,
    natural_order,
    refuse_look_alikes,
    stratified_split,
    with_validation,
    with_validation_of,
)


def image(number: int) -> bytes:
    stream = io.BytesIO()
    pixels = np.random.default_rng(number).integers(0, 256, (16, 16, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(stream, "PNG")
    return stream.getvalue()


def copies(root: Path, kinds: int = 13, times: int = 5) -> Path:
    """Two classes of `kinds` images, each of them `times` times."""
    for label, name in enumerate(("cat", "dog")):
        root.joinpath(name).mkdir(parents=True)
        for number in range(kinds * times):
            content = image(1000 * label + number % kinds)
            root.joinpath(name, f"{number:03}.png").write_bytes(content)
    return root


def torn(dataset: Dataset) -> int:
    """Return the number of images that are in several splits."""
    contents = [
        {split.read(index).tobytes() for index in range(len(split))}
        for split in dataset.splits.values()
    ]
    return sum(map(len, contents)) - len(set.union(*contents))


def test_copies_stay_in_one_split(tmp_path: Path) -> None:
    root = copies(tmp_path / "pets")
    dataset = open_dataset(root)
    assert torn(dataset) == 0
    sizes = {name: len(split) for name, split in dataset.splits.items()}
    assert sizes == {"train": 90, "val": 10, "test": 30}
    listed = root / "list.csv"
    lines = [f"{path.relative_to(root)},{path.parent.name}" for path in root.glob("*/*.png")]
    listed.write_text("\n".join(["path,label", *lines]))
    assert torn(open_dataset(listed)) == 0


def test_copies_in_train_stay_together_when_validation_is_taken(tmp_path: Path) -> None:
    copies(tmp_path / "pets" / "train")
    opened = open_dataset(tmp_path / "pets")
    dataset = with_validation(opened, 0.1)
    assert torn(dataset) == 0
    assert len(dataset.splits["val"]) in (10, 15, 20)
    assert opened.fingerprint != dataset.fingerprint
    again = with_validation_of(opened, dataset.fingerprint, 0.1)
    assert again.splits["val"].paths == dataset.splits["val"].paths
    assert with_validation_of(opened, "another", 0.1) is opened


def test_copies_stay_together_when_images_were_left_out_first(tmp_path: Path) -> None:
    copies(tmp_path / "pets" / "train")
    for name in ("000", "031"):
        (tmp_path / "pets" / "train" / "cat" / f"{name}.png").write_bytes(b"words")
    opened, _ = drop_or_refuse_unreadable(open_dataset(tmp_path / "pets"), "skip")
    dataset = with_validation(opened, 0.1)
    assert sum(map(len, dataset.splits.values())) == 128
    assert torn(dataset) == 0


def test_without_copies_the_cut_does_not_depend_on_keeping_them_together() -> None:
    keys = np.random.default_rng(0).integers(0, 1 << 63, 99).astype(np.uint64)
    labels = np.arange(99) % 3
    parts = [stratified_split(labels, (0.8, 0.2), 0, keys, together=how) for how in (True, False)]
    assert all(map(np.array_equal, *parts))


def test_a_class_of_copies_of_one_image_keeps_them_in_train() -> None:
    labels, keys = np.array([0] * 9 + [1] * 4), np.array([7] * 9 + [1, 2, 3, 4], np.uint64)
    train, test = stratified_split(labels, (0.5, 0.5), 0, keys)
    assert set(range(9)) <= {*train.tolist()}
    assert len(test) == 2


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
    assert [*map(len, stratified_split(np.arange(30), (0.5, 0.5)))] == [30, 0]


def test_the_cut_depends_on_seed_and_keys_and_on_nothing_else() -> None:
    labels = np.repeat([0, 1], 50)
    keys = np.random.default_rng(1).integers(0, 2**63, 100).astype(np.uint64)
    first = stratified_split(labels, (0.8, 0.2), 0, keys)[1]
    assert first.tolist() == stratified_split(labels, (0.8, 0.2), 0, keys)[1].tolist()
    assert first.tolist() != stratified_split(labels, (0.8, 0.2), 1, keys)[1].tolist()
    order = np.random.default_rng(2).permutation(100)
    second = stratified_split(labels[order], (0.8, 0.2), 0, keys[order])[1]
    assert set(keys[first].tolist()) == set(keys[order][second].tolist())


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
    with pytest.raises(DataError, match=r"2 images, too few to use 10% .* --val-fraction 0"):
        with_validation(dataset, 0.1)
    with pytest.raises(SettingError, match="between 0 and 1"):
        with_validation(dataset, 1.0)


@pytest.mark.parametrize(
    "ordered",
    [("0", "1", "2", "9", "10", "11", "100"), ("img1", "img2", "img10"),
     ("class 9 b", "class 10 a"), ("7", "007", "cat"), ("3", "B", "a", "b"),
     ("v1.2", "v1.10", "v1.10a")],
)  # fmt: skip
def test_natural_order_from_any_order(ordered: tuple[str, ...]) -> None:
    expected = natural_order(ordered)
    if ordered != ("7", "007", "cat"):
        assert expected == ordered
    for shuffled in itertools.islice(itertools.permutations(ordered), 50):
        assert natural_order(shuffled) == expected


@pytest.mark.parametrize(
    "names",
    [("Cat", "cat"), ("STRASSE", "straße"),
     (unicodedata.normalize("NFC", "café"), unicodedata.normalize("NFD", "café")),
     (unicodedata.normalize("NFC", "CAFÉ"), unicodedata.normalize("NFD", "café"))],
)  # fmt: skip
def test_names_that_look_alike_are_refused(names: tuple[str, str]) -> None:
    with pytest.raises(DataError) as caught:
        refuse_look_alikes(("dog", *names), "/data")
    assert all(ascii(name) in str(caught.value) for name in names)
    refuse_look_alikes(("dog", names[0], names[0]), "/data")
    with pytest.raises(DataError, match="not valid UTF-8"):
        refuse_look_alikes((names[0], "b\udcff"), "/data")


@pytest.mark.parametrize(
    "names",
    [("cat", "cat "), ("great white", "great_white"), ("great-white", "GreatWhite"), ("1", "01"),
     ("cat", "\uff43\uff41\uff54"), ("cat", "c\u200bat"), ("img 7", "img 007")],
)  # fmt: skip
def test_names_that_may_be_one_class_are_noted(names: tuple[str, str]) -> None:
    (line,) = doubtful_names(("dog", *names))
    assert all(ascii(name) in line for name in names)
    assert "look alike" in line


def test_names_that_are_none_are_noted_and_others_are_not() -> None:
    assert "missing label" in doubtful_names(["dog", "NaN"])[0]
    assert doubtful_names(["dog", "nancy", "1", "10", "100", "1.5", "1.05", "-", "_"]) == []
    assert doubtful_names(["C", "C++", "C#", "\u0915\u093f", "\u0915\u0940"]) == []


def test_classes_are_matched_by_name_and_two_of_one_name_are_ambiguous() -> None:
    match = match_classes(["dog", "bird", "cat"], ["cat", "dog", "owl", "cat"])
    assert match.indices == (1, 0)
    assert (match.unknown, match.unused) == (("bird",), ("owl",))
    assert match.ambiguous == ("cat",)
    assert match_classes(["dog"], ["cat", "dog", "cat"]).ambiguous == ()
