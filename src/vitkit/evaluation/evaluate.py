"""Evaluate a model on data that are opened, cleaned and split as for its training."""

import logging
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from vitkit import errors, messages
from vitkit.data.checks.check import drop_or_refuse_unreadable
from vitkit.data.checks.check import with_corrections as relabel
from vitkit.data.datasets import pixel_cache, splitting
from vitkit.data.datasets.dataset import Dataset
from vitkit.data.datasets.split import Split, read_label_changes
from vitkit.data.sources.objects import find_object
from vitkit.data.sources.open import DataSource, kept_data, open_dataset
from vitkit.engines.choose import EngineOptions, engine_of
from vitkit.evaluation import loop, result
from vitkit.weights.checkpoint import Checkpoint, LabelledModel, names_for_data, stored_object
from vitkit.weights.load import as_checkpoint

TORCH = EngineOptions(engine="torch")
"""The model's own forward pass in float32."""
Predict = Callable[[Split], Iterator[loop.LabelledLogits]]
"""Labelled images -> their logits, batch by batch, as `predict_batches` yields them."""


@dataclass(frozen=True)
class EvaluationChoice:
    """The settings of `vitkit.evaluate` that do not concern the engine.

    Raises:
        SettingError: a number of images or of processes that cannot be.
    """

    split: str | None = None
    data_root: str | Path | None = None
    cache: str | Path | None = None
    batch_size: int = 256
    workers: int = 0
    metrics: Sequence[str | loop.Metric] = ()
    relabel: str | Path | None = None

    def __post_init__(self) -> None:
        for name, value, least in (
            ("batch_size", self.batch_size, 1),
            ("workers", self.workers, 0),
        ):
            if value < least:
                raise errors.SettingError.about(name, value, f"must be {least} or more")


def evaluate_checkpoint(
    checkpoint: Checkpoint | str | Path,
    data: DataSource,
    settings: EvaluationChoice,
    device: str = "auto",
    options: EngineOptions = TORCH,
) -> result.Evaluation:
    """Evaluate a checkpoint; arguments, result and errors as for `vitkit.evaluate`."""
    checkpoint = as_checkpoint(checkpoint)

    def predict(images: Split) -> Iterator[loop.LabelledLogits]:
        engine = engine_of(
            checkpoint, replace(options, images=options.images or len(images)), device=device
        )
        return loop.predict_batches(
            engine,
            images,
            checkpoint.preprocess,
            batch_size=settings.batch_size,
            device=engine.device,
            workers=settings.workers,
        )

    return evaluate_predictions(checkpoint, data, settings, predict)


def evaluate_predictions(
    model: LabelledModel, data: DataSource, settings: EvaluationChoice, predict: Predict
) -> result.Evaluation:
    """Evaluate the predictions of any model on a split of a dataset.

    Args:
        model: the facts about it.
        data: as for `vitkit.evaluate`.
        settings: split, folders, metrics, corrected labels.
        predict: runs the model.

    Returns:
        The scores; errors as for `vitkit.evaluate`.
    """
    own = loop.load_metrics(settings.metrics)  # before the data are opened, which may take minutes
    with kept_data(data) as address:
        dataset = open_as_in_training(
            model, address or "", settings.data_root, settings.cache, settings.relabel
        )
    split = choose_split(dataset, settings.split)
    images = with_labels_of(model, dataset, split)
    outputs = loop.KeptOutputs(predict(images), keep=bool(own))
    scores, counts = loop.evaluate_outputs(outputs, model.num_classes, model.temperature)
    names = names_for_data(model, dataset.classes) or dataset.classes  # else the data's own
    return result.Evaluation(scores | outputs.scores(own), counts, images, names, split)


# The data of an evaluation: opened, cleaned and split as for the training of a checkpoint.

READ_METADATA = {
    "recipe": ("ignore_extra_classes", "follow_links", "val_fraction", "bad_images"),
    "data": ("fingerprint",),
    "sure": ("classes",),
}
"""Object of the metadata -> its values that decide how data are opened."""
CLASSES_SHOWN = 5
"""Class names that a message lists."""


def choose_split(dataset: Dataset, split: str | None) -> str:
    """Return the name of the split to evaluate.

    Args:
        dataset: the data.
        split: the one asked for; default `test`, else `val`.

    Raises:
        DataError: the dataset does not have it.
    """
    for name in [split] if split else ["test", "val"]:
        if name in dataset.splits:
            return name
    near = messages.did_you_mean(split or "", dataset.splits)
    expected = f"{dataset.name} has no split of that name{near}; it has "
    if not split:
        expected = f"{dataset.name} has neither test nor val; name one by --split: "
    raise errors.DataError.about("split", split, expected + ", ".join(dataset.splits))


def open_as_in_training(
    checkpoint: LabelledModel,
    data: str,
    data_root: str | Path | None,
    cache: str | Path | None,
    relabel_file: str | Path | None = None,
) -> Dataset:
    """Open a dataset; clean and split it as the checkpoint's stored settings say.

    Args:
        checkpoint: with the settings and the fingerprint of its training data, if it has them.
        data: as for `open_dataset`, or the address of an object.
        data_root: as for `open_dataset`.
        cache: folder of decoded images; `auto` is the user's own.
        relabel_file: corrected labels, as `relabel` of the training.

    Raises:
        DataError: data that cannot be opened, of other classes, or, where vitkit made the test
            split itself, of other images than those of the training.
    """
    changes = None if relabel_file is None else read_label_changes(relabel_file)
    settings = stored_object(checkpoint, "recipe")
    trained_on = stored_object(checkpoint, "data").get("fingerprint")
    ignore_extra_classes = settings.get("ignore_extra_classes") is True
    dataset = _open_object(checkpoint, data, trained_on, ignore_extra_classes) or open_dataset(
        data,
        data_root=data_root,
        ignore_extra_classes=ignore_extra_classes,
        follow_links=settings.get("follow_links") is True,
    )
    # first: with other classes, no other problem matters
    _match_or_refuse(checkpoint, dataset)
    if cache is not None:
        dataset = pixel_cache.cached(dataset, None if cache == "auto" else cache)
        logging.getLogger("vitkit").info("%s", dataset.notes[-1])
    dataset = splitting.with_validation_of(dataset, trained_on, settings.get("val_fraction"))
    if dataset.cut and trained_on not in (None, dataset.fingerprint):
        raise errors.DataError(
            f"{dataset.name} has no test folder, and its images differ from those the checkpoint "
            "was trained on, so a new test split would contain training images; put the test "
            f"images into {dataset.name}/test/<class>/"
        )
    if changes is not None:
        dataset = relabel(dataset, changes)
    if settings.get("bad_images") == "skip":
        dataset, _ = drop_or_refuse_unreadable(dataset, "skip")
    return dataset


def _open_object(
    checkpoint: LabelledModel, data: str, trained_on: str | None, ignore_extra_classes: bool
) -> Dataset | None:
    """Open data that were passed as an object; `None` for any other address.

    Images that are in no split are all evaluated, unless the checkpoint was trained on a part of
    them.
    """
    given = find_object(data)
    if given is None:
        return None
    given = given.with_classes(checkpoint.classes)
    dataset = given.open(ignore_extra_classes=ignore_extra_classes)
    if trained_on == dataset.fingerprint:
        return dataset
    return given.as_split("test").open(ignore_extra_classes=ignore_extra_classes)


def split_metadata(model: LabelledModel) -> dict[str, Any]:
    """Return only the metadata that the functions here and `names_for_data` read."""
    kept = {}
    for name, keys in READ_METADATA.items():
        stored = stored_object(model, name)
        kept[name] = {key: stored[key] for key in keys if key in stored}
    return kept


def with_labels_of(checkpoint: LabelledModel, dataset: Dataset, split: str) -> Split:
    """Return a split with its labels numbered as the checkpoint's classes, matched by name.

    Args:
        checkpoint: with class names; else the numbers stay as they are, with a warning.
        dataset: the data.
        split: name of one of its splits.

    Raises:
        DataError: a class that the checkpoint lacks, or another number of classes.
    """
    images = dataset.splits[split]
    match = _match_or_refuse(checkpoint, dataset)
    if match is None:
        # the warning points to the caller of `evaluate`
        warnings.warn(
            "the checkpoint has no class names; the data's are used, in natural order", stacklevel=5
        )
        return images
    # class number of the data -> class number of the checkpoint
    new_numbers = np.array(match.indices, dtype=np.int64)
    return images.relabelled(new_numbers[images.labels])


def _match_or_refuse(checkpoint: LabelledModel, dataset: Dataset) -> splitting.ClassMatch | None:
    """Match the classes of a dataset with the checkpoint's; `None` if that names none."""
    classes, match, problem = names_for_data(checkpoint, dataset.classes), None, ""
    if classes:
        match = splitting.match_classes(dataset.classes, classes)
        if match.ambiguous:
            problem = (
                f"a class {match.ambiguous[0]!r}, and the checkpoint several of that name; rename "
                "it to the name of another class, or leave it out"
            )
        elif match.unknown:
            known = messages.quote_list(classes, CLASSES_SHOWN)
            lacking = messages.quote_list(match.unknown, CLASSES_SHOWN)
            problem = f"classes that the checkpoint lacks: {lacking}; it has {known}"
    elif len(dataset.classes) != checkpoint.num_classes:
        problem = (
            f"{len(dataset.classes)} classes, the checkpoint {checkpoint.num_classes} logits "
            "without class names; evaluate on data of the same classes"
        )
    if problem:
        raise errors.DataError(f"{dataset.name} has {problem}")
    return match
