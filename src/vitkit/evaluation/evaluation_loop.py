"""The evaluation loop: logits of every image of a split, each image counted once."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

import torch
from torch import Tensor

from vitkit.data.datasets.split import Split
from vitkit.data.loading.loader import EvaluationBatches, batches
from vitkit.distributed import ProcessGroup
from vitkit.errors import DataError
from vitkit.evaluation.finite_outputs import refuse_not_finite
from vitkit.evaluation.metrics import Metrics, PredictionCounts
from vitkit.spec import Preprocess

Forward = Callable[[Tensor], Tensor]
"""Images (B, C, H, W) -> logits (B, K)."""
LabelledLogits = tuple[Tensor, Tensor]
"""Logits (B, K) float32 on the device, and class numbers (B,), of a batch."""


def predict_batches(
    forward: Forward,
    split: Split,
    preprocess: Preprocess,
    *,
    batch_size: int = 256,
    device: torch.device | None = None,
    workers: int = 0,
    world: ProcessGroup | None = None,
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
        raise DataError("the split has no images to evaluate")
    device = device or torch.device("cpu")
    world = world or ProcessGroup()
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


def evaluate_model(
    forward: Forward,
    split: Split,
    preprocess: Preprocess,
    *,
    num_classes: int,
    batch_size: int = 256,
    device: torch.device | None = None,
    workers: int = 0,
    world: ProcessGroup | None = None,
) -> Metrics:
    """Return the scores of a model on a split, as `Counts.scores` explains them.

    Args:
        forward: preprocessed images (B, C, H, W) -> logits (B, K).
        split: the images, with labels.
        preprocess: the evaluation transform.
        num_classes: K.
        batch_size: images per batch.
        device: device of the model; default the CPU.
        workers: number of loader processes.
        world: the processes that share the images; each must call, and each gets the same.

    Raises:
        DataError: an empty split.
    """
    predictions = predict_batches(
        forward,
        split,
        preprocess,
        batch_size=batch_size,
        device=device,
        workers=workers,
        world=world,
    )
    return count_predictions(predictions, num_classes).counts(world).scores()


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
    world: ProcessGroup | None = None,
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
