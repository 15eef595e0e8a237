"""Evaluate a checkpoint, or an exported model from its file alone."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from os import PathLike
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from vitkit.data.datasets.split import Split
from vitkit.data.sources.open import DataSource
from vitkit.engines.choosing.options import EngineOptions
from vitkit.errors import CheckpointError
from vitkit.evaluation.evaluate import EvaluationChoice, evaluate_checkpoint, evaluate_predictions
from vitkit.evaluation.evaluation_loop import LabelledLogits, predict_batches
from vitkit.evaluation.result import Evaluation
from vitkit.evaluation.user_metrics import Metric
from vitkit.exporting.files.endings import engine_refused, is_artefact, refuse_needless_trust
from vitkit.exporting.files.open_artefact import Artefact, open_artefact
from vitkit.exporting.model_parts import SessionForward, pixel_batch
from vitkit.weights.checkpoint import Checkpoint


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
    choice = EvaluationChoice(split, data_root, cache, batch_size, workers, metrics, relabel)
    refuse_needless_trust(checkpoint, trust_code=trust_code)
    if not isinstance(checkpoint, str | PathLike) or not is_artefact(checkpoint):
        return evaluate_checkpoint(checkpoint, data, choice, device, options)
    chosen = (options.engine, options.precision, options.calibrate)
    if chosen != ("torch", "float32", None) or device not in ("auto", "cpu"):
        raise engine_refused(checkpoint)
    artefact = open_artefact(checkpoint, trust_code=trust_code)
    predict = _ArtefactPredictions(artefact, choice)
    return evaluate_predictions(artefact.description, data, choice, predict)


class _ArtefactPredictions:
    """A function from labelled images to an exported model's logits, batch by batch."""

    def __init__(self, artefact: Artefact, choice: EvaluationChoice) -> None:
        self._artefact = artefact
        self._choice = choice
        self._run = SessionForward(artefact.session)

    def __call__(self, images: Split) -> Iterator[LabelledLogits]:
        """Yield logits (B, K) float32 and class numbers (B,).

        Raises:
            CheckpointError: the model fails, or gives another number of logits.
        """
        description = self._artefact.description
        if description.with_preprocessing:
            for index, label in enumerate(images.labels):  # images of other sizes make no batch
                logits = self._logits(pixel_batch(images.read(index)))
                yield logits, torch.from_numpy(np.array([label]))
            return
        yield from predict_batches(
            self._logits,
            images,
            description.preprocess,
            batch_size=self._choice.batch_size,
            workers=self._choice.workers,
        )

    def _logits(self, images: Tensor) -> Tensor:
        logits = self._run(images)
        count = self._artefact.description.num_classes
        if logits.shape != (len(images), count):
            raise CheckpointError(
                f"{self._artefact.path}: returns {tuple(logits.shape)} for {len(images)} images; "
                f"expected {count} logits per image; export the checkpoint again"
            )
        return logits
