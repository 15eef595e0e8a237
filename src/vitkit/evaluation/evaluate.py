"""Evaluate a checkpoint on data that is opened, cleaned and split as for its training."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from vitkit.data.checks.check import drop_or_refuse_unreadable
from vitkit.data.datasets.class_names import ClassMatch, match_classes
from vitkit.data.datasets.dataset import Dataset
from vitkit.data.datasets.pixel_cache import cached
from vitkit.data.datasets.split import Split
from vitkit.data.datasets.splitting import with_validation_of
from vitkit.data.sources.open import open_dataset, refuse_objects
from vitkit.devices import on_device, resolve_device
from vitkit.errors import DataError, SettingError
from vitkit.evaluation.predict import evaluate_outputs, predict_batches
from vitkit.evaluation.result import Evaluation
from vitkit.messages import did_you_mean
from vitkit.weights.checkpoint import Checkpoint, names_for_data
from vitkit.weights.load import as_checkpoint

CLASSES_SHOWN = 5
"""Class names that a message lists."""


def evaluate(
    checkpoint: Checkpoint | str | Path,
    data: str | Path,
    *,
    split: str | None = None,
    data_root: str | Path | None = None,
    cache: str | Path | None = None,
    device: str = "auto",
    batch_size: int = 256,
    workers: int = 0,
) -> Evaluation:
    """Evaluate a checkpoint on a split of a dataset.

    Args:
        checkpoint: a checkpoint or its path.
        data: as for `train`. Classes are matched by name; how the images were chosen and split for
            training (`bad_images`, `val_fraction` and the like) is read from the checkpoint.
        split: `train`, `val` or `test`; default `test`, else `val`.
        data_root: the folder of named datasets.
        cache: folder of decoded images, as for `train`; `auto` is the user's own. One that does
            not exist is created, of all splits.
        device: `cpu`, `cuda`, `mps`; auto picks the fastest available.
        batch_size: images per batch.
        workers: number of loader processes.

    Returns:
        A dict of scores: `top1`, `top{k}` with k = min(5, K), `loss` in nats, `balanced_accuracy`,
        `brier`, `ece` and `images`, which `Counts.scores` explains; `top1_low`, `top1_high` and
        the same of the balanced accuracy, intervals of 95 %; where the checkpoint has a
        `temperature`, that and the `calibrated_loss`, `calibrated_brier` and `calibrated_ece` that
        it gives. Beside them `.per_class`, `.without_images`, `.confusion` (K, K) and
        `.rows()`, a row an image.

    Raises:
        CheckpointError, DataError, DeviceError, SettingError: the message names the wrong value.
    """
    checkpoint = as_checkpoint(checkpoint)
    refuse_objects(data)
    if batch_size < 1:
        raise SettingError.about("batch_size", batch_size, "must be 1 or more")
    if workers < 0:
        raise SettingError.about("workers", workers, "must be 0 or more")
    dataset = _open_as_in_training(checkpoint, data, data_root, cache)
    images = _with_labels_of(checkpoint, dataset, _choose_split(dataset, split))
    model_device = resolve_device(device)
    predictions = predict_batches(
        on_device(checkpoint.model, model_device),
        images,
        checkpoint.preprocess,
        batch_size=batch_size,
        device=model_device,
        workers=workers,
    )
    num_classes = checkpoint.model.spec.num_classes
    scores, counts = evaluate_outputs(predictions, num_classes, checkpoint.temperature)
    # a checkpoint without class names uses the data's
    names = names_for_data(checkpoint, dataset.classes) or dataset.classes
    return Evaluation(scores, counts, images, names)


def _choose_split(dataset: Dataset, split: str | None) -> str:
    if split is None:
        split = "test" if "test" in dataset.splits else "val"
    if split not in dataset.splits:
        raise DataError(
            f"--split {split}: {dataset.name} has no split of that name"
            f"{did_you_mean(split, dataset.splits)}; it has {', '.join(dataset.splits)}"
        )
    return split


def _open_as_in_training(
    checkpoint: Checkpoint,
    data: str | Path,
    data_root: str | Path | None,
    cache: str | Path | None,
) -> Dataset:
    """Open a dataset; clean and split it as the checkpoint's stored settings say."""
    settings = _stored(checkpoint, "recipe")
    dataset = open_dataset(
        data,
        data_root=data_root,
        ignore_extra_classes=settings.get("ignore_extra_classes") is True,
        follow_links=settings.get("follow_links") is True,
    )
    # first: about data of other classes, no other problem matters
    _match_or_refuse(checkpoint, dataset)
    trained_on = _stored(checkpoint, "data").get("fingerprint")
    # checkpoints of an earlier version were trained on another split of the same data
    if dataset.as_before is not None and dataset.as_before.fingerprint == trained_on:
        dataset = dataset.as_before
    if cache is not None:
        dataset = cached(dataset, None if cache == "auto" else cache)
        logging.getLogger("vitkit").info("%s", dataset.notes[-1])
    fraction = settings.get("val_fraction")
    # the recipe is a stranger's JSON: a value of another type counts as missing
    if trained_on is not None and isinstance(fraction, float) and fraction > 0:
        dataset = with_validation_of(dataset, trained_on, fraction)
    _refuse_changed_split(trained_on, dataset)
    if settings.get("bad_images") == "skip":
        dataset, _ = drop_or_refuse_unreadable(dataset, "skip")
    return dataset


def _stored(checkpoint: Checkpoint, name: str) -> dict[str, Any]:
    """Return an object of a checkpoint's metadata; an empty one if there is none."""
    value = checkpoint.metadata.get(name)
    return value if isinstance(value, dict) else {}


def _refuse_changed_split(trained_on: str | None, dataset: Dataset) -> None:
    """Refuse a split that vitkit made itself, from other images than those of the training."""
    if dataset.cut and trained_on not in (None, dataset.fingerprint):
        raise DataError(
            f"{dataset.name} has no test folder, and its images differ from those the checkpoint "
            "was trained on, so a new test split would contain training images; put the test "
            f"images into {dataset.name}/test/<class>/"
        )


def _with_labels_of(checkpoint: Checkpoint, dataset: Dataset, split: str) -> Split:
    """Return a split with its labels numbered as the checkpoint's classes, matched by name."""
    images = dataset.splits[split]
    match = _match_or_refuse(checkpoint, dataset)
    if match is None:
        # the warning points to the caller of `evaluate`
        warnings.warn(
            "the checkpoint has no class names; the data's are used, in natural order", stacklevel=3
        )
        return images
    # class number of the data -> class number of the checkpoint
    new_numbers = np.array(match.indices, dtype=np.int64)
    return images.relabelled(new_numbers[images.labels])


def _match_or_refuse(checkpoint: Checkpoint, dataset: Dataset) -> ClassMatch | None:
    """Match the classes of a dataset with the checkpoint's; `None` if that names none."""
    classes = names_for_data(checkpoint, dataset.classes)
    if not classes:
        if len(dataset.classes) != checkpoint.model.spec.num_classes:
            raise DataError(
                f"{dataset.name} has {len(dataset.classes)} classes, the checkpoint "
                f"{checkpoint.model.spec.num_classes} logits without class names; "
                f"evaluate on data of the same classes"
            )
        return None
    match = match_classes(dataset.classes, classes)
    if match.ambiguous:
        raise DataError(
            f"{dataset.name} has a class {match.ambiguous[0]!r}, and the checkpoint several of "
            f"that name; rename it to the name of another class, or leave it out"
        )
    if match.unknown:
        raise DataError(
            f"{dataset.name} has classes that the checkpoint lacks: {_listed(match.unknown)}; it "
            f"has {_listed(classes)}"
        )
    return match


def _listed(names: Sequence[str]) -> str:
    """List the first class names and count the others."""
    more = len(names) - CLASSES_SHOWN
    return ", ".join(names[:CLASSES_SHOWN]) + (f" and {more:,} more" if more > 0 else "")
