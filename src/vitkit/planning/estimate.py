"""The numbers of `vitkit plan`: every way to run a training on some devices, side by side."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, replace

from vitkit.errors import SettingError
from vitkit.planning.hardware import Hardware
from vitkit.planning.memory import Memory, Parallel, Training, largest_batch, training_memory
from vitkit.planning.throughput import Rates, StepTime, step_time

DAY = 86_400
"""Seconds of a day."""


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """The images of a run.

    Attributes:
        batch_size: images of a step on all devices.
        images: of the training split.
        epochs: passes over them.
    """

    batch_size: int
    images: int
    epochs: int


@dataclass(frozen=True, kw_only=True)
class Way:
    """One way to run a training.

    Attributes:
        parallel: `ddp` or `fsdp`; with one device there is no difference.
        recompute: with activation checkpointing of whole blocks.
        memory: of one device, in bytes.
        fits: whether the peak is within what the device has.
        largest_batch: the most images of a step on all devices that fit; 0 if not one.
        step: seconds of a step on each device.
        images_per_second: of all devices.
        days: of the whole schedule.
    """

    parallel: Parallel
    recompute: bool
    memory: Memory
    fits: bool
    largest_batch: int
    step: StepTime
    images_per_second: float
    days: float


def estimates(
    training: Training,
    schedule: Schedule,
    device: Hardware,
    rates: Rates,
    *,
    ways: tuple[Parallel, ...] = ("ddp", "fsdp"),
    recompute: tuple[bool, ...] = (False, True),
    compiled: bool = False,
) -> list[Way]:
    """Return the memory and time of every combination of `ways` and `recompute`.

    Args:
        training: the settings of the run; its own `parallel` and `recompute` are replaced.
        schedule: the images of the run.
        device: of which there are `training.devices`.
        rates: of one device.
        ways: how several devices share a step.
        recompute: activation checkpointing, off and on.
        compiled: the step is compiled.

    Raises:
        SettingError: a batch that cannot be divided among the devices.
    """
    check_batch(schedule.batch_size, training.devices)
    images = schedule.batch_size // training.devices
    made = []
    for way in _combinations(training, ways, recompute):
        memory = training_memory(way, images)
        link = device.link_between(way.devices)
        step = step_time(way, images, rates, link=link, compiled=compiled)
        speed = schedule.batch_size / step.total
        made.append(
            Way(
                parallel=way.parallel,
                recompute=way.recompute,
                memory=memory,
                fits=memory.peak <= device.available,
                largest_batch=largest_batch(way, device.available) * way.devices,
                step=step,
                images_per_second=speed,
                days=schedule.images * schedule.epochs / speed / DAY,
            )
        )
    return made


def check_batch(batch_size: int, devices: int) -> None:
    """Refuse a batch that does not give every device the same number of images.

    Raises:
        SettingError: no images, no devices, or no whole number for each.
    """
    if devices < 1:
        raise SettingError(f"--gpus {devices}: must be 1 or more")
    if batch_size < 1:
        raise SettingError(f"--batch-size {batch_size}: must be 1 or more")
    if batch_size % devices:
        below = batch_size // devices * devices
        near = f"{below} or {below + devices}" if below else str(devices)
        raise SettingError(
            f"--batch-size {batch_size}: must be divisible by --gpus {devices}, as it is the "
            f"images of a step on all of them; the nearest: {near}"
        )


def _combinations(
    training: Training, ways: tuple[Parallel, ...], recompute: tuple[bool, ...]
) -> Iterator[Training]:
    if training.devices == 1:
        ways = ("ddp",)
    for way, again in itertools.product(ways, recompute):
        yield replace(training, parallel=way, recompute=again)
