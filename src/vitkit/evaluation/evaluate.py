"""Evaluate a checkpoint on data that is opened, cleaned and split as for its training."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from vitkit.data.datasets.split import Split
from vitkit.data.sources.open import DataSource, kept_data
from vitkit.devices import on_device, resolve_device
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
) -> Evaluation:
    """Evaluate a checkpoint on a split of a dataset.

    Args:
        checkpoint: a checkpoint or its path.
        data: as for `train`. Of an object without splits all images are evaluated, unless it is the
            one that the model was trained on. Classes are matched by name, and class numbers of
            an object without names are those of the checkpoint. How the images were chosen and
            split for training (`bad_images`, `val_fraction` ...) is read from the checkpoint.
        split: `train`, `val` or `test`; default `test`, else `val`.
        data_root: the folder of named datasets.
        cache: folder of decoded images, made if missing, as for `train`; `auto`: the user's own.
        device: `cpu`, `cuda`, `mps`; auto picks the fastest available.
        batch_size: images per batch.
        workers: number of loader processes.
        metrics: your own: functions of logits (N, K) float32 and class numbers (N,) that return a
            number, or their names as `package.module:function`.
        relabel: a CSV file of corrected labels, as for `train`.

    Returns:
        A dict with `top1`, `top5` of over five classes, `loss` in nats, `balanced_accuracy`,
        `brier`, `ece` and `images`, which `Counts.scores` explains; `top1_low`, `top1_high` and
        the same of the balanced accuracy, intervals of 95 %; where the checkpoint has a
        `temperature`, that and the `calibrated_loss`, `calibrated_brier` and `calibrated_ece` that
        it gives. Beside them `.split_name`, `.per_class`, `.without_images`, `.confusion` (K, K)
        and `.rows()`, a row an image.

    Raises:
        CheckpointError, DataError, DeviceError, ImageError, SettingError, UserCodeError: the
            message names the wrong value, image or metric.
    """
    checkpoint = as_checkpoint(checkpoint)
    if batch_size < 1:
        raise SettingError.about("batch_size", batch_size, "must be 1 or more")
    if workers < 0:
        raise SettingError.about("workers", workers, "must be 0 or more")
    own = load_metrics(metrics)  # before the data are opened, which may take minutes
    with kept_data(data) as address:
        dataset = open_as_in_training(checkpoint, address or "", data_root, cache, relabel)
    split = choose_split(dataset, split)
    images = with_labels_of(checkpoint, dataset, split)
    predictions = _predictions(checkpoint, images, device, batch_size, workers)
    outputs = KeptOutputs(predictions, keep=bool(own))
    num_classes = checkpoint.model.spec.num_classes
    scores, counts = evaluate_outputs(outputs, num_classes, checkpoint.temperature)
    scores |= outputs.scores(own)
    names = names_for_data(checkpoint, dataset.classes) or dataset.classes  # else the data's own
    return Evaluation(scores, counts, images, names, split)


def _predictions(
    checkpoint: Checkpoint, images: Split, device: str, batch_size: int, workers: int
) -> Iterator[LabelledLogits]:
    model_device = resolve_device(device)
    return predict_batches(
        on_device(checkpoint.model, model_device),
        images,
        checkpoint.preprocess,
        batch_size=batch_size,
        device=model_device,
        workers=workers,
    )
