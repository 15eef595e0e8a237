"""The evaluation loop, each image counted once, and a user's own metrics."""

import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import torch
from jaxtyping import Float, Int64
from torch import Tensor

from vitkit import distributed, errors, spec
from vitkit.data.datasets.split import Split
from vitkit.data.loading.loader import EvaluationBatches, batches
from vitkit.evaluation.metrics import Metrics, PredictionCounts, gather_rows, refuse_not_finite
from vitkit.io.results import import_name, import_setting

Forward = Callable[[Tensor], Tensor]
"""Images (B, C, H, W) -> logits (B, K)."""
LabelledLogits = tuple[Tensor, Tensor]
"""Logits (B, K) float32 on the device, and class numbers (B,), of a batch."""


def predict_batches(
    forward: Forward,
    split: Split,
    preprocess: spec.Preprocess,
    *,
    batch_size: int = 256,
    device: torch.device | None = None,
    workers: int = 0,
    world: distributed.ProcessGroup | None = None,
    collective: bool = False,
) -> Iterator[LabelledLogits]:
    """Yield logits and class numbers of a split, batch by batch, in its order.

    Each of n processes takes every n-th image, without padding: so counts and sums may be added
    over processes, means may not.

    Args:
        forward: preprocessed images (B, C, H, W) -> logits (B, K).
        split: the images, with labels.
        preprocess: the evaluation transform.
        batch_size: images per batch.
        device: device of the model; default the CPU.
        workers: number of loader processes.
        world: the processes that share the images.
        collective: True for a model that is sharded over the processes, which must then call
            `forward` equally often: one that has no more images calls with zeros, and drops the
            result.

    Raises:
        DataError: an empty split.
    """
    if len(split) == 0:
        raise errors.DataError("the split has no images to evaluate")
    device = device or torch.device("cpu")
    world = world or distributed.ProcessGroup()
    source = EvaluationBatches(
        split, preprocess, batch_size=batch_size, rank=world.rank, world_size=world.size
    )
    # Weights that FSDP2 gathers in inference mode could not be trained afterwards.
    no_gradients = torch.no_grad if collective else torch.inference_mode
    # only this process's share
    for batch in batches(source, range(len(source)), workers=workers):
        with no_gradients():
            logits = forward(batch.images(preprocess, device)).float()
        yield logits, batch.labels
    if collective:
        most_images = -(-len(split) // world.size)  # number of images of the first process
        most_batches = -(-most_images // batch_size)
        zeros = torch.zeros(1, len(preprocess.mean), *preprocess.image_size, device=device)
        for _ in range(len(source), most_batches):
            with no_gradients():
                forward(zeros)


def count_predictions(predictions: Iterable[LabelledLogits], num_classes: int) -> PredictionCounts:
    """Count this process's batches.

    Args:
        predictions: logits (B, K) and class numbers (B,), as `predict_batches` yields them.
        num_classes: K.
    """
    counts = PredictionCounts(num_classes)
    for logits, labels in predictions:
        counts.add(logits, labels)
    return counts


def evaluate_outputs(
    predictions: Iterable[LabelledLogits],
    num_classes: int,
    temperature: float = 1.0,
    world: distributed.ProcessGroup | None = None,
) -> tuple[Metrics, PredictionCounts]:
    """Return the scores with intervals, and the counts computed with the temperature.

    The scores are `top1`, `top5` of over five classes, `loss` in nats, `balanced_accuracy`,
    `brier`, `ece` and `images`, which `Counts.scores` explains; `top1_low`, `top1_high` and the
    same of the balanced accuracy, intervals of 95 %. If the temperature is not 1, the scores
    contain it, with the `calibrated_loss`, `calibrated_brier` and `calibrated_ece` that it gives.

    Args:
        predictions: as `predict_batches` yields them.
        num_classes: K.
        temperature: divides the logits.
        world: the processes that share the images; each must call, and each gets the same.

    Raises:
        CheckpointError: logits that are NaN or infinite, with the number of images.
    """
    plain = PredictionCounts(num_classes)
    calibrated = PredictionCounts(num_classes)
    for logits, labels in predictions:
        plain.add(logits, labels)
        # counted apart: top-1 stays, but loss, Brier score and ECE change
        calibrated.add(logits / temperature, labels)
    counts = plain.counts(world)
    refuse_not_finite(counts.not_finite, int(counts.sums[3]))
    calibrated_scores = calibrated.counts(world).scores()
    scores = counts.scores() | counts.intervals()
    if temperature != 1.0:
        for name in ("loss", "brier", "ece"):
            scores[f"calibrated_{name}"] = calibrated_scores[name]
        scores["temperature"] = temperature
    return scores, calibrated


# A user's own metrics: functions of the logits and class numbers of a whole split.

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
        name = getattr(function, "__name__", type(function).__name__)
        problem = ""
        if not callable(function) or isinstance(function, type):
            problem = "must be a function of (logits, labels)"
        elif not name.isidentifier():
            problem = "has no name for its column; define it with def"
        elif OWN_SCORES.fullmatch(name) or name in found:
            problem = f"is refused: there is a score {name} already; rename it"
        if problem:
            raise errors.SettingError(f"--metrics {shown} {problem}")
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
                self._labels.append(labels.cpu()[:, None])
            yield logits, labels

    def scores(
        self, metrics: NamedMetrics, world: distributed.ProcessGroup | None = None
    ) -> Metrics:
        """Return the value of every metric on the images of all processes.

        Args:
            metrics: the functions by name.
            world: the processes that share the images; each must call, and each gets the same.

        Raises:
            UserCodeError: a metric raises, or does not return one number.
        """
        if not metrics:
            return {}
        world = world or distributed.ProcessGroup()
        # in the order of the split
        logits = gather_rows(self._logits, torch.float32, world)
        labels = gather_rows(self._labels, torch.int64, world)[:, 0]

        def compute() -> Metrics:
            return {name: _value(name, m, logits, labels) for name, m in metrics.items()}

        return world.broadcast_from_main(compute)


def finite_scores(scores: Metrics) -> Metrics:
    """Return the scores that are finite numbers, since JSON has no NaN or infinity."""
    return {name: value for name, value in scores.items() if math.isfinite(value)}


def _value(name: str, metric: Metric, logits: Tensor, labels: Tensor) -> float:
    try:
        value = metric(logits, labels)
    except errors.Interrupted:  # a signal is not an error of the metric
        raise
    except Exception as error:  # a user's code may raise anything
        raise errors.UserCodeError(
            f"the metric {name} raised {type(error).__name__}: {error}"
        ) from error
    shape = tuple(getattr(value, "shape", ()))
    try:
        if shape:
            raise TypeError
        return float(value)
    except (TypeError, ValueError):
        got = f"{type(value).__name__} of the shape {shape}" if shape else repr(value)[:80]
        raise errors.UserCodeError(
            f"the metric {name} returned {got}; expected one number"
        ) from None
