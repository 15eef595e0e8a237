"""Find the bottleneck of a run by measuring its own images, and recommend a remedy.

A step costs core-seconds of the model, and every image core-seconds to decode, resize and augment.
With N cores no step is shorter than the sum of these over N, nor than the model alone; more workers
than this pace needs do not help.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass

import numpy as np

from vitkit.data.loading.loader import TrainingSteps
from vitkit.training.monitoring.throughput import TimingSnapshot

DIAGNOSIS_STEP = 30
"""Steps after which a run reports its bottleneck."""
WARM_UP_STEPS = 5
"""Steps that do not count: the first ones wait for processes to start."""
SIGNIFICANT = 0.1
"""Waiting below this share of the time, or a gain below it, is not reported."""
TIMED_IMAGES = 16
"""Images that are timed."""


@dataclass(frozen=True)
class ImageCost:
    """The mean core-seconds of one image.

    Attributes:
        decode: reading and decoding.
        resize: cropping, resizing and mirroring.
        augment: shifts, and a transform of the user's own.
    """

    decode: float
    resize: float
    augment: float

    @property
    def total(self) -> float:
        """The sum of all three."""
        return self.decode + self.resize + self.augment


@dataclass(frozen=True)
class Machine:
    """The hardware of a run.

    Attributes:
        cores: processor cores for this process and its workers.
        workers: loader processes.
        accelerator: True if the model is not on the processor.
    """

    cores: int
    workers: int
    accelerator: bool = False


def measure_image_cost(steps: TrainingSteps, step: int) -> ImageCost:
    """Make some images of a step in this thread, and measure its processor time.

    Args:
        steps: the training batches of the run.
        step: number of the step whose images are made, from 0.

    Returns:
        The mean core-seconds of an image.

    Raises:
        ImageError: one cannot be read.
        UserCodeError: the user's own transform raises.
    """
    # The cost does not depend on the random numbers: any view of an image will do.
    indices = steps.indices(step)[:TIMED_IMAGES]
    epoch = step // steps.steps_per_epoch
    decode = resize = augment = 0.0
    height, width = steps.preprocess.image_size
    pixels = np.empty((len(indices), height, width, steps.preprocess.channels), np.uint8)
    flipped = steps.augmentation.flips(steps.seed, epoch, indices)
    for row, index in enumerate(map(int, indices)):
        # Time of this thread only: waiting for the disk must not count as work.
        start = time.thread_time()
        image = steps.read(index, epoch, steps.preprocess).pixels
        decoded = time.thread_time()
        if steps.transform is not None:
            image = steps.transform(image, epoch, index, steps.split.name(index))
        changed = time.thread_time()
        steps.augmentation.write(
            pixels[row],
            image,
            steps.preprocess,
            steps.seed,
            epoch,
            index,
            mirrored=bool(flipped[row]),
        )
        decode += decoded - start
        augment += changed - decoded
        resize += time.thread_time() - changed
    start = time.thread_time()
    steps.augmentation.shifted(pixels, steps.seed, epoch, indices)
    augment += time.thread_time() - start
    count = len(indices)
    return ImageCost(decode / count, resize / count, augment / count)


def waits_for_images(timing: TimingSnapshot) -> bool:
    """Return whether a run waits for images so long that a remedy is worth looking for."""
    return _waiting_share(timing) >= SIGNIFICANT


def diagnose(timing: TimingSnapshot, cost: ImageCost | None, machine: Machine) -> str:
    """Return one line on the bottleneck of a run, and on a remedy.

    Args:
        timing: measurement of some steps.
        cost: cost of an image, if the run waits for images.
        machine: the hardware of the run.
    """
    step = _step_seconds(timing)
    if cost is None:
        return (
            f"after {DIAGNOSIS_STEP} steps: {_time(step)} per step, {_waiting_share(timing):.0%} "
            "of it waiting for images; limited by the model"
        )
    return (
        f"after {DIAGNOSIS_STEP} steps: {_time(step)} per step, {_waiting_share(timing):.0%} of "
        f"it waiting for images ({_time(timing.waiting / timing.steps)}); decoding takes "
        f"{_time(cost.decode)} per image, resizing {_time(cost.resize)}, augmentation "
        f"{_time(cost.augment)}; {_remedy(timing, cost, machine)}"
    )


def _remedy(timing: TimingSnapshot, cost: ImageCost, machine: Machine) -> str:
    """Recommend more workers or a cache if they shorten a step; else name the limit."""
    now = _step_seconds(timing)
    images = cost.total * timing.images / timing.steps
    if not machine.workers:
        # Images are made while the step waits, so the waiting is their exact cost.
        images = timing.waiting / timing.steps
    shortest, workers = _shortest_step(timing, images, machine)
    remedies = []
    if shortest < (1 - SIGNIFICANT) * now and workers > machine.workers:
        remedies.append(f"with --workers {workers} a step would take about {_time(shortest)}")
    cached, cached_workers = _shortest_step(
        timing, images * (1 - cost.decode / cost.total), machine
    )
    # A cache must be faster than more workers without it.
    if cost.decode > 0 and cached < (1 - SIGNIFICANT) * (shortest if remedies else now):
        also = f" and --workers {cached_workers}" if cached_workers > machine.workers else ""
        remedies.append(f"with --cache{also} (no decoding) a step would take about {_time(cached)}")
    if remedies:
        return ", ".join(remedies)
    if shortest < (1 - SIGNIFICANT) * now:
        return "limited by disk or network: the cores are not busy"
    cores = "core is" if machine.cores == 1 else f"{machine.cores} cores are"
    return f"limited by the processor: the {cores} always busy, so that more workers would not help"


def _shortest_step(timing: TimingSnapshot, images: float, machine: Machine) -> tuple[float, int]:
    """Return the seconds of the shortest possible step, and the workers that it needs.

    Args:
        timing: measurement of some steps.
        images: core-seconds of the images of a step.
        machine: the hardware of the run.
    """
    model = timing.cores / timing.steps
    alone = timing.working / timing.steps
    if not machine.accelerator:
        # Fewer core-seconds than seconds: other processes, such as workers, used its cores.
        model = max(model, alone)
        if machine.workers:
            alone = model / machine.cores
    shortest = max(alone, (model + images) / machine.cores)
    if alone + images <= (1 + SIGNIFICANT) * shortest:
        return shortest, 0  # the process itself can make the images
    # Without the small number, a rounding error could turn 8 workers into 9.
    return shortest, max(1, math.ceil(images / shortest - 1e-9))


def _waiting_share(timing: TimingSnapshot) -> float:
    return timing.waiting / max(timing.waiting + timing.working, 1e-9)


def _step_seconds(timing: TimingSnapshot) -> float:
    return (timing.waiting + timing.working) / timing.steps


def _time(seconds: float) -> str:
    # 99.5 ms would be rounded to 1e+02 ms
    return f"{seconds:.2f} s" if seconds >= 0.0995 else f"{1000 * seconds:.2g} ms"
