"""How good a model is on a split: top-1, top-k and cross-entropy, every picture counted once."""

from __future__ import annotations

import logging
from collections.abc import Callable

import torch
from ignite.engine import Engine
from torch import Tensor
from torch.nn import functional as F

from vitkit.data.loader import Batch, EvaluationBatches, batches
from vitkit.data.sources import Split
from vitkit.errors import DataError
from vitkit.spec import Preprocess
from vitkit.training.distributed import World

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
    world: World | None = None,
) -> Metrics:
    """Evaluate any callable that maps images (B, C, H, W) to logits (B, K).

    Several processes take every n-th picture each, and nobody takes one twice to have as many as
    the others: what is added up at the end are counts and sums, not means.

    Returns:
        `top1` and `top{k}` with k = min(5, K), in [0, 1]; `loss`, the mean cross-entropy in nats;
        `pictures`, how many there were.

    Raises:
        DataError: an empty split.
    """
    if len(split) == 0:
        raise DataError("the split is empty; there is nothing to evaluate")
    device, world, k = device or torch.device("cpu"), world or World(), min(5, num_classes)
    source = EvaluationBatches(
        split, preprocess, batch_size=batch_size, rank=world.rank, world_size=world.size
    )
    sums = []
    with torch.inference_mode():
        for batch in batches(source, range(len(source)), workers=workers):
            logits = forward(batch.images(preprocess, device)).float()
            sums.append(_sums(logits, batch.labels.to(device), k))
    mine = torch.stack(sums).cpu().double().sum(0) if sums else torch.zeros(4).double()
    top1, top_k, loss, pictures = world.summed(mine).tolist()
    scores = {"top1": top1 / pictures, f"top{k}": top_k / pictures, "loss": loss / pictures}
    return scores | {"pictures": pictures}


def _sums(logits: Tensor, labels: Tensor, k: int) -> Tensor:
    """Of a batch: hits, hits among the first k, losses, pictures; exact as float32."""
    hits = (logits.argmax(1) == labels).sum()
    among = (logits.topk(k).indices == labels[:, None]).sum()
    loss = F.cross_entropy(logits, labels, reduction="sum")
    return torch.stack([hits, among, loss, loss.new_full((), len(labels))])


def quiet_engine(process: Callable[[Engine, Batch], object]) -> Engine:
    """An Ignite engine that leaves error messages to whoever catches the error."""
    engine = Engine(process)
    engine.logger = logging.Logger("vitkit", level=logging.CRITICAL + 1)
    return engine
