"""What a run waits for, and what would help: measured on its own images, not guessed.

A step costs core-seconds of the model's on this machine, and so many an image to decode, resize
and augment. With N cores no step is shorter than all of that over N, nor than the model alone; as
many workers as keep that pace are enough.
"""

from __future__ import annotations

import math
import os
import time
from dataclasses import dataclass

import numpy as np

from vitkit.data.augmentation.crop_flip import augment_batch, training_pixels
from vitkit.data.loading.loader import TrainingSteps
from vitkit.training.monitoring.throughput import TimingSnapshot

AFTER = 30
"""Steps after which a run says what it waits for."""
WARM_UP = 5
"""Steps before those that count: the first ones wait for processes to start."""
NOTICED = 0.1
"""Waiting below this part of the time is not worth a word, nor is a gain below it."""
LOOKED_AT = 16
"""Images that are timed."""


@dataclass(frozen=True)
class ImageCost:
    """Core-seconds that one image takes, on average."""

    decode: float
    resize: float
    augment: float

    @property
    def total(self) -> float:
        """All three."""
        return self.decode + self.resize + self.augment


@dataclass(frozen=True)
class Machine:
    """Attributes: cores: for this process and its workers; accelerator: the model is elsewhere."""

    cores: int
    workers: int
    accelerator: bool = False


def image_cost(steps: TrainingSteps, step: int) -> ImageCost:
    """Make a few of the images of a step here, and time it by this thread's own clock."""
    indices, epoch = steps.indices(step)[:LOOKED_AT], step // steps.steps_per_epoch
    decode = resize = 0.0
    made = []
    for index in map(int, indices):
        began = time.thread_time()
        image = steps.split.read(index)
        decoded = time.thread_time()
        made.append(
            training_pixels(image, steps.preprocess, steps.augmentation, steps.seed, epoch, index)
        )
        decode += decoded - began
        resize += time.thread_time() - decoded
    began = time.thread_time()
    augment_batch(np.stack(made), steps.augmentation, steps.seed, epoch, indices)
    augment = time.thread_time() - began
    return ImageCost(decode / len(made), resize / len(made), augment / len(made))


def is_waiting(pace: TimingSnapshot) -> bool:
    """Whether a run waits for images so long that it is worth looking for a cure."""
    return _share(pace) >= NOTICED


def diagnosis(pace: TimingSnapshot, cost: ImageCost | None, machine: Machine) -> str:
    """One line: what waits for what, and what would help.

    Args:
        pace: of the steps looked at.
        cost: of an image, where the run waits for images.
        machine: what there is to do the work.
    """
    step = _step(pace)
    if cost is None:
        return (
            f"after {AFTER} steps: {_time(step)} a step, {_share(pace):.0%} of it waiting for "
            f"images; the model sets the pace"
        )
    return (
        f"after {AFTER} steps: {_share(pace):.0%} of the time waits for images "
        f"({_time(pace.waiting / pace.steps)} of {_time(step)} a step); an image takes "
        f"{_time(cost.decode)} to decode, {_time(cost.resize)} to resize, {_time(cost.augment)} to "
        f"augment; {_cure(pace, cost, machine)}"
    )


def _cure(pace: TimingSnapshot, cost: ImageCost, machine: Machine) -> str:
    now, images = _step(pace), cost.total * pace.images / pace.steps
    if not machine.workers:  # then they are made while the step waits, and that was timed
        images = pace.waiting / pace.steps
    shortest, workers = _reachable(pace, images, machine)
    cures = []
    if shortest < (1 - NOTICED) * now and workers > machine.workers:
        cures.append(f"--workers {workers} would bring a step to about {_time(shortest)}")
    without, fewer = _reachable(pace, images * (1 - cost.decode / cost.total), machine)
    if without < (1 - NOTICED) * (shortest if cures else now) and cost.decode > 0:
        also = f" with --workers {fewer}" if fewer > machine.workers else ""
        cures.append(f"--cache{also}, which saves decoding, to about {_time(without)}")
    if cures:
        return ", ".join(cures)
    if shortest < (1 - NOTICED) * now:
        return "the cores are not busy: the disk or the network is the brake"
    counted = "core is" if machine.cores == 1 else f"{machine.cores} cores are"
    return f"the {counted} busy all the time: no number of workers would help"


def _reachable(pace: TimingSnapshot, images: float, machine: Machine) -> tuple[float, int]:
    """Seconds of the shortest step, and the workers that it needs.

    `images` is core-seconds a step.
    """
    model, alone = pace.cores / pace.steps, pace.working / pace.steps
    if not machine.accelerator:
        model = max(model, alone)  # less means that others took cores from it ...
        if machine.workers:
            alone = model / machine.cores  # ... as workers do
    shortest = max(alone, (model + images) / machine.cores)
    if alone + images <= (1 + NOTICED) * shortest:
        return shortest, 0  # one after the other is as fast
    return shortest, max(1, math.ceil(images / shortest - 1e-9))


def _share(pace: TimingSnapshot) -> float:
    return pace.waiting / max(pace.waiting + pace.working, 1e-9)


def _step(pace: TimingSnapshot) -> float:
    return (pace.waiting + pace.working) / pace.steps


def _time(seconds: float) -> str:
    return f"{seconds:.2f} s" if seconds >= 0.1 else f"{1000 * seconds:.2g} ms"


def cores_here() -> int:
    """Cores that this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
