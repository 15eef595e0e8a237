"""Time and size of a report of 10,000 images.

Run `python benchmarks/report.py`. A small model is trained on images of noise, which no format
makes smaller, and tested on 10,000 of them; nearly all are wrong, so the page has as many images as
it ever has. Targets: the page is written in 20 s and has at most 5 MB.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from io import BytesIO
from pathlib import Path

import numpy as np
from PIL import Image

import vitkit

SPEC = {
    "image_size": 32, "patch_size": 16, "width": 32, "depth": 1, "num_heads": 2, "mlp_width": 64,
}  # fmt: skip


def main() -> None:
    """Train on noise, write the report, and print its time and size."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--images", type=int, default=10_000)
    parser.add_argument("--classes", type=int, default=10)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        images = Path(folder) / "images"
        write_noise(images, arguments.images, arguments.classes)
        run = vitkit.train(
            images, output=Path(folder) / "run", spec=SPEC, batch_size=32, epochs=1, amp="off",
            plots=False, report=False, log_examples=False, log_histograms=False, quiet=True,
        ).run  # fmt: skip
        begin = time.monotonic()
        path = vitkit.report(run)
        print(f"report: {time.monotonic() - begin:.1f} s, {path.stat().st_size / 1e6:.2f} MB")


def write_noise(folder: Path, count: int, classes: int) -> None:
    """Write `count` test images and 20 training images a class, of 50 different ones."""
    generator = np.random.default_rng(0)
    files = []
    for _ in range(50):
        content = BytesIO()
        pixels = generator.integers(0, 256, (128, 128, 3), np.uint8)
        Image.fromarray(pixels).save(content, "jpeg")
        files.append(content.getvalue())
    for split, each in (("train", 20), ("test", count // classes)):
        for label in range(classes):
            place = folder / split / str(label)
            place.mkdir(parents=True)
            for index in range(each):
                (place / f"{index}.jpg").write_bytes(files[int(generator.integers(50))])


if __name__ == "__main__":
    main()
