"""Out of memory in a step: find the largest batch that fits, and suggest settings."""

from __future__ import annotations

import torch

from vitkit.data.loading.batch import Batch
from vitkit.errors import SettingError
from vitkit.messages import plural
from vitkit.training.parallel.fsdp import has_shards
from vitkit.training.step import TrainingStep


def is_out_of_memory(error: BaseException) -> bool:
    """Return True for an error that means out of memory; on the CPU it has no class of its own.

    `allocate memory` is what torch's allocator says, `create a primitive` what oneDNN does.
    """
    return isinstance(error, torch.OutOfMemoryError | MemoryError) or (
        isinstance(error, RuntimeError)
        and any(words in str(error) for words in ("allocate memory", "create a primitive"))
    )


def out_of_memory(step: TrainingStep, batch: Batch) -> SettingError:
    """Find the largest batch that fits into memory, and return an error that suggests settings."""
    fits = _largest_that_fits(step, batch)
    count = len(batch.labels)
    mend = "lower --batch-size or --img-size, or use a smaller model"
    if fits == 0:  # with a smaller batch it would be no better
        mend = "not even one fits; lower --img-size, or use a smaller model"
    elif fits is not None:
        # every micro-batch has as many images as any other
        divisors = (n for n in range(2, count + 1) if count % n == 0)
        parts = next(n for n in divisors if count // n <= fits)
        mend = f"{fits} fit; pass --grad-accum-steps {parts}, or {mend}"
    return SettingError(
        f"{step.objective.device} is out of memory with "
        f"{plural(count // step.accumulate, 'image')} at once; {mend}"
    )


def _largest_that_fits(step: TrainingStep, batch: Batch) -> int | None:
    """Return how many images of a batch fit into memory, found by halving; 0 for none.

    `None` for a sharded model, with which no process can try it without the others.
    """
    if has_shards(step.model):
        return None
    count = len(batch.labels) // step.accumulate
    weights = [p for p in step.model.parameters() if p.requires_grad]
    while count := count // 2:
        step.optimizer.zero_grad(set_to_none=True)
        try:
            # the loss has no name, so that its memory is freed after a failure
            torch.autograd.grad(
                step.objective(step.transform(batch.first(count), 0, 0)),
                weights,
                allow_unused=True,
            )
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            continue
        return count
    return 0
