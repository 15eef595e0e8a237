"""The features file of `vitkit embed`: arrays `features`, `images` and `labels` as `.npz`."""

from __future__ import annotations

import tempfile
import zipfile
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from vitkit.io.atomic import replacing
from vitkit.io.results import npz_result

if TYPE_CHECKING:
    from torch import Tensor

    from vitkit.prediction.images import FoundImage

FEATURES_FILE = npz_result("a file of features", ("features", "images"), optional=("labels",))
"""The kind of result; it may replace an earlier one of the same kind."""
BYTES_AT_ONCE = 1 << 20
TEXTS_AT_ONCE = 10_000
"""Texts of an array that are encoded at once: each then has the length of the longest of all."""


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
        features.seek(0)
        with zipfile.ZipFile(temporary, "w") as archive:
            chunks = iter(lambda: features.read(BYTES_AT_ONCE), b"")
            _write_array(archive, "features", "<f4", (len(names), width), chunks)
            _write_texts(archive, "images", names)
            if has_labels:
                _write_texts(archive, "labels", labels)
    return len(names), width


def _write_texts(archive: zipfile.ZipFile, name: str, texts: Sequence[str]) -> None:
    """Write texts as an array in which each has the length of the longest."""
    # numpy's text: all as long as the longest, and of one character at least.
    kind = f"<U{max(1, max(map(len, texts), default=1))}"
    parts = (texts[start : start + TEXTS_AT_ONCE] for start in range(0, len(texts), TEXTS_AT_ONCE))
    chunks = (np.array(part, dtype=kind).tobytes() for part in parts)
    _write_array(archive, name, kind, (len(texts),), chunks)


def _write_array(
    archive: zipfile.ZipFile,
    name: str,
    kind: str,
    shape: tuple[int, ...],
    chunks: Iterable[bytes],
) -> None:
    """Write an array of an .npz file; it begins with its shape."""
    header = {"descr": kind, "fortran_order": False, "shape": shape}
    # its size is not known yet, and may be above the 4 GB of a plain entry
    with archive.open(f"{name}.npy", "w", force_zip64=True) as entry:
        np.lib.format.write_array_header_1_0(entry, header)
        for chunk in chunks:
            entry.write(chunk)
