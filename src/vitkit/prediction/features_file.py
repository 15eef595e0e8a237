"""The features file of `vitkit embed`: arrays `features`, `images` and `labels` as `.npz`."""

from __future__ import annotations

import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from vitkit.io.atomic import replacing

if TYPE_CHECKING:
    from torch import Tensor

    from vitkit.prediction.images import FoundImage


def write_features(
    path: Path, rows: Iterable[tuple[FoundImage, Tensor]], *, has_labels: bool
) -> tuple[int, int]:
    """Write features to an .npz file as they come; return (N, D).

    Features do not stay in memory. Names of files are exact: a byte that is not UTF-8 is a lone
    surrogate, as for `os.fsencode`.

    Args:
        path: path of the file; an existing one is replaced.
        rows: each image with its features (D,) float32.
        has_labels: write the labels of the images, too.

    Raises:
        OutputError: it cannot be written.
    """
    names: list[str] = []
    labels: list[str] = []
    width = 0
    # an array begins with its shape, which is known at the end: the features wait in a file
    with replacing(path) as temporary, tempfile.TemporaryFile(dir=path.parent) as features:
        for image, row in rows:
            names.append(image.name)
            labels.append(image.label)
            width = len(row)
            features.write(row.numpy().tobytes())
        features.flush()
        arrays: dict[str, Any] = {
            "features": np.memmap(features, "<f4", "r", shape=(len(names), width)),
            "images": np.array(names),
        }
        if has_labels:
            arrays["labels"] = np.array(labels)
        with temporary.open("wb") as file:  # numpy adds an ending to a name
            np.savez(file, **arrays)
    return len(names), width
