"""Experiment trackers: Weights & Biases and MLflow, through Ignite's loggers.

They get the numbers that TensorBoard gets. Each service is configured by its own environment
variables (WANDB_MODE, MLFLOW_TRACKING_URI and the like). A service that fails during a run does not
end the run.
"""

from __future__ import annotations

import importlib
import json
import os
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from typing import Any, ClassVar

from vitkit.errors import MissingExtraError, SettingError
from vitkit.io.atomic import write_bytes
from vitkit.training.config.field_types import TrackerName
from vitkit.training.run_folder import RunFolder

Failures = tuple[type[Exception], ...]


class Tracker(ABC):
    """A service that records the metrics of a run.

    Args:
        run: folder of the run, whose name is the name of the run.
        settings: settings of the run, as JSON values.
        known_as: identity of the run in the service, on resume.
    """

    name: ClassVar[TrackerName]
    identity: str
    """Identity of the run in the service."""

    @abstractmethod
    def __init__(self, run: RunFolder, settings: Mapping[str, Any], known_as: str | None) -> None:
        """Start or resume the run in the service."""

    @staticmethod
    @abstractmethod
    def failures() -> Failures:
        """Return the exceptions that the service raises when it fails."""

    @abstractmethod
    def log(self, values: Mapping[str, float], step: int) -> None:
        """Record finite values of curves, by the tags of TensorBoard."""

    @abstractmethod
    def close(self, *, failed: bool) -> None:
        """End the run in the service."""


class WandB(Tracker):
    """Weights & Biases, with the project `vitkit` unless WANDB_PROJECT names another."""

    name = "wandb"

    def __init__(self, run: RunFolder, settings: Mapping[str, Any], known_as: str | None) -> None:
        from ignite.handlers.wandb_logger import WandBLogger

        self._logger = WandBLogger(
            project=os.environ.get("WANDB_PROJECT", "vitkit"),
            name=run.root.name,
            dir=str(run.root),
            config=dict(settings),
            id=known_as,
            resume="allow",
        )
        self.identity = str(self._logger.run.id)

    @staticmethod
    def failures() -> Failures:
        """Return the service's own errors, and network errors."""
        return (OSError, importlib.import_module("wandb").Error)

    def log(self, values: Mapping[str, float], step: int) -> None:
        """Record values of curves."""
        self._logger.log(dict(values), step=step)

    def close(self, *, failed: bool) -> None:
        """Wait until everything is sent."""
        self._logger.finish(exit_code=int(failed))


class MLflow(Tracker):
    """MLflow, with its current experiment, which MLFLOW_EXPERIMENT_NAME may name."""

    name = "mlflow"

    def __init__(self, run: RunFolder, settings: Mapping[str, Any], known_as: str | None) -> None:
        from ignite.handlers.mlflow_logger import MLflowLogger

        mlflow = importlib.import_module("mlflow")
        started = mlflow.start_run(run_id=known_as, run_name=None if known_as else run.root.name)
        self.identity = str(started.info.run_id)
        self._logger = MLflowLogger()  # it logs to the run that has just started
        if known_as is None:
            self._logger.log_params(dict(settings))

    @staticmethod
    def failures() -> Failures:
        """Return the service's own errors, and network errors."""
        return (OSError, importlib.import_module("mlflow").MlflowException)

    def log(self, values: Mapping[str, float], step: int) -> None:
        """Record values of curves."""
        self._logger.log_metrics(dict(values), step=step)

    def close(self, *, failed: bool) -> None:
        """Mark the run as finished or failed."""
        self._logger.end_run("FAILED" if failed else "FINISHED")


TRACKERS: tuple[type[Tracker], ...] = (WandB, MLflow)


def check_trackers(names: Iterable[TrackerName]) -> None:
    """Raise `MissingExtraError` for the first service that is not installed."""
    for name in names:
        try:
            importlib.import_module(name)
        except ImportError:  # refused before any file is written
            raise MissingExtraError(
                f"--logger {name}: {name} is not installed; pip install {name}, or leave it out"
            ) from None


def open_trackers(
    names: Iterable[TrackerName], run: RunFolder, settings: Mapping[str, Any]
) -> list[Tracker]:
    """Start the run in each service, or resume it where the service knows it.

    Raises:
        SettingError: a service cannot be reached, or is not configured.
        OutputError: the run folder cannot be written.
    """
    # The identity is stored in the run folder: a resumed run continues the same curves.
    known = _known_identities(run)
    opened = list[Tracker]()
    for kind in TRACKERS:
        if kind.name not in names:
            continue
        try:
            opened.append(kind(run, settings, known.get(kind.name)))
        except kind.failures() as error:
            # Close the services that have started, or they would show a run that never ends.
            for tracker in opened:
                tracker.close(failed=True)
            raise SettingError(
                f"--logger {kind.name}: cannot start: {error}; solve this problem, or leave out "
                "--logger"
            ) from error
    identities = known | {tracker.name: tracker.identity for tracker in opened}
    if identities != known:
        write_bytes(run.trackers, json.dumps(identities).encode())
    return opened


def _known_identities(run: RunFolder) -> dict[str, str]:
    """Read the identity of the run in each service; empty before the first start."""
    # a service added on resume begins a new run
    if not run.trackers.exists():
        return {}
    known: dict[str, str] = json.loads(run.trackers.read_bytes())
    return known
