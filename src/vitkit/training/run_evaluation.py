"""Evaluation of a model of the run on one of its splits, by all processes together."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from typing import TYPE_CHECKING, cast

from vitkit.evaluation.evaluation_loop import LabelledLogits, predict_batches
from vitkit.models.vit import ViT
from vitkit.training.parallel.fsdp import has_shards
from vitkit.training.run import Run
from vitkit.training.trainer import call_event

if TYPE_CHECKING:
    from torch.distributed.fsdp import FSDPModule

BATCH_SIZE = 256
"""Images of one evaluation batch of a process, as in `vitkit eval`."""


def evaluate_split(run: Run, split: str, model: ViT) -> Iterator[LabelledLogits]:
    """Yield the outputs of a model for this process's images of a split, in float32.

    The run may train in bfloat16: its scores are those that the file of weights has elsewhere.

    Args:
        run: its data, device and processes.
        split: split of the data.
        model: whole or sharded; it is set to eval mode.

    Raises:
        Interrupted: a signal came to any of the processes; nothing that is saved is lost.
    """
    plan, world = run.plan, run.world
    images, sharded = plan.dataset.splits[split], has_shards(model)
    # Starting loader processes takes longer than one batch.
    workers = plan.workers if len(images) > BATCH_SIZE else 0
    batches = predict_batches(
        model.eval(),
        images,
        plan.preprocess,
        batch_size=BATCH_SIZE,
        device=plan.device,
        workers=workers,
        world=world,
        collective=sharded,
    )
    most = -(-len(images) // (BATCH_SIZE * world.size))  # some processes have one batch less
    for _ in range(most):
        yield from islice(batches, 1)
        for callback in run.further:
            call_event(callback, "after_evaluation_batch", split)
        if signum := world.all_reduce_max(run.stop.signum or 0):
            raise run.interrupted(signum)
    yield from batches  # exhausted: lets the code after the last batch run
    if sharded:
        cast("FSDPModule", model).reshard()
