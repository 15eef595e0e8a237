"""The data of an evaluation: opened, cleaned and split as for the training of a checkpoint."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from vitkit.data.checks.check import drop_or_refuse_unreadable
from vitkit.data.datasets.class_names import ClassMatch, match_classes
from vitkit.data.datasets.dataset import Dataset
from vitkit.data.datasets.label_changes import read_label_changes
from vitkit.data.datasets.pixel_cache import cached
from vitkit.data.datasets.relabelling import relabel
from vitkit.data.datasets.split import Split
from vitkit.data.datasets.splitting import with_cut_of, with_validation_of
from vitkit.data.sources.objects.open_objects import find_object
from vitkit.data.sources.open import open_dataset
from vitkit.errors import DataError
from vitkit.messages import did_you_mean
from vitkit.weights.checkpoint import LabelledModel, names_for_data, stored_object

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
    if split is None:
        split = next((name for name in ("test", "val") if name in dataset.splits), None)
    if split is None:
        raise DataError(
            f"{dataset.name} has neither test nor val to evaluate on; name a split with --split "
            f"(split=): {', '.join(dataset.splits)}"
        )
    if split not in dataset.splits:
        raise DataError.about(
            "split",
            split,
            f"{dataset.name} has no split of that name{did_you_mean(split, dataset.splits)}; "
            f"it has {', '.join(dataset.splits)}",
        )
    return split


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
    dataset = with_cut_of(dataset, trained_on)
    if cache is not None:
        dataset = cached(dataset, None if cache == "auto" else cache)
        logging.getLogger("vitkit").info("%s", dataset.notes[-1])
    dataset = with_validation_of(dataset, trained_on, settings.get("val_fraction"))
    _refuse_changed_split(trained_on, dataset)
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
    classes = checkpoint.classes
    if given.is_numbered and not given.class_names <= {*classes}:
        given = replace(given, classes=classes)
    dataset = given.open(ignore_extra_classes=ignore_extra_classes)
    marks = [cut.fingerprint for cut in (dataset, dataset.as_before) if cut is not None]
    if trained_on in marks:
        return dataset
    return given.as_split("test").open(ignore_extra_classes=ignore_extra_classes)


def split_metadata(model: LabelledModel) -> dict[str, Any]:
    """Return only the metadata that the functions here and `names_for_data` read."""
    kept = {}
    for name, keys in READ_METADATA.items():
        stored = stored_object(model, name)
        kept[name] = {key: stored[key] for key in keys if key in stored}
    return kept


def _refuse_changed_split(trained_on: str | None, dataset: Dataset) -> None:
    """Refuse a split made by vitkit if its images are not those of the training."""
    if dataset.cut and trained_on not in (None, dataset.fingerprint):
        raise DataError(
            f"{dataset.name} has no test folder, and its images differ from those the checkpoint "
            "was trained on, so a new test split would contain training images; put the test "
            f"images into {dataset.name}/test/<class>/"
        )


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


def _match_or_refuse(checkpoint: LabelledModel, dataset: Dataset) -> ClassMatch | None:
    """Match the classes of a dataset with the checkpoint's; `None` if that names none."""
    classes = names_for_data(checkpoint, dataset.classes)
    if not classes:
        if len(dataset.classes) != checkpoint.num_classes:
            raise DataError(
                f"{dataset.name} has {len(dataset.classes)} classes, the checkpoint "
                f"{checkpoint.num_classes} logits without class names; "
                "evaluate on data of the same classes"
            )
        return None
    match = match_classes(dataset.classes, classes)
    if match.ambiguous:
        raise DataError(
            f"{dataset.name} has a class {match.ambiguous[0]!r}, and the checkpoint several of "
            "that name; rename it to the name of another class, or leave it out"
        )
    if match.unknown:
        raise DataError(
            f"{dataset.name} has classes that the checkpoint lacks: {_listed(match.unknown)}; it "
            f"has {_listed(classes)}"
        )
    return match


def _listed(names: Sequence[str]) -> str:
    """List the first class names and count the others."""
    shown = ", ".join(names[:CLASSES_SHOWN])
    if len(names) > CLASSES_SHOWN:
        shown += f" and {len(names) - CLASSES_SHOWN:,} more"
    return shown
