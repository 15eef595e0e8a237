"""Settings of distillation: the teacher, and how its answers enter the loss."""

from __future__ import annotations

from typing import Annotated, Literal

import tyro

from vitkit.errors import SettingError
from vitkit.frozen import frozen
from vitkit.training.config.field_types import (
    PositiveFloat,
    Probability,
    stored_as_text,
)
from vitkit.training.config.meaning import Meaning

DISTILLATION_DETAIL = Meaning(
    resume="fixed", changes_result=True, with_probe="refused", only_with=("teacher",)
)
"""Details of learning from a teacher."""


@frozen(raises=SettingError)
class DistillationSettings:
    """The teacher and its part in the loss."""

    # a path; a resumed run compares the teacher's digest instead
    teacher: Annotated[
        str | None,
        stored_as_text("teacher"),
        tyro.conf.arg(aliases=("--teacher-path",)),
        Meaning(resume="not compared", changes_result=True, with_probe="refused"),
    ] = None
    """Teacher model for distillation: a checkpoint, or `package.module:function` that returns a
    model."""
    distill: Annotated[
        Literal["soft", "hard"],
        tyro.conf.arg(aliases=("--distillation-type",)),
        DISTILLATION_DETAIL,
    ] = "soft"
    """Soft distillation (the teacher's probabilities) or hard distillation (its top class)."""
    distill_alpha: Annotated[
        Probability, tyro.conf.arg(aliases=("--distillation-alpha",)), DISTILLATION_DETAIL
    ] = 0.5
    """Weight of the distillation loss, 0 to 1; the label loss has the rest."""
    distill_temperature: Annotated[
        PositiveFloat, tyro.conf.arg(aliases=("--distillation-tau",)), DISTILLATION_DETAIL
    ] = 3.0
    """Temperature that divides the logits of teacher and student in soft distillation, above 0."""
