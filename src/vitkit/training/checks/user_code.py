"""The user's own functions among the settings: imported and checked before the run."""

from __future__ import annotations

from typing import Any

from vitkit.errors import SettingError
from vitkit.evaluation.user_metrics import load_metrics
from vitkit.io.import_path import import_setting
from vitkit.training.config.train_config import TrainConfig


def check_user_code(config: TrainConfig) -> None:
    """Import the transform, metrics and callbacks of the settings. Raises `SettingError`."""
    if config.transform is not None:
        import_transform(config.transform)
    load_metrics(config.metrics)
    # only imported: an instance could have side effects before the run is accepted
    for name in config.callbacks:
        import_setting("callbacks", name)


def import_transform(name: str) -> Any:
    """Return a transform of training images by its name. Raises `SettingError`."""
    transform = import_setting("transform", name)
    if not callable(transform) or isinstance(transform, type):
        raise SettingError(f"--transform {name} must be a function from an image to an image")
    return transform
