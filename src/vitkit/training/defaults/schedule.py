"""Batch size, epochs and warm-up that follow from the number of training images."""

from __future__ import annotations

import math

from vitkit.data.loading.sampler import steps_of_epoch
from vitkit.training.config.train_config import TrainConfig

MIN_STEPS = 8
"""Steps of an epoch that a batch size must leave."""
STEPS, SCRATCH_STEPS = 500, 2_000
"""Least optimizer steps: of a named model, and of a small one from random weights.

The first is what AugReg (arXiv 2106.10270) fine-tunes with on small data. The second is not tuned:
`benchmarks/first_try.py` measures what it reaches."""
SCRATCH_IMAGES = 200_000
"""Most images in these steps for the small model, to limit the time on a few cores."""
FEWEST_EPOCHS, FINETUNE_EPOCHS, MOST_EPOCHS = 10, 20, 300
"""More epochs than the last gained little in the papers on small data."""
WARMUP = 1 / 20
"""Part of the epochs that is warm-up; at least one epoch, and a tenth of a run of one epoch."""


def limit_batch_size(images: int, batch_size: int) -> int:
    """Lower a batch size to a power of two with which an epoch has `MIN_STEPS` steps.

    Args:
        images: images of an epoch.
        batch_size: the upper limit.
    """
    most = max(MIN_STEPS, images // MIN_STEPS)
    power_of_two = 1 << most.bit_length() - 1
    return min(batch_size, power_of_two, images)


def default_batch_size(config: TrainConfig, images: int, most: int, processes: int) -> int:
    """Return the batch size for a number of images that the other settings allow.

    Args:
        config: the settings.
        images: training images.
        most: the upper limit, unless other settings need more.
        processes: processes that share each batch.
    """
    # every process has as many images in each micro-batch as any other
    shares = config.grad_accum_steps * processes
    fewest = shares
    if config.mixup > 0 or config.cutmix > 0:  # an image is mixed with another one of its part
        fewest = 2 * shares
    batch_size = max(limit_batch_size(images, most) // shares * shares, fewest)
    if 1 < batch_size <= config.repeated_aug:  # the views of one image must not fill a batch
        batch_size = (config.repeated_aug // shares + 1) * shares
    return batch_size


def default_epochs(
    config: TrainConfig, images: int, batch_size: int, *, fill: bool, scratch: bool
) -> int:
    """Return the epochs that make enough optimizer steps.

    Args:
        config: the settings.
        images: training images.
        batch_size: images of a step.
        fill: whether the last batch of an epoch is filled.
        scratch: whether the model is a small one, chosen by the data.
    """
    steps = max(1, steps_of_epoch(images, batch_size, fill=fill))
    fewest = FEWEST_EPOCHS if config.pretrained is None else FINETUNE_EPOCHS
    enough = math.ceil(STEPS / steps)
    if scratch:
        enough = math.ceil(min(SCRATCH_STEPS / steps, SCRATCH_IMAGES / images))
    epochs = min(max(enough, fewest), MOST_EPOCHS)
    # neither --max-steps nor the last size of --progressive may come after the end
    return max(epochs, math.ceil((config.max_steps or 0) / steps), len(config.progressive))


def limit_warmup(warmup: float, epochs: int) -> float:
    """Lower a warm-up, in epochs, to at most a tenth of a run of so many epochs."""
    return min(warmup, epochs / 10)


def default_warmup(epochs: int) -> float:
    """Return the epochs of warm-up of a run, whether its epochs are given or not."""
    return max(1.0, epochs * WARMUP) if epochs > 1 else epochs / 10
