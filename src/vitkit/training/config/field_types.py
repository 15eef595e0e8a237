"""Types of settings: numbers within a range, choices, and values with lenient parsing."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Any, Literal, TypeAlias

from pydantic import BeforeValidator, Field

Settings: TypeAlias = dict[str, Any]
"""Some fields of `TrainConfig` by name; `spec` is a dictionary of `ViTSpec` fields."""

# strict: 1.0 or "1" are mistakes here
NonNegativeInt = Annotated[int, Field(ge=0, strict=True)]
PositiveInt = Annotated[int, Field(ge=1, strict=True)]
NonNegativeFloat = Annotated[float, Field(ge=0.0)]
PositiveFloat = Annotated[float, Field(gt=0.0)]
Fraction = Annotated[float, Field(ge=0.0, lt=1.0)]
"""A number in [0, 1)."""
PositiveFraction = Annotated[float, Field(gt=0.0, le=1.0)]
"""A number in (0, 1]."""
Probability = Annotated[float, Field(ge=0.0, le=1.0)]

Schedule: TypeAlias = Literal["cosine", "linear", "constant", "rsqrt"]
"""The learning rate over the steps; `training/optimization/schedule.py` has the formulas."""
TrackerName: TypeAlias = Literal["wandb", "mlflow"]
"""Services that record the curves of a run."""


def _weights_source(value: Any) -> Any:
    # "auto" means create_model's pretrained=True
    if isinstance(value, bool):
        return "auto" if value else None
    return str(value) if isinstance(value, Path) else value


WeightsSource = Annotated[str | None, BeforeValidator(_weights_source)]
"""Where weights are; `True` becomes `"auto"`, and a path its text."""


def _expanded(value: Any) -> Any:
    # a shell leaves the tilde of `--output=~/runs` as it is, and Python all of them
    return os.path.expanduser(value) if isinstance(value, str) else value


RunPath = Annotated[str | None, BeforeValidator(_expanded)]
"""The path of a run folder; `~` at its beginning becomes the home folder."""


def stored_as_text(setting: str) -> BeforeValidator:
    """Return a validator that takes text, a path or `None`, as config.yaml can hold them.

    Args:
        setting: the field's name, for the message.
    """

    def check(value: Any) -> Any:
        if value is None:
            return None
        if isinstance(value, str | Path):
            return str(value)
        raise ValueError(
            f"{setting} is a {type(value).__name__}, which cannot be stored in config.yaml for "
            "resuming; pass a file, or the name of a function as package.module:function"
        )

    return BeforeValidator(check)


def _number_as_text(value: Any) -> Any:
    # a bool is an int, too; it is refused later, as no policy is named True
    return str(value) if isinstance(value, int) else value


PolicyName = Annotated[str | None, BeforeValidator(_number_as_text)]
"""Text; a whole number, as `aa: 3` is in YAML, becomes its digits."""


def _lower(value: Any) -> Any:
    return value.lower() if isinstance(value, str) else value


LowerCase = Annotated[str, BeforeValidator(_lower)]
"""Text in small letters: `AdamW` becomes `adamw`."""
