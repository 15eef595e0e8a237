"""The images with which an export is checked."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Int64, UInt8

from vitkit.data.datasets.split import Split
from vitkit.data.images.preprocess import fit
from vitkit.engines.runtimes import SUBSET_SIZE
from vitkit.engines.trials import sample_images
from vitkit.errors import DataError
from vitkit.evaluation.evaluate import choose_split, open_as_in_training, with_labels_of
from vitkit.messages import plural
from vitkit.weights.checkpoint import Checkpoint

SAMPLE_SIZES = ((240, 320), (320, 240), (224, 224), (375, 500))
"""Heights and widths of the images that are generated where the user names no data."""
SAMPLES_PER_SIZE = 8
MEAN_LEVEL = 128
COLOUR_RANGE = 64
CONTRAST = 48
"""Mean of their pixels, how far an image's own mean is from it, and their deviation."""
COLOUR_TURNS = (1.0, 1.7, 2.9)
"""Angles by which red, green and blue turn from image to image, in radians."""
FEWEST_CALIBRATION_IMAGES = 100
"""Fewer images show too little of the activations' ranges; 300 are used where there are as many."""


@dataclass(frozen=True)
class GateImages:
    """Images to compare an exported model with torch on.

    Attributes:
        images: read by `read`; a split, or generated ones.
        labels: class numbers (N,), as the checkpoint numbers them; None for generated images.
        data: name of the dataset; empty for generated images.
        split: split of the dataset.
        fingerprint: fingerprint of the dataset.
    """

    images: Split | GeneratedImages
    labels: Int64[np.ndarray, " N"] | None = None
    data: str = ""
    split: str = ""
    fingerprint: str = ""

    def __len__(self) -> int:
        return len(self.images)

    def read(self, index: int) -> UInt8[np.ndarray, "H W 3"]:
        """Return one image as RGB, uint8 [0, 255]."""
        pixels = self.images.read(index)
        if pixels.shape[2] == 1:
            pixels = np.repeat(pixels, 3, axis=2)
        return np.ascontiguousarray(pixels)

    def digests(self) -> set[bytes]:
        """Return the SHA-256 of each image's pixels and shape."""
        return {_digest(self.read(index)) for index in range(len(self))}


@dataclass(frozen=True)
class CalibrationImages:
    """Images for int8 calibration; none of them is used in the check.

    Attributes:
        images: N of them, (H, W, C) uint8: RGB of any size, or fitted to the model.
        data: name of the dataset.
        split: split of the dataset.
        left_out: how many were left out, as the check uses images with the same pixels.
    """

    images: tuple[UInt8[np.ndarray, "_ _ _"], ...]
    data: str
    split: str
    left_out: int

    def to_json(self) -> dict[str, Any]:
        """Return plain JSON values, as `OUT.json` has them."""
        return {**vars(self), "images": len(self.images)}


def _digest(pixels: UInt8[np.ndarray, "H W 3"]) -> bytes:
    return hashlib.sha256(pixels.tobytes() + str(pixels.shape).encode()).digest()


class GeneratedImages:
    """Noise with the spectrum of photographs, of several sizes, the same in every call."""

    def __init__(self) -> None:
        self._images: list[UInt8[np.ndarray, "H W 3"]] = []
        for seed, size in enumerate(SAMPLE_SIZES):
            # (B, 3, H, W) of mean 0 and deviation 1
            noise = sample_images(SAMPLES_PER_SIZE, 3, size, seed).permute(0, 2, 3, 1).numpy()
            for number, pattern in enumerate(noise):
                # colours that differ between images, as in photographs
                turns = (seed * SAMPLES_PER_SIZE + number) * np.array(COLOUR_TURNS)
                level = MEAN_LEVEL + COLOUR_RANGE * np.sin(turns)
                pixels = np.clip(pattern * CONTRAST + level, 0, 255)
                self._images.append(pixels.astype(np.uint8))

    def __len__(self) -> int:
        return len(self._images)

    def read(self, index: int) -> UInt8[np.ndarray, "H W 3"]:
        """Return one image, uint8 [0, 255]."""
        return self._images[index]


def open_gate_images(
    checkpoint: Checkpoint, data: str | None, split: str | None, data_root: str | Path | None
) -> GateImages:
    """Open the user's validation images, or generate some.

    Args:
        checkpoint: its classes are matched by name, as for `vitkit eval`.
        data: as for `open_dataset`; None generates images without labels.
        split: default `val`, else `test`.
        data_root: the folder of named datasets.

    Raises:
        DataError: data that cannot be opened, or of other classes.
    """
    if data is None:
        return GateImages(GeneratedImages())
    dataset = open_as_in_training(checkpoint, data, data_root, None)
    if split is None and "val" in dataset.splits:
        split = "val"
    name = choose_split(dataset, split)
    images = with_labels_of(checkpoint, dataset, name)
    if len(images) == 0:
        raise DataError(f"{data}: its split {name} has no images to check the model on")
    return GateImages(images, images.labels, dataset.name, name, dataset.fingerprint)


def open_calibration(
    checkpoint: Checkpoint,
    data: str,
    gate: GateImages,
    data_root: str | Path | None,
    *,
    whole: bool,
) -> CalibrationImages:
    """Return up to 300 images to calibrate int8 with, evenly over a split.

    Those with the same pixels as an image of the check are left out.

    Args:
        checkpoint: the data must have its classes.
        data: as for `open_dataset`; its `train` split is taken, else `val` or `test`.
        gate: the images that the result is checked on.
        data_root: the folder of named datasets.
        whole: keep the images as they are, for a graph that resizes them; else fitted to the model.

    Raises:
        DataError: data that cannot be opened, of other classes, too few, or the ones of the check.
    """
    dataset = open_as_in_training(checkpoint, data, data_root, None)
    name = _calibration_split(list(dataset.splits))
    if (dataset.fingerprint, name) == (gate.fingerprint, gate.split):
        raise DataError(
            f"--calibrate {data}: the split {name} is the one that the model is checked on with "
            "--data; name other images, such as the training data"
        )
    source = GateImages(dataset.splits[name])
    chosen = np.linspace(0, len(source) - 1, min(SUBSET_SIZE, len(source))).astype(int)
    checked = set() if gate.labels is None else gate.digests()
    images = []
    for index in chosen.tolist():
        image = source.read(index)
        if _digest(image) not in checked:
            images.append(image if whole else fit(image, checkpoint.preprocess))
    left_out = len(chosen) - len(images)
    if len(images) < FEWEST_CALIBRATION_IMAGES:
        without = f", without {left_out:,} that the model is checked on," if left_out else ""
        raise DataError(
            f"--calibrate {data}: {plural(len(images), 'image')} in {name}{without} are too few to "
            f"measure the ranges of activations; at least {FEWEST_CALIBRATION_IMAGES} are needed, "
            f"and {SUBSET_SIZE} are used"
        )
    return CalibrationImages(tuple(images), dataset.name, name, left_out)


def _calibration_split(names: Sequence[str]) -> str:
    return next(name for name in ("train", "val", "test", *names) if name in names)
