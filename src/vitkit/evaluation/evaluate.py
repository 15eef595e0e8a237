"""Evaluate a checkpoint on data that is opened, cleaned and split as for its training."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from vitkit.data.datasets.split import Split
from vitkit.data.sources.open import DataSource, kept_data
from vitkit.engines.choosing.options import EngineOptions, engine_of
from vitkit.errors import SettingError
from vitkit.evaluation.evaluation_loop import LabelledLogits, evaluate_outputs, predict_batches
from vitkit.evaluation.open_data import choose_split, open_as_in_training, with_labels_of
from vitkit.evaluation.result import Evaluation
from vitkit.evaluation.user_metrics import KeptOutputs, Metric, load_metrics
from vitkit.weights.checkpoint import Checkpoint, names_for_data
from vitkit.weights.load import as_checkpoint


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
    merge: int = 0,
    calibrate: DataSource | None = None,
) -> Evaluation:
    """Evaluate a checkpoint on a split of a dataset.

    Args:
        checkpoint: a checkpoint or its path.
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
        merge: patch tokens that each block merges.
        calibrate: images for int8.

    Returns:
        The scores, which `evaluate_outputs` explains. Beside them `.split_name`, `.per_class`,
        `.without_images`, `.confusion` (K, K) and `.rows()`, a row an image.

    Raises:
        CheckpointError, DataError, DeviceError, ImageError, MissingExtraError, SettingError,
            UserCodeError: the message names the wrong value, image or metric.
    """
    checkpoint = as_checkpoint(checkpoint)
    _check_counts(batch_size, workers)
    settings = {"precision": precision, "merge": merge, "calibrate": calibrate}
    options = EngineOptions.of(engine, data_root=data_root, **settings)
    own = load_metrics(metrics)  # before the data are opened, which may take minutes
    with kept_data(data) as address:
        dataset = open_as_in_training(checkpoint, address or "", data_root, cache, relabel)
    split = choose_split(dataset, split)
    images = with_labels_of(checkpoint, dataset, split)
    predictions = _predictions(checkpoint, images, device, batch_size, workers, options)
    outputs = KeptOutputs(predictions, keep=bool(own))
    count = checkpoint.model.spec.num_classes
    scores, counts = evaluate_outputs(outputs, count, checkpoint.temperature)
    names = names_for_data(checkpoint, dataset.classes) or dataset.classes  # else the data's own
    return Evaluation(scores | outputs.scores(own), counts, images, names, split)


def _check_counts(batch_size: int, workers: int) -> None:
    if batch_size < 1:
        raise SettingError.about("batch_size", batch_size, "must be 1 or more")
    if workers < 0:
        raise SettingError.about("workers", workers, "must be 0 or more")


def _predictions(
    checkpoint: Checkpoint,
    images: Split,
    device: str,
    batch_size: int,
    workers: int,
    options: EngineOptions,
) -> Iterator[LabelledLogits]:
    engine = engine_of(
        checkpoint,
        replace(options, images=options.images or len(images)),
        device=device,
    )
    return predict_batches(
        engine,
        images,
        checkpoint.preprocess,
        batch_size=batch_size,
        device=engine.device,
        workers=workers,
    )
