"""The engine that runs a checkpoint, calibrated on the user's images."""

from __future__ import annotations

import copy
from pathlib import Path

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from vitkit.data.checks.check import drop_or_refuse_unreadable
from vitkit.data.datasets.split import Split
from vitkit.data.datasets.splitting import with_cut_of, with_validation_of
from vitkit.data.images.preprocess import fit, normalise
from vitkit.data.sources.open import open_dataset
from vitkit.devices import on_device, resolve_device
from vitkit.engines.choosing.choose import MOST_AGREEMENT, MOST_CALIBRATION, choose_engine
from vitkit.engines.choosing.options import Calibration, EngineOptions
from vitkit.engines.engine import Engine
from vitkit.engines.registry import CPU_PRECISIONS, KINDS
from vitkit.errors import DataError, SettingError
from vitkit.messages import plural
from vitkit.models.vit import ViT
from vitkit.weights.checkpoint import Checkpoint, stored_object

FEWEST_IMAGES = 16
"""Least images for int8, to measure the range of each activation."""


def engine_of(
    checkpoint: Checkpoint,
    options: EngineOptions,
    *,
    device: str = "auto",
    features: bool = False,
) -> Engine:
    """Return the engine that runs the model of a checkpoint.

    Args:
        checkpoint: its model stays as it is, and where it is.
        options: the user's wishes.
        device: `cpu`, `cuda`, `mps`; auto picks the fastest available.
        features: run the model without its head: outputs are pooled features.

    Raises:
        DeviceError: a device that does not exist here.
        SettingError, MissingExtraError, DataError: the message names the wrong value.
    """
    _refuse_device(options, device)
    resolved = resolve_device(device)
    samples = None
    if options.calibrate is not None:
        samples = calibration_images(options.calibrate, checkpoint, options.data_root)
    model = on_device(checkpoint.model, resolved)
    return choose_engine(
        headless(model) if features else model,
        options,
        samples=samples,
        device=resolved,
        image_size=checkpoint.preprocess.image_size,
    )


def _refuse_device(options: EngineOptions, device: str) -> None:
    """Refuse a device where the engine or the precision runs on the CPU alone."""
    if device in ("auto", "cpu"):
        return
    for flag, value, on_cpu in (
        ("--engine", options.engine, [kind.name for kind in KINDS if kind.cpu_only]),
        ("--precision", options.precision, CPU_PRECISIONS),
    ):
        if value in on_cpu:
            raise SettingError(
                f"--device {device} has no effect with {flag} {value}, which runs on the CPU; "
                "leave one of them out"
            )


def calibration_images(
    data: Calibration, checkpoint: Checkpoint, data_root: str | Path | None = None
) -> Float[Tensor, "N C H W"]:
    """Return preprocessed images to calibrate with and to measure agreement on.

    They are spread evenly over the train split, else over val: never over test, whose scores would
    then be of images that the engine was made for. Images of train that the checkpoint's training
    cut off for validation are no part of it.

    Args:
        data: as for `train`.
        checkpoint: its preprocessing, and the settings of its training.
        data_root: the folder of named datasets.

    Raises:
        DataError: data that cannot be opened, without such a split, or with too few images.
    """
    recipe = stored_object(checkpoint, "recipe")
    trained_on = stored_object(checkpoint, "data").get("fingerprint")
    dataset = open_dataset(
        data,
        data_root=data_root,
        ignore_extra_classes=recipe.get("ignore_extra_classes") is True,
        follow_links=recipe.get("follow_links") is True,
    )
    dataset = with_cut_of(dataset, trained_on)
    dataset = with_validation_of(dataset, trained_on, recipe.get("val_fraction"))
    if recipe.get("bad_images") == "skip":
        dataset, _ = drop_or_refuse_unreadable(dataset, "skip")
    name = next((name for name in ("train", "val") if name in dataset.splits), None)
    if name is None:
        raise DataError(
            f"--calibrate {dataset.name} has neither a train nor a val split; pass other images "
            "than those of the test"
        )
    split: Split = dataset.splits[name]
    if len(split) < FEWEST_IMAGES:
        raise DataError(
            f"--calibrate {dataset.name} has {plural(len(split), 'image')} in {name}; at least "
            f"{FEWEST_IMAGES} are needed, and {MOST_CALIBRATION} are used"
        )
    count = min(len(split), MOST_CALIBRATION + MOST_AGREEMENT)
    indices = np.linspace(0, len(split) - 1, count).round().astype(np.int64)
    pixels = np.stack([fit(split.read(int(index)), checkpoint.preprocess) for index in indices])
    return normalise(torch.from_numpy(pixels), checkpoint.preprocess)


def headless(model: ViT) -> ViT:
    """Return a model without its head, which returns the pooled features (B, E).

    It shares all weights with the model, which stays as it is.
    """
    copied = copy.copy(model)
    copied._modules = dict(model._modules)
    copied.reset_classifier(0)
    return copied
