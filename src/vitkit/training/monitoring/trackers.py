"""Weights & Biases and MLflow, through Ignite's loggers: they get the numbers TensorBoard gets.

Where these go is the services' own to say (WANDB_MODE, MLFLOW_TRACKING_URI and the like). A service
that fails during a run does not end it.
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
from vitkit.training.config.train_config import TrackerName
from vitkit.training.run_folder import RunFolder

Failures = tuple[type[Exception], ...]


class Tracker(ABC):
    """One service that is told the numbers of a run.

    Args:
        run: its folder; the run is called by its name.
        settings: of the run, as JSON values.
        known_as: what the service called the run before, on resume.
    """

    name: ClassVar[TrackerName]
    identity: str
    """What the service calls the run."""

    @abstractmethod
    def __init__(self, run: RunFolder, settings: Mapping[str, Any], known_as: str | None) -> None:
        """Tell the service that the run starts, or goes on."""

    @staticmethod
    @abstractmethod
    def failures() -> Failures:
        """What the service raises when it cannot do its work."""

    @abstractmethod
    def log(self, values: Mapping[str, float], step: int) -> None:
        """Points of curves, finite, by TensorBoard's tags."""

    @abstractmethod
    def close(self, *, failed: bool) -> None:
        """The run has ended."""


class WandB(Tracker):
    """Weights & Biases: the project `vitkit`, unless WANDB_PROJECT names another."""

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
        """Its own errors, and the network's."""
        return (OSError, importlib.import_module("wandb").Error)

    def log(self, values: Mapping[str, float], step: int) -> None:
        """Points of curves."""
        self._logger.log(dict(values), step=step)

    def close(self, *, failed: bool) -> None:
        """Wait until all is sent."""
        self._logger.finish(exit_code=int(failed))


class MLflow(Tracker):
    """MLflow: its current experiment, which MLFLOW_EXPERIMENT_NAME may name."""

    name = "mlflow"

    def __init__(self, run: RunFolder, settings: Mapping[str, Any], known_as: str | None) -> None:
        from ignite.handlers.mlflow_logger import MLflowLogger

        mlflow = importlib.import_module("mlflow")
        started = mlflow.start_run(run_id=known_as, run_name=None if known_as else run.root.name)
        self.identity = str(started.info.run_id)
        self._logger = MLflowLogger()  # takes the run that has just started
        if known_as is None:
            self._logger.log_params(dict(settings))

    @staticmethod
    def failures() -> Failures:
        """Its own errors, and the network's."""
        return (OSError, importlib.import_module("mlflow").MlflowException)

    def log(self, values: Mapping[str, float], step: int) -> None:
        """Points of curves."""
        self._logger.log_metrics(dict(values), step=step)

    def close(self, *, failed: bool) -> None:
        """Mark the run as ended."""
        self._logger.end_run("FAILED" if failed else "FINISHED")


TRACKERS: tuple[type[Tracker], ...] = (WandB, MLflow)


def check_trackers(names: Iterable[TrackerName]) -> None:
    """Raise `MissingExtraError` for the first one that is not installed."""
    for name in names:
        try:
            importlib.import_module(name)
        except ImportError:
            raise MissingExtraError(
                f"--logger {name}: {name} is not installed; pip install {name}, or leave it out"
            ) from None


def open_trackers(
    names: Iterable[TrackerName], run: RunFolder, settings: Mapping[str, Any]
) -> list[Tracker]:
    """Tell each service that the run starts or, where it knows the run, goes on.

    Raises:
        SettingError: one that cannot be reached, or is not set up.
        OutputError: the run folder cannot be written.
    """
    known, opened = _known(run), list[Tracker]()
    for kind in TRACKERS:
        if kind.name not in names:
            continue
        try:
            opened.append(kind(run, settings, known.get(kind.name)))
        except kind.failures() as error:
            for tracker in opened:
                tracker.close(failed=True)
            raise SettingError(f"--logger {kind.name}: it cannot start: {error}") from error
    identities = known | {tracker.name: tracker.identity for tracker in opened}
    if identities != known:
        write_bytes(run.trackers, json.dumps(identities).encode())
    return opened


def _known(run: RunFolder) -> dict[str, str]:
    """Service -> what it calls the run; none where that was never written."""
    if not run.trackers.exists():
        return {}
    known: dict[str, str] = json.loads(run.trackers.read_bytes())
    return known
