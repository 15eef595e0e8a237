"""`TrainResult`: the folder, the weights and the scores that a run leaves."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vitkit.evaluation.metrics import Metrics
from vitkit.plots.html import html_table
from vitkit.training.monitoring.learning_curves import LearningCurves
from vitkit.training.run_folder import RunFolder

if TYPE_CHECKING:
    from vitkit.plots.figure import NotebookFigure

NOTEBOOK_SCORES = ("top1", "loss", "balanced_accuracy", "images")
"""Scores that a notebook shows."""


@dataclass(frozen=True)
class TrainResult:
    """The results of a run.

    Attributes:
        run: its folder.
        best: weights of the best epoch by validation top-1.
        last: weights of the last step.
        metrics: split -> metrics of the best weights, as `vitkit.evaluate` gives them: shares in
            [0, 1], losses in nats; `val`, and `test` where there is one.
        stopped: why the run ended.
    """

    run: Path
    best: Path
    last: Path
    metrics: dict[str, Metrics] = field(default_factory=dict)
    stopped: str = ""

    @property
    def curves(self) -> LearningCurves:
        """The losses, scores and learning rates of each epoch; after `--auto` those of the winner.

        Raises:
            DataError: no epoch is complete, or the run is a probe.
            OutputError: the run folder is gone.
        """
        folder = self.run
        if not RunFolder(folder).metrics.exists():
            folder = self.last.parents[1]  # a search has its winner's run inside
        return LearningCurves.read(folder)

    def plot(self) -> NotebookFigure:
        """Draw the learning curves as a matplotlib Figure; `.savefig("curves.pdf")` writes it.

        Raises:
            DataError: no epoch is complete, or the run is a probe.
        """
        return self.curves.plot()

    def _repr_html_(self) -> str:
        """Return the scores and paths as a table, for a notebook."""
        names = [name for name in NOTEBOOK_SCORES if any(name in m for m in self.metrics.values())]
        rows = []
        for split, scores in self.metrics.items():
            # the number of images is an integer, and a k-NN probe has no loss
            cells = []
            for name in names:
                value = scores.get(name, "")
                cells.append(f"{value:.4f}" if isinstance(value, float) else str(value))
            rows.append([split, *cells])
        table = html_table(["best weights", *names], rows) if rows else ""
        facts: list[list[object]] = [["run", self.run], ["ended after", self.stopped]]
        # a short run has no best epoch yet, and a k-NN probe no weights at all
        weights = next((path for path in (self.best, self.last) if path.exists()), None)
        if weights is not None:
            facts.insert(1, ["weights", weights])
        return table + html_table(["", ""], facts)

    def to_json(self) -> dict[str, Any]:
        """Return JSON values, for another process."""
        return {name: str(v) if isinstance(v, Path) else v for name, v in vars(self).items()}

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> TrainResult:
        """Build the result from the values of `to_json`."""
        paths = {name: Path(values[name]) for name in ("run", "best", "last")}
        return cls(**values | paths)
