"""`TrainConfig` and `RunConfig`: every setting of a run, before and after defaults are decided."""

from __future__ import annotations

from typing import Any, Literal

from vitkit.errors import SettingError
from vitkit.frozen import field_names, frozen, to_json
from vitkit.training.config.data_settings import (
    AugmentationSettings,
    DataSettings,
    DistillationSettings,
    FineTuningSettings,
    ModelSettings,
)
from vitkit.training.config.meaning import (
    Fraction,
    LowerCase,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveFraction,
    PositiveInt,
    Probability,
    Settings,
    fields_where,
)
from vitkit.training.config.run_settings import (
    EvaluationSettings,
    LoggingSettings,
    OptimizerSettings,
    RunSettings,
    RuntimeSettings,
)


# A dataclass lists the fields of its last base first: read the bases from below.
@frozen(raises=SettingError)
class TrainConfig(
    LoggingSettings,
    RuntimeSettings,
    EvaluationSettings,
    DistillationSettings,
    AugmentationSettings,
    OptimizerSettings,
    RunSettings,
    FineTuningSettings,
    ModelSettings,
    DataSettings,
):
    """Every setting of a run, one section after another. Raises `SettingError` out of range."""

    def to_json(self) -> dict[str, Any]:
        """Return plain JSON values, for YAML and for the checkpoint."""
        return to_json(self)


SECTIONS: tuple[type[Any], ...] = TrainConfig.__bases__[::-1]
"""The settings classes in the order of the fields."""


def leaves_model_open(settings: TrainConfig) -> bool:
    """Return whether no setting names the model or weights to start from.

    Fields of its spec may be named: they replace those of the model that the data choose.
    """
    return not (settings.model or settings.progressive or settings.pretrained)


# `RunConfig`: the settings of a run, including those derived from the data.

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


# The settings that two runs may differ in and be repeats (other seeds) of each other.


def not_of_the_kind() -> tuple[str, ...]:
    """Return the settings that do not change which kind of run it is, such as the seed."""
    not_compared = fields_where(TrainConfig, resume="not compared")
    without_weight = fields_where(TrainConfig, changes_result=False)
    # these may have another path on resume, but they define the run
    names = {*not_compared, *without_weight} - {"data", "relabel", "teacher", "start"}
    return tuple(name for name in field_names(TrainConfig) if name in names)
