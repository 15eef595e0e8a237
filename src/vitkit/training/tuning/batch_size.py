"""Find a batch size: double it until throughput stops rising, or memory is full."""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np

from vitkit.data.loading.batch import Batch
from vitkit.devices import is_out_of_memory
from vitkit.errors import SettingError
from vitkit.messages import plural
from vitkit.models.vit import ViT
from vitkit.training.defaults.schedule import MIN_STEPS, limit_batch_size
from vitkit.training.optimization.precision import wait_for
from vitkit.training.run_plan import Plan
from vitkit.training.tuning.trial import preserve_generators, trial

SMALLEST, LARGEST = 8, 4096
"""Range of the batch sizes that are tried, in images."""
SPEEDUP = 1.05
"""Least gain in images per second from doubling the batch size."""
TIMED = 3
"""Timed steps of each size, after one that warms up; the fastest counts."""


def find_batch_size(
    plan: Plan, model: ViT, clock: Callable[[], float] = time.perf_counter
) -> tuple[int, str]:
    """Find the batch size beyond which doubling is no faster, or does not fit into memory.

    An epoch keeps `MIN_STEPS` steps. Every trial is a complete step of a copy of the model,
    including the state of the optimizer. The learning rate is not adapted, although a larger batch
    may need another one.

    Args:
        plan: plan of the run.
        model: freshly initialised, on the plan's device; it is not changed.
        clock: seconds since some start, that the trials are timed by.

    Returns:
        The batch size, and a line with the images per second of each size.

    Raises:
        SettingError: the smallest batch does not fit into memory.
    """
    limit = limit_batch_size(len(plan.steps.split), LARGEST)
    # the views of one image must not fill a batch; a power of two, as all sizes are
    more_than_views = 1 << plan.config.repeated_aug.bit_length()
    size = min(max(SMALLEST, more_than_views), limit)
    chosen, best = size, 0.0
    speeds = []
    with preserve_generators(plan.device):
        while size <= limit:
            speed = _images_per_second(plan, model, size, clock)
            if not speed:
                speeds.append(f"{size}: out of memory")
                break
            speeds.append(f"{size}: {speed:.4g}")
            # The first size that gains nothing ends the search: larger ones gain less.
            if speed < SPEEDUP * best:
                break
            chosen, best = size, speed
            size *= 2
    if not best:
        raise SettingError(
            f"{plan.device} is out of memory with {plural(size, 'image')} at once; lower "
            "--img-size, use a smaller model, or pass --grad-checkpointing"
        )
    line = f"batch size: {chosen} (images per second at {', '.join(speeds)})"
    if limit < size <= LARGEST:
        line += f"; with a larger one an epoch would have fewer than {MIN_STEPS} steps"
    if chosen != plan.config.batch_size and not plan.config.find_lr:
        line += f"; lr {plan.config.lr:g} is unchanged"
    return chosen, line


def _images_per_second(plan: Plan, model: ViT, size: int, clock: Callable[[], float]) -> float:
    """Time training steps of a batch size; return images/s of the fastest, 0 if out of memory."""
    try:
        step = trial(plan, model)
        sizes = plan.steps.sizes
        epoch = 0
        if sizes:  # with images that grow, the epoch of the largest ones
            epoch = sizes.index(max(sizes))
        batch: Batch = plan.steps.variants(np.arange(size), epoch)
        times = []
        for number in range(TIMED + 1):
            start = clock()
            step(batch, number)
            wait_for(plan.device)  # GPU calls are asynchronous
            times.append(clock() - start)
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        return 0.0
    return size / min(times[1:])
