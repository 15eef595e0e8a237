"""Settings of distillation: the teacher, and how its answers enter the loss."""

from __future__ import annotations

from typing import Annotated, Literal

import tyro

from vitkit.errors import SettingError
from vitkit.frozen import frozen
from vitkit.training.config.field_types import (
    NonNegativeInt,
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
    """A model to learn from as well: a checkpoint, or `package.module:function` that makes one."""
    distill: Annotated[
        Literal["soft", "hard"],
        tyro.conf.arg(aliases=("--distillation-type",)),
        DISTILLATION_DETAIL,
    ] = "soft"
    """Learn the teacher's probabilities (soft), or its most probable class (hard)."""
    distill_alpha: Annotated[
        Probability, tyro.conf.arg(aliases=("--distillation-alpha",)), DISTILLATION_DETAIL
    ] = 0.5
    """The teacher's share of the loss."""
    distill_temperature: Annotated[
        PositiveFloat, tyro.conf.arg(aliases=("--distillation-tau",)), DISTILLATION_DETAIL
    ] = 3.0
    """Temperature that divides the logits of both models, with `distill: soft`."""
    distill_views: Annotated[NonNegativeInt, DISTILLATION_DETAIL] = 0
    """Augmented variants that each image has in the whole run, so that the teacher sees each once
    and its logits are kept; 0 for new ones in every epoch and a teacher that runs in every step."""
