"""Pooled features of images, the inputs of a classifier's head."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from jaxtyping import Float

from vitkit.data.sources.open import DataSource
from vitkit.engines.choose import EngineOptions, engine_of
from vitkit.prediction.find import Images, as_list, count_images
from vitkit.prediction.predictor import Predictor
from vitkit.weights.checkpoint import Checkpoint
from vitkit.weights.load import as_checkpoint

if TYPE_CHECKING:
    pass


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
