"""Traps of labels and of file systems: each is caught, or aligned by name, and none hangs."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from bad_images import TRAPS
from image_files import folder, refusal, save

from vitkit import check, open_dataset
from vitkit.data.images.decode import decode

COUNTS = {"train/a": 3, "train/b": 3, "train/c": 3, "val/a": 2, "val/b": 2, "val/c": 2}


def accuracy_by_our_labels(dataset: Any, guess: Callable[[np.ndarray], int]) -> float:
    """Return the share of val images whose class number is guessed right."""
    val = dataset.splits["val"]
    right = [guess(val.read(i)) % len(dataset.classes) == val.labels[i] for i in range(len(val))]
    return sum(right) / len(val)


def accuracy_by_the_folders(root: Path, classes: tuple[str, ...], guess: Callable) -> float:
    """The same from the names of the folders alone."""
    files = [path for path in sorted((root / "val").rglob("*.png")) if ".hidden" not in path.parts]
    named = [path.relative_to(root).parts[1] for path in files]
    right = [
        classes[guess(decode(path)) % len(classes)] == name
        for path, name in zip(files, named, strict=True)
    ]
    return sum(right) / len(files)


def by_first_pixel(pixels: np.ndarray) -> int:
    return int(pixels[0, 0, 0]) * 7 // 3


LABEL_TRAPS: dict[str, tuple[dict[str, int], str]] = {
    "val lacks a class": (COUNTS | {"val/b": 0}, "val has no images of class 'b'"),
    "numeric names": (
        {"train/10": 3, "train/9": 3, "train/2": 3, "val/10": 2, "val/2": 4, "val/9": 2},
        "",
    ),
    "another order": (
        {"val/c": 5, "val/a": 2, "train/c": 2, "train/a": 2, "train/b": 9},
        "val has",
    ),
    "an empty class": (COUNTS | {"train/b0": 0}, "train has no images of class 'b0'"),
    "a hidden folder": (COUNTS | {"val/.hidden": 3, "train/.hidden": 2}, "2 hidden folders"),
}


@pytest.mark.parametrize("trap", LABEL_TRAPS)
def test_labels_are_aligned_by_name(tmp_path: Path, trap: str) -> None:
    counts, warning = LABEL_TRAPS[trap]
    root = folder(tmp_path, counts)
    dataset = open_dataset(root)
    ours = accuracy_by_our_labels(dataset, by_first_pixel)
    assert abs(ours - accuracy_by_the_folders(root, dataset.classes, by_first_pixel)) <= 1e-9
    wrong = (*dataset.classes[1:], dataset.classes[0])
    assert ours != accuracy_by_the_folders(root, wrong, by_first_pixel)
    report = check(dataset)
    lines = [*report.notes, *(finding.message for finding in report.findings)]
    assert any(warning in line for line in lines)


def checked(root: Path, **options: bool) -> Any:
    """A check that must end."""
    reports: list[Any] = []
    worker = threading.Thread(target=lambda: reports.append(check(root, **options)), daemon=True)
    worker.start()
    worker.join(30)
    assert reports, "hangs"
    return reports[0]


def problems(report: Any) -> dict[str, str]:
    named = [(p.name, p.reason) for group in report.problems.values() for p in group]
    assert len(dict(named)) == len(named), "reported twice"
    return dict(named)


def test_every_trap_is_reported_once_and_none_hangs(tmp_path: Path) -> None:
    root = folder(tmp_path, COUNTS)
    for kind, (make, _) in TRAPS.items():
        make(root / "train" / "a" / f"{kind}.jpg")
    (root / "train" / "a" / "loop").symlink_to(root / "train")
    (root / "train" / "b" / "folder.jpg").mkdir()
    report = checked(root)
    refused = problems(report)
    assert refused.keys() == {f"train/a/{kind}.jpg" for kind in TRAPS}
    assert all(refused[f"train/a/{kind}.jpg"] in reasons for kind, (_, reasons) in TRAPS.items())
    assert any("loop" in note for note in report.notes)


def test_a_device_is_refused_as_a_link_out_and_as_an_image(tmp_path: Path) -> None:
    root = folder(tmp_path, COUNTS)
    (root / "train" / "a" / "endless.jpg").symlink_to("/dev/zero")
    assert "lead out of the folder" in refusal(root)
    refused = problems(checked(root, follow_links=True))
    assert refused == {"train/a/endless.jpg": "not a file"}


def test_a_hard_link_is_the_same_image(tmp_path: Path) -> None:
    root = folder(tmp_path, COUNTS)
    os.link(root / "train" / "a" / "1.png", root / "val" / "c" / "linked.png")
    kinds = {finding.kind: finding for finding in checked(root).findings}
    assert kinds["leak"].images == (("val/c/linked.png", "train/a/1.png"),)
    assert kinds["two labels"].images == (("train/a/1.png", "val/c/linked.png"),)


@pytest.mark.parametrize(
    "name", ["two\nlines.jpg", os.fsdecode(b"latin-\xff.jpg"), "x" * 251 + ".jpg", "\u202eevil.jpg"]
)
def test_names_are_printable_whatever_they_are(tmp_path: Path, name: str) -> None:
    root = folder(tmp_path, COUNTS)
    (root / "train" / "a" / name).write_bytes(b"words")
    (shown,) = problems(checked(root))
    assert shown.isprintable()
    shown.encode()


def test_files_that_are_replaced_and_lost_between_opening_and_looking(tmp_path: Path) -> None:
    root = folder(tmp_path, COUNTS)
    dataset = open_dataset(root)
    (root / "train" / "a" / "0.png").unlink()
    (root / "train" / "a" / "1.png").unlink()
    (root / "train" / "a" / "1.png").mkdir()
    save(root / "train" / "a" / "2.png", 777)
    assert problems(check(dataset)) == {
        "train/a/0.png": "missing",
        "train/a/1.png": "not a file",
    }
