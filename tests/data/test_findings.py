"""Findings about images that decode: leaks, labels, classes, sizes and modes."""

import io
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from bad_images import photo
from image_files import encode, folder
from PIL import Image, ImageEnhance

from vitkit import check, open_dataset
from vitkit.data.checks.check import drop_or_refuse_unreadable
from vitkit.data.checks.findings import Finding
from vitkit.data.checks.scan import NONE, THUMBNAIL_SIDE, nearest_copies, same_pixels

SIZE = (200, 160)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Ten photos of each of two classes for training, five for validation, no two alike."""
    draw = np.random.default_rng(0)
    for split, count in (("train", 10), ("val", 5)):
        for name in ("cat", "dog"):
            (tmp_path / split / name).mkdir(parents=True)
            for number in range(count):
                photo(draw, SIZE).save(tmp_path / split / name / f"{number}.png")
    return tmp_path


def findings_of(root: Path, kind: str) -> list[Finding]:
    return [finding for finding in check(root).findings if finding.kind == kind]


def test_there_are_no_findings_for_images_without_fault(root: Path) -> None:
    report = check(root)
    assert report.findings == ()
    assert report.total == 30
    assert report.images == {"train": {"cat": 10, "dog": 10}, "val": {"cat": 5, "dog": 5}}


def test_the_same_pixels_in_two_splits_are_a_leak_whatever_the_file(root: Path) -> None:
    with Image.open(root / "train" / "cat" / "3.png") as image:
        image.save(root / "val" / "cat" / "other-name.bmp")
    (leak,) = findings_of(root, "leak")
    assert leak.severity == "warning"
    assert leak.images == (("val/cat/other-name.bmp", "train/cat/3.png"),)
    assert "pixel for pixel" in leak.message
    assert findings_of(root, "near leak") == []
    assert findings_of(root, "two labels") == []
    report = check(root)
    assert not report.refused
    assert leak.message in report.warnings()
    assert leak.message in drop_or_refuse_unreadable(open_dataset(root), "refuse")[1].warnings()


CHANGES: dict[str, Callable[[Image.Image], Image.Image]] = {
    "saved at 50": lambda p: Image.open(io.BytesIO(encode(p, "JPEG", quality=50))),
    "half size": lambda p: p.resize((100, 80), Image.Resampling.BICUBIC),
    "a quarter": lambda p: p.resize((50, 40), Image.Resampling.BICUBIC),
    "mirrored": lambda p: p.transpose(Image.Transpose.FLIP_LEFT_RIGHT),
    "more contrast": lambda p: ImageEnhance.Contrast(p).enhance(1.2),
    "gamma": lambda p: p.point([round(255 * (v / 255) ** 1.15) for v in range(256)] * 3),
    "twice the size": lambda p: p.resize((400, 320), Image.Resampling.BICUBIC),
    "grey": lambda p: p.convert("L"),
    "brighter": lambda p: ImageEnhance.Brightness(p).enhance(1.05),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_changed_copy_in_another_split_is_a_near_leak(root: Path, change: str) -> None:
    with Image.open(root / "train" / "dog" / "7.png") as image:
        CHANGES[change](image).save(root / "val" / "dog" / "copy.png")
    (leak,) = findings_of(root, "near leak")
    assert leak.images == (("val/dog/copy.png", "train/dog/7.png"),)
    assert leak.count == 1
    assert findings_of(root, "leak") == []


def test_a_copy_upside_down_is_another_image(root: Path) -> None:
    with Image.open(root / "train" / "dog" / "7.png") as image:
        turned = image.transpose(Image.Transpose.ROTATE_180)
        turned.save(root / "val" / "dog" / "copy.png")
    assert findings_of(root, "near leak") == []


def test_a_changed_copy_under_another_class_is_reported(root: Path) -> None:
    with Image.open(root / "train" / "dog" / "7.png") as image:
        image.save(root / "train" / "cat" / "copy.jpg")
        image.transpose(Image.Transpose.FLIP_LEFT_RIGHT).save(root / "train/cat/mirrored.png")
    (torn,) = findings_of(root, "near two labels")
    assert torn.images == (("train/cat/copy.jpg", "train/dog/7.png"),)
    assert torn.severity == "warning"
    assert "1 pair of nearly the same images with different labels, of 'cat', 'dog'" in torn.message
    (repeated,) = findings_of(root, "near duplicate")
    assert (repeated.count, repeated.severity) == (2, "note")
    assert findings_of(root, "two labels") == findings_of(root, "duplicate") == []


def test_alike_images_are_reported_once_each(tmp_path: Path) -> None:
    """Frames of a fixed camera: each has one copy named, not all of the others."""
    draw = np.random.default_rng(0)
    scene = draw.integers(0, 200, (40, 40, 3))
    for split, count in (("train", 30), ("val", 20)):
        for name in ("open", "shut"):
            path = tmp_path / split / name
            path.mkdir(parents=True)
            for number in range(count // 2):
                frame = scene + draw.integers(0, 6, scene.shape)
                Image.fromarray(frame.astype(np.uint8)).save(path / f"{number}.png")
    (leak,) = findings_of(tmp_path, "near leak")
    assert leak.count == len(leak.images) == 20
    assert len(findings_of(tmp_path, "near two labels")[0].images) <= 70


def test_digits_are_not_taken_for_each_other() -> None:
    report = check("digits")
    assert report.findings == ()


@pytest.mark.parametrize("mirrored", [False, True])
@pytest.mark.parametrize("alike", [False, True])
def test_the_nearest_copies_are_those_that_a_search_of_all_pairs_finds(
    mirrored: bool, alike: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    from vitkit.data.checks import scan

    monkeypatch.setattr(scan, "ROWS", 7)
    monkeypatch.setattr(scan, "COLUMNS", 13)
    draw = np.random.default_rng(3)
    many = draw.integers(0, 256, (1 if alike else 200, THUMBNAIL_SIDE, THUMBNAIL_SIDE)).repeat(
        200 if alike else 1, 0
    )
    many = np.clip(many + draw.normal(0, 2, many.shape), 0, 255).astype(np.uint8)
    many[5] = 90
    noise = draw.normal(
        0, np.linspace(0, 12, 100)[:, None, None], (100, THUMBNAIL_SIDE, THUMBNAIL_SIDE)
    )
    few = np.clip(many[::2] + noise, 0, 255).astype(np.uint8)
    few[::3] = few[::3, :, ::-1]
    labels = draw.integers(0, 2, 100), draw.integers(0, 2, 200)

    def correlation(views: np.ndarray) -> np.ndarray:
        with np.errstate(invalid="ignore"):
            both = np.concatenate([views, many]).reshape(300, -1)
            return np.nan_to_num(np.corrcoef(both)[:100, 100:])

    for apart in (None, labels):
        expected = correlation(few)
        if mirrored:
            expected = np.maximum(expected, correlation(few[:, :, ::-1]))
        if apart is not None:
            expected[apart[0][:, None] == apart[1]] = 0
        copies = nearest_copies(few, many, mirrored=mirrored, apart=apart)
        has_copy = copies != NONE
        assert (has_copy == (expected.max(axis=1) >= 0.997)).all()
        assert 10 < has_copy.sum() < 100
        np.testing.assert_allclose(
            expected[has_copy, copies[has_copy]], expected[has_copy].max(axis=1), atol=1e-6
        )
    assert len(nearest_copies(few[:0], many)) == 0
    assert (nearest_copies(few, many[:0]) == NONE).all()


def test_groups_of_the_same_pixels() -> None:
    pixels = np.array([[1, 2], [3, 4], [1, 2], [1, 3], [3, 4], [1, 2], [9, 9]], np.uint64)
    assert [group.tolist() for group in same_pixels(pixels)] == [[0, 2, 5], [1, 4]]
    assert same_pixels(np.zeros((0, 2), np.uint64)) == []


def test_one_image_under_two_labels(root: Path) -> None:
    content = (root / "train" / "cat" / "0.png").read_bytes()
    (root / "train" / "dog" / "zero.png").write_bytes(content)
    (torn,) = findings_of(root, "two labels")
    assert torn.images == (("train/cat/0.png", "train/dog/zero.png"),)
    assert "'cat', 'dog'" in torn.message
    assert torn.severity == "warning"
    (repeated,) = findings_of(root, "duplicate")
    assert repeated.severity == "note"


def test_empty_rare_and_missing_classes_and_names_that_look_alike(tmp_path: Path) -> None:
    counts = {"train/a": 40, "train/b": 40, "train/c": 3, "train/d": 1, "train/e": 0,
              "train/a_": 40, "val/a": 2, "val/c": 1, "val/d": 1, "val/a_": 1}  # fmt: skip
    report = check(folder(tmp_path, counts))
    messages = {finding.kind: finding.message for finding in report.findings}
    assert messages["empty class"] == "train has no images of class 'e'"
    # of e, train has none either
    assert messages["missing class"] == "val has no images of class 'b'"
    assert messages["rare class"] == "train has few images of 'c', 'd'; the median is 40"
    assert "'a' and 'a_' look alike" in messages["class names"]
    assert not {*report.notes} & {*messages.values()}


def test_blank_images_and_odd_sizes(root: Path) -> None:
    draw = np.random.default_rng(9)
    for name, size in {"tiny": (9, 9), "huge": (1600, 1200)}.items():
        photo(draw, size).save(root / "train" / "cat" / f"{name}.png")
    Image.new("RGB", SIZE, "navy").save(root / "train" / "cat" / "blank.png")
    assert findings_of(root, "blank")[0].images == (("train/cat/blank.png",),)
    (sizes,) = findings_of(root, "size")
    assert {name for (name,) in sizes.images} == {"train/cat/tiny.png", "train/cat/huge.png"}
    assert "179 x 179" in sizes.message
