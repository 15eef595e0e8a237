"""The plan of a run: settings, data, model, steps and device, checked before the first step."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from vitkit.data.augmentation.crop_flip import Augmentation
from vitkit.data.checks.check import drop_or_refuse_unreadable
from vitkit.data.datasets.replacements import with_replacements
from vitkit.data.datasets.split import Split
from vitkit.data.loading.loader import TrainingSteps, sizes_of_epochs
from vitkit.data.loading.sampler import class_counts
from vitkit.data.sources.open import (
    Dataset,
    cached,
    open_dataset,
    show_progress,
    with_validation,
)
from vitkit.devices import resolve_device
from vitkit.distributed import World
from vitkit.errors import SettingError
from vitkit.frozen import replace as replaced
from vitkit.messages import plural
from vitkit.models.presets import preset
from vitkit.spec import Channel, Preprocess, ViTSpec
from vitkit.training.check_config import (
    check_against,
    check_head,
    check_model,
    check_settings,
    check_warmup,
)
from vitkit.training.config.field_types import Settings
from vitkit.training.config.sections.model import DEFAULT_MODEL
from vitkit.training.config.train_config import TrainConfig
from vitkit.training.distillation.teacher import Teacher, load_teacher
from vitkit.training.initial_weights import IMAGES, Start, begin, begun, opened
from vitkit.training.recipes import RECIPES, recipe_settings
from vitkit.training.run_folder import resumed_folder
from vitkit.training.state.image_list import restore_dataset
from vitkit.training.unused_settings import notes_beyond_end, notes_on_processes, reset_unused

MOST_WORKERS = 8


@dataclass(frozen=True)
class Plan:
    """A run that is ready to start.

    Attributes:
        config: the settings, as given.
        dataset: train, val where there is one, test where there is one; every image decodes.
        spec: the model, its head as wide as there are classes.
        preprocess: the evaluation transform, which goes into the checkpoints.
        steps: every training batch of the run.
        device: where the model trains.
        workers: loader processes.
        notes: lines to print before the start.
        weights: what the model starts from, where that is not noise or a stopped run's state.
        teacher: whom the model learns from besides the labels, on the device.
    """

    config: TrainConfig
    dataset: Dataset
    spec: ViTSpec
    preprocess: Preprocess
    steps: TrainingSteps
    device: torch.device
    workers: int
    notes: tuple[str, ...]
    weights: Mapping[str, Tensor] | None = None
    teacher: Teacher | None = None

    @property
    def total_steps(self) -> int:
        """Optimizer steps of the whole schedule."""
        return self.config.epochs * self.steps.steps_per_epoch

    def with_settings(self, found: Settings) -> Plan:
        """Return the plan with the settings that trials chose."""
        steps = self.steps
        if "batch_size" in found:
            steps = steps.with_batch_size(found["batch_size"])
        return replace(self, config=replaced(self.config, **found), steps=steps)

    @property
    def last_step(self) -> int:
        """Where the run ends: the schedule's end, or `max_steps`."""
        return min(self.total_steps, self.config.max_steps or self.total_steps)


def make_plan(config: TrainConfig, world: World | None = None, *, goes_on: bool = False) -> Plan:
    """Open the data, check every image, and build the spec; nothing is written.

    Args:
        config: the settings.
        world: the processes that share the run.
        goes_on: a stopped run has the weights; those it began with are not looked for.

    Raises:
        CheckpointError: weights to start from that cannot be read, or are of another model.
        SettingError: settings that contradict each other.
        SpecError: a model that cannot exist.
        DataError: data that cannot be trained on.
        DeviceError: a device that is not there.
    """
    world = world or World()
    config, left_out = resolve_defaults(config)
    check_settings(config, world.size)
    device = world.device(resolve_device(config.device))
    begin = _beginning(config, goes_on)  # refuses an impossible model before reading any image
    dataset, notes = _opened_data(config, goes_on)
    notes = [*left_out, *notes]
    check_against(config, dataset)
    start = begin(dataset.classes)
    check_head(config, start)
    model = config.model or (None if config.pretrained else DEFAULT_MODEL)
    config = replaced(config, model=model, start=start.facts or None)
    spec, preprocess = start.spec, start.preprocess
    notes += start.notes
    train = dataset.splits["train"]
    steps = _training_steps(config, train, preprocess, world)
    check_warmup(config, steps)
    notes += _notes_on(config, dataset, steps, world)
    workers, crowded = _loader_processes(config, train, world)
    teacher, sight = load_teacher(config, dataset.classes, preprocess, device)
    return Plan(
        config=config,
        dataset=dataset,
        spec=spec,
        preprocess=preprocess,
        steps=steps,
        device=device,
        workers=workers,
        notes=(*notes, *crowded, *sight),
        weights=start.weights,
        teacher=teacher,
    )


def _training_steps(
    config: TrainConfig, train: Split, preprocess: Preprocess, world: World
) -> TrainingSteps:
    augmentation = Augmentation(
        flip=config.flip,
        shift=config.shift,
        crop_scale=config.crop_scale,
        aa=config.aa,
        color_jitter=config.color_jitter,
        reprob=config.reprob,
    )
    return TrainingSteps(
        train,
        preprocess,
        augmentation,
        batch_size=_batch_size(config, len(train)),
        seed=config.seed,
        rank=world.rank,
        world_size=world.size,
        balance=config.balance,
        sizes=sizes_of_epochs(config.progressive, config.epochs),
        cycle=config.distill_views,
        repeats=config.repeated_aug,
    )


def _loader_processes(config: TrainConfig, train: Split, world: World) -> tuple[int, list[str]]:
    """Return the number of loader processes, and a note where it exceeds the cores."""
    cores = max(1, (os.cpu_count() or 1) // world.local_size)
    if config.workers is None:
        return (0 if train.in_memory else min(cores, MOST_WORKERS)), []
    if config.workers > cores:
        return config.workers, [
            f"{config.workers} workers on {cores} cores; fewer would be as fast"
        ]
    return config.workers, []


def _notes_on(
    config: TrainConfig, dataset: Dataset, steps: TrainingSteps, world: World
) -> list[str]:
    """Return notes on settings without effect here, on balance, and on a recipe for the data."""
    idle = [name for name in ("freeze", "freeze_blocks") if getattr(config, name)]
    if config.layer_decay != TrainConfig.layer_decay:
        idle.append("layer_decay")
    notes = notes_on_processes(config, world.size)
    if config.probe is None:
        notes += notes_beyond_end(config, config.epochs * steps.steps_per_epoch)
    if idle and config.pretrained is None:
        notes.append(f"{' and '.join(idle)} without --pretrained: the model starts from noise")
    if config.balance:
        notes.append(class_counts(dataset.splits["train"].labels, dataset.classes))
    if config.recipe is None and config.pretrained is None and config.data in RECIPES:
        notes.append(f"there is a recipe for this: --recipe {config.data}")
    return notes


def resolve_defaults(config: TrainConfig) -> tuple[TrainConfig, list[str]]:
    """Adjust defaults to the settings that were given; return the config and a note per change."""
    config, left_out = reset_unused(config)
    config, shortened = _in_time(config)
    config, lowered = _below_peak(config)
    return config, left_out + shortened + lowered


def _below_peak(config: TrainConfig) -> tuple[TrainConfig, list[str]]:
    """Lower the default final rate below the peak rate that was given."""
    if config.sched == "constant" or config.min_lr <= config.lr:
        return config, []
    usual = recipe_settings(config.recipe).get("min_lr", TrainConfig.min_lr)
    if config.min_lr != usual:
        return config, []
    lower = config.lr / 100
    return replaced(config, min_lr=lower), [
        f"min_lr {usual:g} is lowered to {lower:g}, for this lr"
    ]


def _in_time(config: TrainConfig) -> tuple[TrainConfig, list[str]]:
    """Shorten the default warm-up to fit into the number of epochs that was given."""
    if config.warmup_epochs < config.epochs:
        return config, []
    usual = recipe_settings(config.recipe).get("warmup_epochs", TrainConfig.warmup_epochs)
    if config.warmup_epochs != usual:
        return config, []
    shorter = config.epochs / 10
    said = (
        f"warmup_epochs {usual:g} is shortened to {shorter:g} of {plural(config.epochs, 'epoch')}"
    )
    return replaced(config, warmup_epochs=shorter), [said]


def _opened_data(config: TrainConfig, goes_on: bool) -> tuple[Dataset, list[str]]:
    """Open, split and check the data; return the dataset and notes on it."""
    skip = config.bad_images == "skip"
    # A teacher that was asked about an image has not seen the one that takes its place.
    lasting = with_replacements if skip and not (config.teacher or config.probe) else _as_it_is
    dataset = open_dataset(
        config.data,
        data_root=config.data_root,
        ignore_extra_classes=config.ignore_extra_classes,
        follow_links=config.follow_links,
    )
    run = resumed_folder(config.resume, config.output) if goes_on and config.resume else None
    if run is not None and skip and run.images.exists():
        dataset, notes = restore_dataset(run.images, dataset)
        return lasting(dataset), [*dataset.notes, *notes]
    if config.cache is not None:
        folder = None if config.cache == "auto" else config.cache
        dataset = cached(dataset, folder, progress=None if config.quiet else show_progress)
    has_val = "val" in dataset.splits
    if config.val_fraction > 0:
        dataset = with_validation(dataset, config.val_fraction)  # first: then leaks are looked for
    dataset, report = drop_or_refuse_unreadable(dataset, config.bad_images)
    notes = [*report.notes, *report.warnings()]
    if has_val and config.val_fraction not in (0, TrainConfig.val_fraction):
        notes.append(
            f"val_fraction {config.val_fraction:g} without effect: the data have a val split"
        )
    for split, problems in report.problems.items():
        notes += [f"skipped {plural(len(problems), 'image')} of {split} that cannot be decoded:"]
        notes += [f"  {problem.name}: {problem.reason}: {problem.detail}" for problem in problems]
    return lasting(dataset), notes


def _as_it_is(dataset: Dataset) -> Dataset:
    return dataset


def _beginning(config: TrainConfig, goes_on: bool) -> Callable[[Sequence[str]], Start]:
    """Return a function from the classes to the initial weights: random, loaded, or resumed."""
    if config.pretrained is None:
        spec = _spec(config, 1)
        check_model(config, spec)
        return lambda classes: _from_noise(config, len(classes))
    if goes_on and (facts := config.start) is not None:
        return lambda _: begun(facts)
    stored = opened(config, _fields(config))
    check_model(config, stored.model.spec.replace(num_classes=1))
    return lambda classes: begin(stored, classes)


def _from_noise(config: TrainConfig, num_classes: int) -> Start:
    spec = _spec(config, num_classes)
    return Start(spec, _preprocess(config, spec), None, {})


def _batch_size(config: TrainConfig, images: int) -> int:
    """Return the batch size; a probe or a later search must not be refused for small data."""
    later = config.probe is not None or config.find_batch_size
    return min(config.batch_size, images) if later else config.batch_size


def _fields(config: TrainConfig) -> dict[str, Any]:
    """Return the fields of `ViTSpec` in the settings; the data decide the number of classes."""
    overrides = {name: value for name, value in config.spec.items() if name != "num_classes"}
    last = config.progressive[-1] if config.progressive else None
    for flag, field, value in (
        ("img_size", "image_size", config.img_size),
        ("progressive ends with", "image_size", last),
        ("drop_path", "drop_path", config.drop_path),
    ):
        if value is not None:
            if overrides.get(field, value) not in (value, (value, value), [value, value]):
                raise SettingError(
                    f"{flag} {value} contradicts spec.{field} {overrides[field]}; pass one of them"
                )
            overrides[field] = value
    return overrides


def _spec(config: TrainConfig, num_classes: int) -> ViTSpec:
    """Build the spec of the preset with every override and a head of `num_classes`."""
    return preset(config.model or DEFAULT_MODEL, num_classes=num_classes, **_fields(config))


def _preprocess(config: TrainConfig, spec: ViTSpec) -> Preprocess:
    channels = spec.in_channels
    half: Channel = (0.5,) if channels == 1 else (0.5, 0.5, 0.5)
    mean, std = config.mean or half, config.std or half
    if len(mean) != channels or len(std) != channels:
        raise SettingError(
            f"mean {mean} and std {std} must have {channels} values, one a channel of the model"
        )
    named = {name: getattr(config, name) for name in IMAGES if getattr(config, name) is not None}
    return Preprocess(image_size=spec.image_size, mean=mean, std=std, **named)
