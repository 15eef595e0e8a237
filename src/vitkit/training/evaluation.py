"""How good a model is on a split: top-1, top-k and cross-entropy, every picture counted once."""

from __future__ import annotations

import logging
from collections.abc import Callable

import torch
from ignite.engine import Engine
from ignite.metrics import Accuracy, Loss, TopKCategoricalAccuracy
from torch import Tensor
from torch.nn import functional as F

from vitkit.data.loader import Batch, EvaluationBatches, batches
from vitkit.data.sources import Split
from vitkit.errors import DataError
from vitkit.spec import Preprocess

Metrics = dict[str, float]
Forward = Callable[[Tensor], Tensor]


def evaluate(
    forward: Forward,
    split: Split,
    preprocess: Preprocess,
    *,
    num_classes: int,
    batch_size: int = 256,
    device: torch.device | None = None,
    workers: int = 0,
) -> Metrics:
    """Evaluate any callable that maps images (B, C, H, W) to logits (B, K).

    Returns:
        `top1` and `top{k}` with k = min(5, K), in [0, 1]; `loss`, the mean cross-entropy in nats;
        `pictures`, how many there were.

    Raises:
        DataError: an empty split.
    """
    if len(split) == 0:
        raise DataError("the split is empty; there is nothing to evaluate")
    device = device or torch.device("cpu")
    source = EvaluationBatches(split, preprocess, batch_size=batch_size)

    def step(engine: Engine, batch: Batch) -> tuple[Tensor, Tensor]:
        with torch.inference_mode():
            logits = forward(batch.images(preprocess, device)).float()
        return logits, batch.labels.to(device)

    engine = quiet_engine(step)
    k = min(5, num_classes)
    Accuracy(device=device).attach(engine, "top1")
    TopKCategoricalAccuracy(k=k, device=device).attach(engine, f"top{k}")
    Loss(F.cross_entropy, device=device).attach(engine, "loss")
    numbers = range(len(source))
    state = engine.run(batches(source, numbers, workers=workers), epoch_length=len(numbers))
    return {name: float(value) for name, value in state.metrics.items()} | {
        "pictures": float(len(split))
    }


def quiet_engine(process: Callable[[Engine, Batch], object]) -> Engine:
    """An Ignite engine that leaves error messages to whoever catches the error."""
    engine = Engine(process)
    engine.logger = logging.Logger("vitkit", level=logging.CRITICAL + 1)
    return engine
