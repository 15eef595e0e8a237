"""Copies stay in one split, and what was trained on an earlier cut keeps it."""

from __future__ import annotations

import io
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

import vitkit
from vitkit import cli, open_dataset
from vitkit.data.checks.check import drop_or_refuse_unreadable
from vitkit.data.datasets import splitting
from vitkit.data.datasets.dataset import Dataset
from vitkit.data.datasets.splitting import stratified_split, with_validation


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
    assert dataset.as_before is not None
    assert torn(dataset.as_before) > 0
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
    assert dataset.as_before is not None
    assert torn(dataset.as_before) > 0
    assert dataset.as_before.fingerprint == opened.fingerprint != dataset.fingerprint
    for each in (dataset, dataset.as_before):
        again = splitting.with_validation_of(opened, each.fingerprint, 0.1)
        assert again.splits["val"].paths == each.splits["val"].paths
    assert splitting.with_validation_of(opened, "another", 0.1) is opened


def test_copies_stay_together_when_images_were_left_out_first(tmp_path: Path) -> None:
    copies(tmp_path / "pets" / "train")
    for name in ("000", "031"):
        (tmp_path / "pets" / "train" / "cat" / f"{name}.png").write_bytes(b"words")
    opened, _ = drop_or_refuse_unreadable(open_dataset(tmp_path / "pets"), "skip")
    dataset = with_validation(opened, 0.1)
    assert sum(map(len, dataset.splits.values())) == 128
    assert torn(dataset) == 0


def test_without_copies_the_cut_and_the_fingerprint_are_those_of_before(tmp_path: Path) -> None:
    dataset = open_dataset(copies(tmp_path / "pets", kinds=40, times=1))
    assert dataset.as_before is None
    keys = np.random.default_rng(0).integers(0, 1 << 63, 99).astype(np.uint64)
    labels = np.arange(99) % 3
    parts = [stratified_split(labels, (0.8, 0.2), 0, keys, together=how) for how in (True, False)]
    assert all(map(np.array_equal, *parts))


def test_a_class_of_copies_of_one_image_keeps_them_in_train() -> None:
    labels, keys = np.array([0] * 9 + [1] * 4), np.array([7] * 9 + [1, 2, 3, 4], np.uint64)
    train, test = stratified_split(labels, (0.5, 0.5), 0, keys)
    assert set(range(9)) <= {*train.tolist()}
    assert len(test) == 2


def test_a_run_on_the_earlier_cut_is_evaluated_on_it_and_not_resumed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    root, run = copies(tmp_path / "pets"), tmp_path / "run"
    with monkeypatch.context() as patch:
        patch.setattr(splitting, "_moved_to_edges", lambda *given: given[-1])
        earlier = open_dataset(root)
        tiny = ["--spec.image-size", "16", "--spec.patch-size", "8", "--spec.width", "16",
                "--spec.depth", "1", "--spec.num-heads", "1", "--spec.mlp-width", "16"]  # fmt: skip
        command = ["train", str(root), "--output", str(run), "--epochs", "1", "--amp", "off",
                   "--batch-size", "30", "--device", "cpu", "--quiet", "--no-plots",
                   "--no-report", *tiny]  # fmt: skip
        assert cli.run(command) == 0
        metrics = vitkit.evaluate(run, root, device="cpu")
    assert vitkit.evaluate(run, root, device="cpu") == metrics
    assert metrics["images"] == len(earlier.splits["test"]) == 26
    capsys.readouterr()
    assert cli.run(["train", "--resume", str(run)]) == 2
    assert (
        "splits, which an earlier version of vitkit divided differently, differ from"
        in capsys.readouterr().err
    )
