"""The settings that two runs share if they are repeats (other seeds) of each other."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from vitkit.training.config.meaning import fields_where
from vitkit.training.config.run_config import USUAL
from vitkit.training.config.train_config import TrainConfig


def kind_of_run(settings: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the settings in which two runs differ if one is not a repeat of the other.

    Neither the seed nor the path of the weights that they started from is among them.

    Args:
        settings: settings of a run, as its checkpoint stores them.

    Returns:
        The settings; `None` if there are none.
    """
    not_compared = fields_where(TrainConfig, resume="not compared")
    without_weight = fields_where(TrainConfig, changes_result=False)
    # these may have another path on resume, but they define the run
    ignored = {*not_compared, *without_weight} - {"data", "relabel", "teacher", "start"}
    # a setting newer than the run had its default
    known = USUAL | dict(settings) if settings else {}
    kind = {name: value for name, value in known.items() if name not in ignored}
    start = kind.get("start")
    if isinstance(start, Mapping):
        # the same weights may come from another path
        kind["start"] = start.get("sha256")
        kind.pop("pretrained", None)
    return kind or None
