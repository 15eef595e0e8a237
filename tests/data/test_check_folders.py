"""Traps of labels and of file systems: each is caught, or aligned by name, and none hangs."""

import os
import threading
from pathlib import Path
from typing import Any

import pytest
from bad_images import TRAPS
from image_files import folder, refusal, save

from vitkit import check, open_dataset

COUNTS = {"train/a": 3, "train/b": 3, "train/c": 3, "val/a": 2, "val/b": 2, "val/c": 2}


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
    assert problems(check(dataset)) == {"train/a/0.png": "missing", "train/a/1.png": "not a file"}
