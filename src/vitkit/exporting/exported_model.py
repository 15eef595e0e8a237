"""Exported models: predict with them, and evaluate them as checkpoints are."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from jaxtyping import UInt8

from vitkit.data.datasets.split import Split
from vitkit.engines.choose import EngineOptions
from vitkit.exporting.artefact import opens_artefact
from vitkit.exporting.files import Artefact, open_artefact
from vitkit.weights.checkpoint import Checkpoint

if TYPE_CHECKING:
    from vitkit.data.sources.open import DataSource
    from vitkit.evaluation.loop import LabelledLogits, Metric
    from vitkit.evaluation.result import Evaluation


def pixel_batch(image: UInt8[np.ndarray, "H W channels"]) -> UInt8[torch.Tensor, "1 H W 3"]:
    """Return a decoded image as a batch for a graph that takes pixels of any size."""
    if image.shape[2] == 1:
        image = np.repeat(image, 3, axis=2)
    return torch.from_numpy(np.array(image[None]))  # a copy: the caller's may be read-only


def evaluate(
    checkpoint: Checkpoint | str | Path,
    data: DataSource,
    *,
    split: str | None = None,
    data_root: str | Path | None = None,
    cache: str | Path | None = None,
    device: str = "auto",
    batch_size: int = 256,
    workers: int = 0,
    metrics: Sequence[str | Metric] = (),
    relabel: str | Path | None = None,
    engine: str | EngineOptions = "torch",
    precision: str = "float32",
    calibrate: DataSource | None = None,
    trust_code: bool = False,
    **moved: object,
) -> Evaluation:
    """Evaluate a checkpoint, or an exported model, on a split of a dataset.

    Args:
        checkpoint: a checkpoint or its path, or the path of an exported model.
        data: as for `train`, split as for the checkpoint's training; classes are matched by name.
            Of an object without splits all images are evaluated, unless it is the training data.
        split: `train`, `val` or `test`; default `test`, else `val`.
        data_root: the folder of named datasets.
        cache: folder of decoded images, made if missing, as for `train`; `auto`: the user's own.
        device: `cpu`, `cuda`, `mps`; auto picks the fastest available.
        batch_size: images per batch.
        workers: loader processes.
        metrics: functions of logits (N, K) float32 and class numbers (N,) that return a number,
            or their names as `package.module:function`.
        relabel: a CSV file of corrected labels, as for `train`.
        engine: as for `Predictor.from_checkpoint`; default the model's own forward pass.
        precision: `float32`, `bfloat16`, `int8` or `auto`.
        calibrate: images for int8.
        trust_code: open an exported `.pt2` model, which can run code that is in it.
        **moved: none; a keyword that has left the package is answered with its place.

    Returns:
        The scores, which `evaluate_outputs` explains. Beside them `.split_name`, `.per_class`,
        `.without_images`, `.confusion` (K, K) and `.rows()`, a row per image.

    Raises:
        CheckpointError, DataError, DeviceError, ImageError, MissingExtraError, SettingError,
            UserCodeError: the message names the wrong value, image or metric.
    """
    own = {"precision": precision, "calibrate": calibrate, "data_root": data_root}
    options = EngineOptions.of(engine, **own, **moved)
    # imported here: predictions need no data source and no score
    from vitkit.evaluation.evaluate import (
        EvaluationChoice,
        evaluate_checkpoint,
        evaluate_predictions,
    )

    choice = EvaluationChoice(split, data_root, cache, batch_size, workers, metrics, relabel)
    chosen = (options.engine, options.precision, options.calibrate)
    plain = chosen == ("torch", "float32", None) and device in ("auto", "cpu")
    if isinstance(checkpoint, Checkpoint) or not opens_artefact(
        checkpoint, plain=plain, trust_code=trust_code
    ):
        return evaluate_checkpoint(checkpoint, data, choice, device, options)
    artefact = open_artefact(checkpoint, trust_code=trust_code)
    predict = partial(artefact_predictions, artefact, batch_size=batch_size, workers=workers)
    return evaluate_predictions(artefact.description, data, choice, predict)


def artefact_predictions(
    artefact: Artefact, images: Split, batch_size: int, workers: int = 0
) -> Iterator[LabelledLogits]:
    """Yield the logits (B, K) float32 of an exported model, and class numbers (B,).

    Args:
        artefact: the model.
        images: labelled images.
        batch_size: images per batch, but for a model that takes pixels: theirs have one image.
        workers: number of loader processes.

    Raises:
        CheckpointError: the model fails, or gives another number of logits.
    """
    if not artefact.description.with_preprocessing:
        from vitkit.evaluation.loop import predict_batches

        preprocess = artefact.description.preprocess
        yield from predict_batches(
            artefact, images, preprocess, batch_size=batch_size, workers=workers
        )
        return
    for index, label in enumerate(images.labels):  # images of other sizes make no batch
        yield artefact(pixel_batch(images.read(index))), torch.tensor([label])
