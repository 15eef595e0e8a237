"""Pooled features of images, the inputs of a classifier's head."""

from __future__ import annotations

import tempfile
import zipfile
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from jaxtyping import Float

from vitkit.data.sources.open import DataSource
from vitkit.engines.choose import EngineOptions, engine_of
from vitkit.io.atomic import replacing
from vitkit.io.results import npz_result
from vitkit.prediction.find import Images, as_list, count_images
from vitkit.prediction.predictor import Predictor
from vitkit.weights.checkpoint import Checkpoint
from vitkit.weights.load import as_checkpoint

if TYPE_CHECKING:
    from torch import Tensor

    from vitkit.prediction.images import FoundImage


def feature_predictor(
    checkpoint: Checkpoint,
    *,
    device: str = "auto",
    batch_size: int = 64,
    options: EngineOptions | None = None,
) -> Predictor:
    """Create a predictor whose outputs are the pooled features, the inputs of the head: (D,).

    Args:
        checkpoint: a checkpoint; its head is not used.
        device: `cpu`, `cuda`, `mps`; auto picks the fastest available.
        batch_size: images per batch.
        options: the engine that runs the model; default `auto` in float32.

    Raises:
        DeviceError: a device that does not exist here.
        SettingError: a batch size below 1, or an engine that cannot be used.
        MissingExtraError: an engine that is not installed.
    """
    engine = engine_of(checkpoint, options or EngineOptions(), device=device, features=True)
    return Predictor(engine, checkpoint.preprocess, device=engine.device, batch_size=batch_size)


def embed(
    checkpoint: Checkpoint | str | Path,
    images: Images,
    *,
    device: str = "auto",
    batch_size: int = 64,
    engine: str | EngineOptions = "auto",
    precision: str = "float32",
    calibrate: DataSource | None = None,
    **moved: object,
) -> Float[np.ndarray, "N D"]:
    """Return the pooled features of images, the inputs of the head: (N, D) float32.

    Args:
        checkpoint: a checkpoint or its path.
        images: as for a call of `Predictor`.
        device: `cpu`, `cuda`, `mps`; auto picks the fastest available.
        batch_size: images per batch.
        engine: as for `Predictor.from_checkpoint`, and so are `precision` and `calibrate`.
        precision: precision of the computation.
        calibrate: images for int8.
        **moved: none; a keyword that has left the package is answered with its place.

    Raises:
        ImageError, DataError, CheckpointError, DeviceError, SettingError: the message names the
            wrong value.
    """
    options = EngineOptions.of(engine, precision=precision, calibrate=calibrate, **moved)
    images = as_list(images)
    if options.images is None:
        options = replace(options, images=count_images(images))
    predictor = feature_predictor(
        as_checkpoint(checkpoint), device=device, batch_size=batch_size, options=options
    )
    return predictor.logits(images).numpy()


# The features file of `vitkit embed`: arrays `features`, `images` and `labels` as `.npz`.

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
