"""Everything that is decided, and everything that can go wrong, before the first step."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

import torch

from vitkit.data.augment import Augmentation
from vitkit.data.doctor import sound
from vitkit.data.loader import TrainingSteps
from vitkit.data.sources import (
    ArraySplit,
    Dataset,
    cached,
    open_dataset,
    show_progress,
    with_validation,
)
from vitkit.devices import resolve_device
from vitkit.errors import SettingError
from vitkit.models.presets import preset
from vitkit.spec import Channel, Preprocess, ViTSpec
from vitkit.training.config import TrainConfig
from vitkit.training.distributed import World
from vitkit.training.recipes import RECIPES

MOST_WORKERS = 8


@dataclass(frozen=True)
class Plan:
    """A run that is ready to start.

    Attributes:
        config: the settings, as given.
        dataset: train, val where there is one, test where there is one; every picture decodes.
        spec: the model, its head as wide as there are classes.
        preprocess: the evaluation transform, which goes into the checkpoints.
        steps: every training batch of the run.
        device: where the model trains.
        workers: loader processes.
        notes: lines to print before the start.
    """

    config: TrainConfig
    dataset: Dataset
    spec: ViTSpec
    preprocess: Preprocess
    steps: TrainingSteps
    device: torch.device
    workers: int
    notes: tuple[str, ...]

    @property
    def total_steps(self) -> int:
        """Optimizer steps of the whole schedule."""
        return self.config.epochs * self.steps.steps_per_epoch

    @property
    def last_step(self) -> int:
        """Where the run ends: the schedule's end, or `max_steps`."""
        return min(self.total_steps, self.config.max_steps or self.total_steps)


def make_plan(config: TrainConfig, world: World | None = None) -> Plan:
    """Open the data, check every picture, and build the spec; nothing is written.

    Raises:
        SettingError: settings that contradict each other.
        SpecError: a model that cannot exist.
        DataError: data that cannot be trained on.
        DeviceError: a device that is not there.
    """
    world = world or World()
    _check_settings(config)
    _check_shares(config, world.size)
    device = world.device(resolve_device(config.device))
    spec = _spec(config, num_classes=1)  # refuses an impossible model before reading any picture
    dataset = open_dataset(
        config.data,
        data_root=config.data_root,
        ignore_extra_classes=config.ignore_extra_classes,
        follow_links=config.follow_links,
    )
    if config.cache is not None:
        folder = None if config.cache == "auto" else config.cache
        dataset = cached(dataset, folder, progress=None if config.quiet else show_progress)
    dataset, report = sound(dataset, config.bad_images)
    notes = [*report.notes, *report.warnings()]
    for split, problems in report.problems.items():
        notes += [f"skipped {len(problems)} pictures of {split} that cannot be decoded:"]
        notes += [f"  {problem.name}: {problem.reason}: {problem.detail}" for problem in problems]
    if config.val_fraction > 0:
        dataset = with_validation(dataset, config.val_fraction)
    spec = _spec(config, num_classes=len(dataset.classes))
    preprocess = _preprocess(config, spec)
    augmentation = Augmentation(flip=config.flip, shift=config.shift, crop_scale=config.crop_scale)
    train = dataset.splits["train"]
    steps = TrainingSteps(
        train, preprocess, augmentation, batch_size=config.batch_size, seed=config.seed,
        rank=world.rank, world_size=world.size,
    )  # fmt: skip
    if config.recipe is None and config.data in RECIPES:
        notes.append(f"there is a recipe for this: --recipe {config.data}")
    cores = max(1, (os.cpu_count() or 1) // world.local_size)
    in_memory = isinstance(train, ArraySplit)
    workers = config.workers
    if workers is None:
        workers = 0 if in_memory else min(cores, MOST_WORKERS)
    elif workers > cores:
        notes.append(f"{workers} workers on {cores} cores; fewer would be as fast")
    return Plan(config, dataset, spec, preprocess, steps, device, workers, tuple(notes))


def _check_settings(config: TrainConfig) -> None:
    if config.min_lr > config.lr:
        raise SettingError(f"min_lr {config.min_lr:g} is above lr {config.lr:g}; lower it")
    if config.warmup_epochs >= config.epochs:
        raise SettingError(
            f"warmup_epochs {config.warmup_epochs:g} leaves nothing of {config.epochs} epochs; "
            f"lower it below {config.epochs}"
        )
    if config.resume is not None and config.overwrite:
        raise SettingError("--resume goes on with a run and --overwrite starts afresh; pass one")


def _check_shares(config: TrainConfig, processes: int) -> None:
    """Every process and accumulation step must have as many pictures as any other."""
    batch, parts = config.batch_size, config.grad_accum_steps
    if batch % parts:
        allowed = [n for n in range(1, batch + 1) if batch % n == 0]
        raise SettingError(
            f"grad_accum_steps {parts} does not divide batch_size {batch}; take one of "
            f"{', '.join(map(str, allowed))}"
        )
    if batch % (parts * processes):
        allowed = [n for n in range(1, batch // parts + 1) if batch % (parts * n) == 0]
        below = batch // (parts * processes) * parts * processes
        sizes = [size for size in (below, below + parts * processes) if size]
        raise SettingError(
            f"batch_size {batch} does not divide by {processes} processes x {parts} accumulation "
            f"steps; take {' or '.join(map(str, sizes))}, or one of "
            f"{', '.join(map(str, allowed))} processes"
        )
    if config.parallel == "fsdp" and config.opt == "muon" and processes > 1:
        raise SettingError("opt muon needs whole matrices and parallel fsdp splits them; take ddp")


def _spec(config: TrainConfig, num_classes: int) -> ViTSpec:
    """The preset with every override; the head is as wide as there are classes."""
    overrides: dict[str, Any] = dict(config.spec)
    for flag, field in (("img_size", "image_size"), ("drop_path", "drop_path")):
        value = getattr(config, flag)
        if value is not None:
            if overrides.get(field, value) not in (value, (value, value), [value, value]):
                raise SettingError(
                    f"{flag} {value} contradicts spec.{field} {overrides[field]}; pass one of them"
                )
            overrides[field] = value
    asked = overrides.pop("num_classes", num_classes)
    if num_classes > 1 and asked != num_classes:
        raise SettingError(
            f"spec.num_classes {asked} contradicts the data, which has {num_classes} classes; "
            f"leave it out"
        )
    return preset(config.model, num_classes=num_classes, **overrides)


def _preprocess(config: TrainConfig, spec: ViTSpec) -> Preprocess:
    channels = spec.in_channels
    half: Channel = (0.5,) if channels == 1 else (0.5, 0.5, 0.5)
    mean, std = config.mean or half, config.std or half
    if len(mean) != channels or len(std) != channels:
        raise SettingError(
            f"mean {mean} and std {std} must have {channels} values, one a channel of the model"
        )
    return Preprocess(
        image_size=spec.image_size,
        mean=mean,
        std=std,
        interpolation=config.interpolation,
        fit=config.fit,
        crop_ratio=config.crop_ratio,
    )
