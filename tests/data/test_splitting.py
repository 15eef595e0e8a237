"""Copies stay in one split."""

from __future__ import annotations

import io
from pathlib import Path

import numpy as np
from PIL import Image

from vitkit import Dataset, open_dataset
from vitkit.data.checks.check import drop_or_refuse_unreadable
from vitkit.data.datasets.splitting import stratified_split, with_validation, with_validation_of


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
