"""The engine that runs a checkpoint: which one, in which precision, calibrated on which images."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from vitkit.data.datasets.split import Split
from vitkit.data.images.preprocess import fit, normalise
from vitkit.data.sources.open import DataSource, open_dataset
from vitkit.devices import on_device
from vitkit.engines.choosing.choose import MOST_AGREEMENT, MOST_CALIBRATION, Wanted, choose_engine
from vitkit.engines.engine import Engine
from vitkit.engines.registry import check_engine
from vitkit.errors import DataError, SettingError
from vitkit.messages import plural
from vitkit.models.vit import ViT
from vitkit.spec import Preprocess

Calibration: TypeAlias = DataSource
"""Images with classes, as for `train`."""
FEWEST_IMAGES = 16
"""Images that int8 needs at least to see the range of each activation."""


@dataclass(frozen=True, kw_only=True)
class EngineOptions:
    """The engine that runs a model, and what is known about its work.

    Attributes:
        engine: `torch`, `compile`, `openvino`, `onnxruntime`; `auto` chooses by trials, see
            `choose_engine`.
        precision: `float32`, `bfloat16`, `int8`; `auto` takes the fastest whose logits agree.
        merge: patch tokens that each block merges, see `merge_tokens`; 0 for none.
        calibrate: images with classes for int8, and for agreement; their train split, else val.
        data_root: the folder of named datasets.
        images: number of images that it will run, by which `auto` chooses; default 1,000.
        report: receives the lines about trials; default the log.
    """

    engine: str = "auto"
    precision: str = "float32"
    merge: int = 0
    calibrate: Calibration | None = None
    data_root: str | Path | None = None
    images: int | None = None
    report: Callable[[str], object] = logging.getLogger("vitkit").warning

    @classmethod
    def of(cls, engine: str | EngineOptions, **settings: Any) -> EngineOptions:
        """Return the options that a function was called with, checked.

        Args:
            engine: its name, or all options, which take the place of the settings.
            **settings: further fields.

        Raises:
            SettingError: values that do not exist, or not together.
        """
        if isinstance(engine, EngineOptions):
            options, plain = engine, cls()
            for name, value in settings.items():
                if name != "data_root" and value != getattr(plain, name):
                    raise SettingError(
                        f"{name}= beside EngineOptions: write EngineOptions(..., {name}=...)"
                    )
        else:
            options = cls(engine=engine, **settings)
        options.check()
        return options

    def check(self) -> None:
        """Raise `SettingError` for values that do not exist, before anything is read."""
        check_engine(self.engine, self.precision)
        if self.precision == "int8" and self.calibrate is None:
            raise SettingError(
                "precision int8 needs images to calibrate with; pass --calibrate DATA "
                "(calibrate=), such as the training data"
            )
        if self.calibrate is not None and self.precision not in ("int8", "auto"):
            raise SettingError(
                f"--calibrate has no effect with precision {self.precision}; pass --precision "
                "int8 or auto, or leave it out"
            )


def engine_of(
    model: ViT,
    preprocess: Preprocess,
    options: EngineOptions,
    *,
    device: torch.device,
    features: bool = False,
) -> Engine:
    """Return the engine that runs a model.

    Args:
        model: of a checkpoint; it stays as it is, and where it is.
        preprocess: the evaluation transform.
        options: the user's wishes.
        device: of the engines that do not need a processor.
        features: run the model without its head: outputs are pooled features.

    Raises:
        SettingError, MissingExtraError, DataError: the message names the wrong value.
    """
    samples = None
    if options.calibrate is not None:
        samples = calibration_images(options.calibrate, preprocess, options.data_root)
    model = on_device(model, device)
    wanted = Wanted(
        engine=options.engine,
        precision=options.precision,
        images=options.images,
        merge=options.merge,
        samples=samples,
        report=options.report,
    )
    return choose_engine(
        headless(model) if features else model,
        wanted,
        device=device,
        image_size=preprocess.image_size,
    )


def calibration_images(
    data: Calibration, preprocess: Preprocess, data_root: str | Path | None = None
) -> Float[Tensor, "N C H W"]:
    """Return preprocessed images to calibrate with and to measure agreement on.

    They are spread evenly over the train split, else over val: never over test, whose scores would
    then be of images that the engine was made for.

    Args:
        data: as for `train`.
        preprocess: the evaluation transform.
        data_root: the folder of named datasets.

    Raises:
        DataError: data that cannot be opened, without such a split, or with too few images.
    """
    dataset = open_dataset(data, data_root=data_root)
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
    pixels = np.stack([fit(split.read(int(index)), preprocess) for index in indices])
    return normalise(torch.from_numpy(pixels), preprocess)


def headless(model: ViT) -> ViT:
    """Return a model without its head, which returns the pooled features (B, E).

    It shares all weights with the model, which stays as it is.
    """
    copied = copy.copy(model)
    copied._modules = dict(model._modules)
    copied.reset_classifier(0)
    return copied
