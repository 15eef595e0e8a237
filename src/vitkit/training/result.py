"""`TrainResult`: the folder, the weights and the scores that a run leaves."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from vitkit.evaluation.metrics import Metrics


@dataclass(frozen=True)
class TrainResult:
    """The results of a run.

    Attributes:
        run: its folder.
        best: weights of the best epoch by validation top-1.
        last: weights of the last step.
        metrics: split -> metrics of the best weights: `val`, and `test` where there is one.
        stopped: why the run ended.
    """

    run: Path
    best: Path
    last: Path
    metrics: dict[str, Metrics] = field(default_factory=dict)
    stopped: str = ""

    def to_json(self) -> dict[str, Any]:
        """Return JSON values, for another process."""
        return {name: str(v) if isinstance(v, Path) else v for name, v in vars(self).items()}

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> TrainResult:
        """Build the result from the values of `to_json`."""
        paths = {name: Path(values[name]) for name in ("run", "best", "last")}
        return cls(**values | paths)
