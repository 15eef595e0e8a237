"""Measure vitkit's own code against the library that could take its place.

    python benchmarks/libraries.py [--only rows tables grid] [--rounds 5]

`rows` stores and looks up the rows of 60,000 files: `FileCache` and `sqlite3`. `tables` opens and
reads a Parquet file of 4,000 images of 50 kB: vitkit and `datasets`. `grid` draws eight images:
Pillow and matplotlib. Old and new run in turn; the medians are printed.
"""

from __future__ import annotations

import argparse
import io
import os
import sqlite3
import statistics
import tempfile
import time
import zlib
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import numpy as np
from PIL import Image

FILES, TABLE_ROWS = 60_000, 4_000
IMAGE_BYTES = 50_000


def seconds(work: Callable[[], object]) -> float:
    """Return the wall time of a call."""
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def in_turn(rounds: int, works: dict[str, Callable[[int], object]]) -> None:
    """Run each function once a round, and print the median of its times."""
    times: dict[str, list[float]] = {name: [] for name in works}
    for number in range(rounds):
        for name, work in works.items():
            times[name].append(seconds(lambda work=work, number=number: work(number)))
    for name, values in times.items():
        print(f"  {name:38} {statistics.median(values):8.3f} s, {min(values):.3f} at best")


def rows(rounds: int) -> None:
    """Compare `FileCache` with a table of SQLite that has a checksum for each row."""
    from vitkit.data.checks.scan import SCAN_ROW
    from vitkit.io.caches import FileCache

    draw = np.random.default_rng(0)
    keys = np.unique(draw.integers(1, 2**63, FILES, dtype=np.uint64))
    content = np.frombuffer(draw.bytes(len(keys) * SCAN_ROW.itemsize), SCAN_ROW)
    numbers = keys.astype(np.int64).tolist()
    folder = Path(os.environ["VITKIT_CACHE"])

    def own_write(number: int) -> None:
        cache = FileCache("rows", str(number), SCAN_ROW)
        values, known = cache.get_many(keys)
        values[:], known[:] = content, True
        cache.save()

    def own_read(number: int) -> None:
        values, known = FileCache("rows", str(number), SCAN_ROW).get_many(keys)
        assert known.all()
        assert (values == content).all()

    def opened(number: int) -> sqlite3.Connection:
        database = sqlite3.connect(folder / f"{number}.sqlite")
        database.execute("PRAGMA synchronous = OFF")
        database.execute("CREATE TABLE IF NOT EXISTS rows (key INTEGER PRIMARY KEY, row, checksum)")
        return database

    def library_write(number: int) -> None:
        with closing(opened(number)) as database, database:
            texts = (row.tobytes() for row in content)
            entries = ((key, row, zlib.crc32(row)) for key, row in zip(numbers, texts, strict=True))
            database.executemany("INSERT INTO rows VALUES (?, ?, ?)", entries)

    def library_read(number: int) -> None:
        values = np.zeros(len(keys), SCAN_ROW)
        with closing(opened(number)) as database:
            cursor = database.execute("SELECT key, row, checksum FROM rows ORDER BY key")
            while block := cursor.fetchmany(4096):
                whole = [entry for entry in block if zlib.crc32(entry[1]) == entry[2]]
                places = np.searchsorted(keys, np.array([entry[0] for entry in whole], np.uint64))
                values[places] = np.frombuffer(b"".join(entry[1] for entry in whole), SCAN_ROW)
        assert (values == content).all()

    print(f"rows of {FILES:,} files")
    in_turn(rounds, {"FileCache, first": own_write, "sqlite3, first": library_write})
    in_turn(rounds, {"FileCache, again": own_read, "sqlite3, again": library_read})


def tables(rounds: int) -> None:
    """Compare the reading of Parquet here with that of `datasets`, which copies it to Arrow."""
    import datasets
    import pyarrow as pa
    from pyarrow import parquet

    from vitkit.data.sources.open import open_dataset

    datasets.disable_progress_bars()
    draw = np.random.default_rng(0)
    folder = Path(os.environ["VITKIT_CACHE"])
    images = [{"bytes": draw.bytes(IMAGE_BYTES), "path": None} for _ in range(TABLE_ROWS)]
    labels = draw.integers(0, 10, TABLE_ROWS)
    file = folder / "flowers.parquet"
    parquet.write_table(pa.table({"image": images, "label": labels}), file, row_group_size=100)

    def own(number: int) -> None:
        os.environ["VITKIT_CACHE"] = str(folder / f"own{number}")
        open_dataset(file)

    def library(number: int) -> None:
        cache = str(folder / f"library{number}")
        datasets.load_dataset("parquet", data_files=str(file), cache_dir=cache)

    print(f"a Parquet file of {file.stat().st_size / 1e6:.0f} MB, first opening")
    in_turn(rounds, {"vitkit": own, "datasets": library})
    for name in ("own0", "library0"):
        size = sum(path.stat().st_size for path in (folder / name).rglob("*") if path.is_file())
        print(f"  {name}: {size / 1e6:.1f} MB in the cache")


def grid(rounds: int) -> None:
    """Compare the grid of examples with one that matplotlib draws; the model is one layer."""
    import torch
    from matplotlib.figure import Figure

    import vitkit
    from vitkit.training.monitoring.figures import example_predictions

    pixels = np.random.default_rng(0).integers(0, 256, (8, 28, 28, 3), dtype=np.uint8)
    images = pixels, np.arange(len(pixels)) % 2
    data = vitkit.open_dataset({"train": images, "val": images})
    model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(pixels[0].size, 2))
    preprocess, device = vitkit.Preprocess(image_size=(28, 28)), torch.device("cpu")

    def own(number: int) -> None:
        example_predictions(model, data, preprocess, device)

    def library(number: int) -> None:
        figure = Figure(figsize=(6.6, 4.1), dpi=72)
        for place, image in enumerate(pixels):
            axes = figure.add_subplot(2, 4, place + 1)
            axes.imshow(image, interpolation="nearest")
            axes.set_axis_off()
            for row, (line, colour) in enumerate((("cat", "black"), ("80% dog", "red"))):
                axes.text(0, 31 + 4 * row, line, color=colour)
        content = io.BytesIO()
        figure.savefig(content)
        np.asarray(Image.open(content).convert("RGB"))

    print("a grid of 8 images")
    in_turn(rounds, {"Pillow": own, "matplotlib": library})


PARTS = {"rows": rows, "tables": tables, "grid": grid}


def main() -> None:
    """Measure the chosen parts in a cache of their own."""
    parser = argparse.ArgumentParser(description="Measure own code against libraries.")
    parser.add_argument("--only", nargs="+", choices=PARTS, default=[*PARTS])
    parser.add_argument("--rounds", type=int, default=5)
    given = parser.parse_args()
    for name in given.only:
        with tempfile.TemporaryDirectory() as folder:
            os.environ |= {"VITKIT_CACHE": folder, "HF_HUB_OFFLINE": "1"}
            PARTS[name](given.rounds)


if __name__ == "__main__":
    main()
