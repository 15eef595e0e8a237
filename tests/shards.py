"""The same images as a folder, a CSV, Parquet files and tar shards, for the tests of sources."""

import csv
import io
import tarfile
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

import vitkit
from vitkit import TrainResult

CLASSES = ("1", "2", "10")
"""As names: in natural order, which is not the order of letters."""

Sample = tuple[str, str, str, bytes]
"""Split, class, name, encoded image."""


def samples(per_class: int = 6) -> list[Sample]:
    """Small images of a colour that tells their class, some JPEG and some PNG, of many sizes."""
    generator = np.random.default_rng(0)
    made = []
    for split, count in (("train", per_class), ("val", 2), ("test", 2)):
        for label, name in enumerate(CLASSES):
            for number in range(count):
                height, width = generator.integers(9, 21, 2)
                noise = generator.integers(0, 90, (height, width, 3))
                noise[:, :, label] += 150
                stream = io.BytesIO()
                format = ("JPEG", "PNG")[number % 2]
                Image.fromarray(noise.astype(np.uint8)).save(stream, format)
                ending = ("jpg", "png")[number % 2]
                made.append((split, name, f"{number}.{ending}", stream.getvalue()))
    return made


def as_folder(root: Path, images: Iterable[Sample]) -> Path:
    for split, name, file, content in images:
        place = root / split / name / file
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_bytes(content)
    return root


def as_csv(root: Path, images: Sequence[Sample]) -> Path:
    as_folder(root, images)
    with (root / "data.csv").open("w", newline="", encoding="utf-8") as file:
        rows = csv.writer(file)
        rows.writerow(["path", "label", "split"])
        rows.writerows([f"{s}/{name}/{file}", name, s] for s, name, file, _ in images)
    return root / "data.csv"


def as_tars(root: Path, images: Sequence[Sample], label: str = "cls") -> str:
    """Two shards of train, one of val and of test; every fourth entry is a link or a folder."""
    root.mkdir(parents=True, exist_ok=True)
    for split in ("train", "val", "test"):
        chosen = [sample for sample in images if sample[0] == split]
        half = (len(chosen) + 1) // 2 if split == "train" else len(chosen)
        for number, part in enumerate((chosen[:half], chosen[half:])):
            if part:
                entries = []
                for place, (_, name, file, content) in enumerate(part):
                    key = f"{split}/{number}-{place}"
                    entries += [(f"{key}.{file.split('.')[1]}", content)]
                    entries += [(f"{key}.{label}", name.encode())]
                write_tar(root / f"{split}-{number:04}.tar", entries)
    return f"wds:{root}/*.tar"


def image(value: int) -> bytes:
    """A PNG of one colour."""
    stream = io.BytesIO()
    Image.new("RGB", (5, 4), (value, 0, 9)).save(stream, "PNG")
    return stream.getvalue()


def write_tar(path: Path, entries: Iterable[tuple[str, bytes]], **options: Any) -> Path:
    with tarfile.open(path, "w", **options) as tar:
        for name, content in entries:
            about = tarfile.TarInfo(name)
            about.size = len(content)
            tar.addfile(about, io.BytesIO(content))
    return path


def as_parquet(root: Path, images: Sequence[Sample], rows: int = 4) -> Path:
    """Files as the Hub has them, their schema written by hand; a few rows to a group."""
    pa, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    root.mkdir(parents=True, exist_ok=True)
    for split in ("train", "val", "test"):
        chosen = [sample for sample in images if sample[0] == split]
        table = pa.table(
            {
                "image": [{"bytes": content, "path": file} for *_, file, content in chosen],
                "label": [name for _, name, *_ in chosen],
            }
        )
        half = (len(chosen) + 1) // 2 if split == "train" else len(chosen)
        for number, start in enumerate(range(0, len(chosen), half)):
            parquet.write_table(
                table.slice(start, half),
                root / f"{split}-{number:05}-of-00002.parquet",
                row_group_size=rows,
            )
    return root


def train_briefly(data: str | Path, output: Path, **settings: Any) -> TrainResult:
    """One epoch of three steps with a very small model."""
    spec = {"width": 16, "depth": 1, "num_heads": 2, "patch_size": 4}
    return vitkit.train(
        data,
        output=str(output),
        **{
            "spec": spec, "img_size": 8, "epochs": 1, "warmup_epochs": 0.0, "batch_size": 6,
            "device": "cpu", "amp": "off", "workers": 0, "quiet": True, "log_examples": False,
            "log_histograms": False, "plots": False, "report": False, **settings,
        },
    )  # fmt: skip
