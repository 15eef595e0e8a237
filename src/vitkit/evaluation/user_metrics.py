"""A user's own metrics: functions of the logits and class numbers of a whole split."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import torch
from jaxtyping import Float, Int64
from torch import Tensor

from vitkit.distributed import ProcessGroup
from vitkit.errors import SettingError, UserCodeError
from vitkit.evaluation.metrics import Metrics
from vitkit.io.import_path import import_by_name, import_name

Metric: TypeAlias = Callable[[Float[Tensor, "N K"], Int64[Tensor, " N"]], Any]
"""A function of logits (N, K) float32 and class numbers (N,), on the CPU, that returns a number."""
NamedMetrics: TypeAlias = Mapping[str, Metric]
"""Name of a score -> the function that computes it."""
OWN_SCORES = ("top1", "loss", "balanced_accuracy", "brier", "ece", "images", "temperature")
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
        shown = metric if isinstance(metric, str) else import_name(metric)
        try:
            function = import_by_name(metric) if isinstance(metric, str) else metric
        except (ImportError, AttributeError, ValueError) as error:
            raise SettingError(f"--metrics {shown} cannot be imported: {error}") from None
        if not callable(function) or isinstance(function, type):
            raise SettingError(f"--metrics {shown} must be a function of (logits, labels)")
        name = getattr(function, "__name__", type(function).__name__)
        if not name.isidentifier():
            raise SettingError(f"--metrics {shown} has no name for its column; define it with def")
        if name in OWN_SCORES or name in found or name.startswith(("top", "calibrated_")):
            raise SettingError(f"--metrics {shown}: there is a score {name} already; rename it")
        found[name] = function
    return found


def check_metrics(metrics: NamedMetrics, num_classes: int) -> None:
    """Call each metric once, on the logits and labels of as many images as there are classes.

    Raises:
        UserCodeError: it raises, or does not return one number.
    """
    labels = torch.arange(num_classes)
    logits = torch.eye(num_classes)
    for name, metric in metrics.items():
        _value(name, metric, logits, labels)


class KeptOutputs:
    """The outputs of this process for a split, kept while they are counted.

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
            # a copy: a tensor of inference mode cannot be used with gradients
            if self._keep:
                self._logits.append(logits.detach().cpu().clone())
                self._labels.append(labels.cpu())
            yield logits, labels

    def scores(self, metrics: NamedMetrics, world: ProcessGroup | None = None) -> Metrics:
        """Return the value of every metric on the images of all processes, each of which must call.

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
        logits, labels = torch.cat(self._logits), torch.cat(self._labels)
        if world.size == 1:
            return logits, labels
        counts = torch.zeros(world.size, dtype=torch.int64)
        counts[world.rank] = len(labels)
        total = int(world.all_reduce_sum(counts).sum())
        # process r has the images r, r + n, r + 2n ...; adding zeros changes no bit
        mine = slice(world.rank, None, world.size)
        all_logits = logits.new_zeros(total, logits.shape[1])
        all_labels = labels.new_zeros(total)
        all_logits[mine] = logits
        all_labels[mine] = labels
        return world.all_reduce_sum(all_logits), world.all_reduce_sum(all_labels)


def finite_scores(scores: Metrics) -> Metrics:
    """Return the scores that are finite numbers: JSON has no others."""
    return {name: value for name, value in scores.items() if math.isfinite(value)}


def _value(name: str, metric: Metric, logits: Tensor, labels: Tensor) -> float:
    try:
        value = metric(logits, labels)
    except Exception as error:
        raise UserCodeError(f"the metric {name} raised {type(error).__name__}: {error}") from error
    shape = tuple(getattr(value, "shape", ()))
    try:
        if shape:
            raise TypeError
        return float(value)
    except (TypeError, ValueError):
        got = f"{type(value).__name__} of the shape {shape}" if shape else repr(value)[:80]
        raise UserCodeError(f"the metric {name} returned {got}; expected one number") from None
