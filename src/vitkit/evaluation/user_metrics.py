"""A user's own metrics: functions of the logits and class numbers of a whole split."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import torch
from jaxtyping import Float, Int64
from torch import Tensor

from vitkit.distributed import ProcessGroup
from vitkit.errors import Interrupted, SettingError, UserCodeError
from vitkit.evaluation.gather import gather_rows
from vitkit.evaluation.metrics import Metrics
from vitkit.io.import_path import import_name, import_setting

Metric: TypeAlias = Callable[[Float[Tensor, "N K"], Int64[Tensor, " N"]], Any]
"""A function of logits (N, K) float32 and class numbers (N,), on the CPU, that returns a number."""
NamedMetrics: TypeAlias = Mapping[str, Metric]
"""Name of a score -> the function that computes it."""
OWN_SCORES = re.compile(
    r"(top[0-9]+|balanced_accuracy)(_low|_high)?|(calibrated_)?(loss|brier|ece)|images|temperature"
)
"""Names of vitkit's scores, which no metric of a user may have."""


def load_metrics(metrics: Sequence[str | Metric]) -> NamedMetrics:
    """Return metrics by the names of their functions.

    Args:
        metrics: functions, or `package.module:function`.

    Raises:
        SettingError: one that cannot be imported or called, without a name of its own, with the
            name of another one, or with that of a score of vitkit.
    """
    found: dict[str, Metric] = {}
    for metric in metrics:
        if isinstance(metric, str):
            shown, function = metric, import_setting("metrics", metric)
        else:
            shown, function = import_name(metric), metric
        if not callable(function) or isinstance(function, type):
            raise SettingError(f"--metrics {shown} must be a function of (logits, labels)")
        name = getattr(function, "__name__", type(function).__name__)
        if not name.isidentifier():
            raise SettingError(f"--metrics {shown} has no name for its column; define it with def")
        if OWN_SCORES.fullmatch(name) or name in found:
            raise SettingError(f"--metrics {shown}: there is a score {name} already; rename it")
        found[name] = function
    return found


def check_metrics(metrics: NamedMetrics, num_classes: int) -> None:
    """Call each metric once, on one-hot logits and labels of K images.

    Args:
        metrics: the functions by name.
        num_classes: K.

    Raises:
        UserCodeError: it raises, or does not return one number.
    """
    labels = torch.arange(num_classes)
    logits = torch.eye(num_classes)
    for name, metric in metrics.items():
        _value(name, metric, logits, labels)


class KeptOutputs:
    """The outputs of this process for a split, kept for the user's metrics.

    Args:
        outputs: batches of logits (B, K) and class numbers (B,).
        keep: False for outputs that no metric needs.
    """

    def __init__(self, outputs: Iterable[tuple[Tensor, Tensor]], *, keep: bool = True) -> None:
        self._outputs = outputs
        self._keep = keep
        self._logits: list[Tensor] = []
        self._labels: list[Tensor] = []

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        for logits, labels in self._outputs:
            # a copy: an inference tensor cannot be used with gradients
            if self._keep:
                self._logits.append(logits.detach().cpu().clone())
                self._labels.append(labels.cpu())
            yield logits, labels

    def scores(self, metrics: NamedMetrics, world: ProcessGroup | None = None) -> Metrics:
        """Return the value of every metric on the images of all processes.

        Args:
            metrics: the functions by name.
            world: the processes that share the images; each must call, and each gets the same.

        Raises:
            UserCodeError: a metric raises, or does not return one number.
        """
        if not metrics:
            return {}
        world = world or ProcessGroup()
        logits, labels = self._of_all(world)

        def compute() -> Metrics:
            return {name: _value(name, m, logits, labels) for name, m in metrics.items()}

        return world.broadcast_from_main(compute)

    def _of_all(self, world: ProcessGroup) -> tuple[Tensor, Tensor]:
        """Return logits (N, K) and labels (N,) in the order of the split."""
        if world.size == 1:
            return torch.cat(self._logits), torch.cat(self._labels)
        logits = gather_rows(self._logits, torch.float32, world)
        labels = gather_rows([batch[:, None] for batch in self._labels], torch.int64, world)
        return logits, labels[:, 0]


def finite_scores(scores: Metrics) -> Metrics:
    """Return the scores that are finite numbers, since JSON has no NaN or infinity."""
    return {name: value for name, value in scores.items() if math.isfinite(value)}


def _value(name: str, metric: Metric, logits: Tensor, labels: Tensor) -> float:
    try:
        value = metric(logits, labels)
    except Interrupted:  # a signal is not an error of the metric
        raise
    except Exception as error:  # a user's code may raise anything
        raise UserCodeError(f"the metric {name} raised {type(error).__name__}: {error}") from error
    shape = tuple(getattr(value, "shape", ()))
    try:
        if shape:
            raise TypeError
        return float(value)
    except (TypeError, ValueError):
        got = f"{type(value).__name__} of the shape {shape}" if shape else repr(value)[:80]
        raise UserCodeError(f"the metric {name} returned {got}; expected one number") from None
