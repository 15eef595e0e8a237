"""`TrainConfig`: every setting of a run, by one name in Python, in YAML and as a flag."""

from __future__ import annotations

from typing import Any

from vitkit.errors import SettingError
from vitkit.frozen import frozen, to_json
from vitkit.training.config.sections.augmentation import AugmentationSettings
from vitkit.training.config.sections.data import DataSettings
from vitkit.training.config.sections.distillation import DistillationSettings
from vitkit.training.config.sections.evaluation import EvaluationSettings
from vitkit.training.config.sections.fine_tuning import FineTuningSettings
from vitkit.training.config.sections.logs import LoggingSettings
from vitkit.training.config.sections.model import ModelSettings
from vitkit.training.config.sections.optimizer import OptimizerSettings
from vitkit.training.config.sections.run import RunSettings
from vitkit.training.config.sections.runtime import RuntimeSettings


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
