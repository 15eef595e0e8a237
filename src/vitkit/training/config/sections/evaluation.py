"""Settings of evaluation: the test split, and when validation ends a run."""

from __future__ import annotations

from typing import Annotated

from vitkit.errors import SettingError
from vitkit.frozen import frozen
from vitkit.training.config.field_types import PositiveInt
from vitkit.training.config.meaning import Meaning


@frozen(raises=SettingError)
class EvaluationSettings:
    """The test split and early stopping."""

    # not compared: a finished run may be resumed to read the test split
    test: Annotated[
        bool,
        Meaning(resume="not compared", changes_result=False, with_probe="used", with_auto="own"),
    ] = True
    """Evaluate the best weights on the test split, once, at the end."""
    # may change: the state counts the epochs, and the setting only limits them
    patience: Annotated[
        PositiveInt | None,
        Meaning(resume="may change", changes_result=True, with_probe="refused"),
    ] = None
    """Stop after this many epochs without a higher validation top-1. Default: never."""
    metrics: Annotated[
        tuple[str, ...],
        Meaning(resume="may change", changes_result=False, with_probe="used"),
    ] = ()
    """Further metrics, as MODULE:FUNCTION: functions of logits (N, K) and class numbers (N,) of a
    whole split that return one number."""
