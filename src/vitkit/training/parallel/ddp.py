"""Several processes with a whole model each: wrapped in DDP, which averages their gradients."""

from __future__ import annotations

import warnings
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, cast

from torch import nn

from vitkit.distributed import ProcessGroup
from vitkit.models.vit import ViT
from vitkit.training.parallel.fsdp import has_shards

if TYPE_CHECKING:
    from torch.distributed.fsdp import FSDPModule


def data_parallel(objective: nn.Module, model: nn.Module, world: ProcessGroup) -> nn.Module:
    """Wrap the objective in DDP if several processes each hold the whole model.

    Args:
        objective: model and loss in one module.
        model: the model in it.
        world: the processes that share the batch.
    """
    if world.size == 1 or has_shards(model):
        return objective
    # Parameters without a gradient are searched for only if a head is unused. The memory layout
    # of a token's gradient does not matter.
    warnings.filterwarnings("ignore", message="Grad strides do not match bucket view")
    idle = isinstance(model, ViT) and model.spec.distilled_readout == "cls"
    return nn.parallel.DistributedDataParallel(
        objective,
        process_group=world.group,
        # gradients are views of the communication buckets, without memory of their own
        gradient_as_bucket_view=True,
        find_unused_parameters=idle,
    )


def exchanging_gradients(
    wrapped: nn.Module, model: nn.Module, world: ProcessGroup, last: bool
) -> AbstractContextManager[None]:
    """Return the context of a micro-batch: gradients are exchanged only after the last one.

    Args:
        wrapped: what `data_parallel` returned.
        model: the model in it, whole or sharded.
        world: the processes that share the batch.
        last: this is the last micro-batch of the step.
    """
    if isinstance(wrapped, nn.parallel.DistributedDataParallel):
        quiet: AbstractContextManager[None] = wrapped.no_sync()
        return nullcontext() if last else quiet
    if world.size > 1:
        cast("FSDPModule", model).set_requires_gradient_sync(last)
    return nullcontext()
