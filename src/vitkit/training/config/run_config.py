"""`RunConfig`: the settings of a run, including those derived from the data."""

from __future__ import annotations

from typing import Literal

from vitkit.errors import SettingError
from vitkit.frozen import frozen
from vitkit.training.config.field_types import (
    Fraction,
    LowerCase,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveFraction,
    PositiveInt,
    Probability,
    Settings,
)
from vitkit.training.config.train_config import TrainConfig, leaves_model_open

USUAL: Settings = {
    "epochs": 10,
    "batch_size": 128,
    "last_batch": "drop",
    "lr": 1e-3,
    "warmup_epochs": 1.0,
    "opt": "adamw",
    "beta2": 0.999,
    "flip": 0.5,
    "shift": 0,
    "crop_scale": 0.35,
}
"""The settings that may be left open (`None` in `TrainConfig`), with their usual values.

They apply where nothing follows from the data: in a probe, and, but for epochs and batch size, to a
model that is named."""


def left_open(config: TrainConfig) -> list[str]:
    """Return the names of the settings that will be derived from the data."""
    names = [name for name in USUAL if getattr(config, name) is None]
    if leaves_model_open(config):
        names += ["model", "spec"]
        if config.fit is None:  # chosen with the model
            names.append("fit")
    return names


@frozen(raises=SettingError)
class RunConfig(TrainConfig):
    """Every setting of a run, none of them left open; config.yaml has these."""

    epochs: PositiveInt
    batch_size: PositiveInt
    last_batch: Literal["drop", "fill"]
    lr: PositiveFloat
    warmup_epochs: NonNegativeFloat
    opt: LowerCase
    beta2: Fraction
    flip: Probability
    shift: NonNegativeInt
    crop_scale: PositiveFraction
