"""Everything that is decided, and everything that can go wrong, before the first step."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from vitkit.data.augmentation.crop_flip import Augmentation
from vitkit.data.checks.check import drop_or_refuse_unreadable
from vitkit.data.datasets.replacements import with_stand_ins
from vitkit.data.loading.loader import TrainingSteps, sizes_of_epochs
from vitkit.data.loading.sampler import class_counts
from vitkit.data.sources.open import (
    ArraySplit,
    Dataset,
    cached,
    open_dataset,
    show_progress,
    with_validation,
)
from vitkit.devices import resolve_device
from vitkit.distributed import World
from vitkit.errors import SettingError, SpecError, plural
from vitkit.frozen import replace as replaced
from vitkit.models.initialisation import HEADS
from vitkit.models.presets import preset
from vitkit.models.vit import ViT
from vitkit.spec import Channel, Preprocess, ViTSpec
from vitkit.training.check_config import check_settings
from vitkit.training.config.train_config import DEFAULT_MODEL, Settings, TrainConfig
from vitkit.training.distillation.teacher import Teacher, opened_teacher
from vitkit.training.initial_weights import IMAGES, Start, begin, begun, freeze_parts, opened
from vitkit.training.optimization.losses import check_loss
from vitkit.training.recipes import RECIPES, recipe_settings
from vitkit.training.run_folder import resumed_folder
from vitkit.training.state.image_list import restored
from vitkit.training.unused_settings import ends_before, for_several, without_idle

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
        """The plan with settings that a trial has decided."""
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
    _check_against(config, dataset)
    start = begin(dataset.classes)
    _check_head(config, start)
    model = config.model or (None if config.pretrained else DEFAULT_MODEL)
    config = replaced(config, model=model, start=start.facts or None)
    spec, preprocess = start.spec, start.preprocess
    notes += start.notes
    augmentation = Augmentation(
        flip=config.flip, shift=config.shift, crop_scale=config.crop_scale, aa=config.aa,
        color_jitter=config.color_jitter, reprob=config.reprob,
    )  # fmt: skip
    train = dataset.splits["train"]
    steps = TrainingSteps(
        train, preprocess, augmentation, batch_size=_batch_size(config, len(train)),
        seed=config.seed, rank=world.rank, world_size=world.size, balance=config.balance,
        sizes=sizes_of_epochs(config.progressive, config.epochs), cycle=config.distill_views,
        repeats=config.repeated_aug,
    )  # fmt: skip
    _check_warmup(config, steps)
    notes += _notes_on(config, dataset, steps, world)
    cores = max(1, (os.cpu_count() or 1) // world.local_size)
    workers = config.workers
    if workers is None:
        workers = 0 if isinstance(train, ArraySplit) else min(cores, MOST_WORKERS)
    elif workers > cores:
        notes.append(f"{workers} workers on {cores} cores; fewer would be as fast")
    teacher, said = opened_teacher(config, dataset.classes, preprocess, device)
    return Plan(config, dataset, spec, preprocess, steps, device, workers, (*notes, *said),
                start.weights, teacher)  # fmt: skip


def _notes_on(
    config: TrainConfig, dataset: Dataset, steps: TrainingSteps, world: World
) -> list[str]:
    """Lines on settings that do little or nothing here, on balance, and on a recipe."""
    idle = [name for name in ("freeze", "freeze_blocks") if getattr(config, name)]
    if config.layer_decay != TrainConfig.layer_decay:
        idle.append("layer_decay")
    notes = for_several(config, world.size)
    if config.probe is None:
        notes += ends_before(config, config.epochs * steps.steps_per_epoch)
    if idle and config.pretrained is None:
        notes.append(f"{' and '.join(idle)} without --pretrained: the model starts from noise")
    if config.balance:
        notes.append(class_counts(dataset.splits["train"].labels, dataset.classes))
    if config.recipe is None and config.pretrained is None and config.data in RECIPES:
        notes.append(f"there is a recipe for this: --recipe {config.data}")
    return notes


def resolve_defaults(config: TrainConfig) -> tuple[TrainConfig, list[str]]:
    """What nobody asked for suits what somebody asked for; and what is said of that."""
    config, left_out = without_idle(config)
    config, shortened = _in_time(config)
    config, lowered = _below_peak(config)
    return config, left_out + shortened + lowered


def _below_peak(config: TrainConfig) -> tuple[TrainConfig, list[str]]:
    """A rate at the end that nobody asked for is below the peak that somebody asked for."""
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
    """A warm-up that nobody asked for fits into the epochs that somebody asked for."""
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
    """The data, cut and looked through, and what there is to say of them."""
    skip = config.bad_images == "skip"
    # A teacher that was asked about an image has not seen the one that takes its place.
    lasting = with_stand_ins if skip and not (config.teacher or config.probe) else _as_it_is
    dataset = open_dataset(
        config.data,
        data_root=config.data_root,
        ignore_extra_classes=config.ignore_extra_classes,
        follow_links=config.follow_links,
    )
    run = resumed_folder(config.resume, config.output) if goes_on and config.resume else None
    if run is not None and skip and run.images.exists():
        dataset, notes = restored(run.images, dataset)
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
    """How the run begins, once the classes are known: from noise, weights, or a stopped run."""
    if config.pretrained is None:
        spec = _spec(config, 1)
        _check_model(config, spec)
        return lambda classes: _from_noise(config, len(classes))
    if goes_on and (facts := config.start) is not None:
        return lambda _: begun(facts)
    stored = opened(config, _fields(config))
    _check_model(config, stored.model.spec.replace(num_classes=1))
    return lambda classes: begin(stored, classes)


def _from_noise(config: TrainConfig, num_classes: int) -> Start:
    spec = _spec(config, num_classes)
    return Start(spec, _preprocess(config, spec), None, {})


def _check_model(config: TrainConfig, spec: ViTSpec) -> None:
    """What is to be frozen is there, and something is left; every image size is possible."""
    if config.freeze or config.freeze_blocks:
        with torch.device("meta"):
            model = ViT(spec)
            frozen = freeze_parts(model, config)
        if config.pretrained is None and all(
            name in frozen or name.partition(".")[0] in HEADS
            for name, _ in model.named_parameters()
        ):
            raise SettingError(
                f"--freeze {' '.join(config.freeze)} would train a head on features of random "
                f"weights; name trained ones with --pretrained, or leave --freeze out"
            )
    for size in config.progressive:
        try:
            spec.replace(image_size=size)
        except SpecError as error:
            raise SettingError(f"progressive: {error}") from None
    if len(config.progressive) > config.epochs:
        raise SettingError(
            f"progressive names {len(config.progressive)} sizes for "
            f"{plural(config.epochs, 'epoch')}; name fewer, or raise --epochs"
        )


def _check_head(config: TrainConfig, start: Start) -> None:
    """A head of zeros that is frozen lets no gradient through to what is before it."""
    if start.weights is None or not (config.freeze or config.freeze_blocks):
        return
    with torch.device("meta"):
        frozen = freeze_parts(ViT(start.spec), config)
    heads = [name for name in ("head.weight", "head_dist.weight") if name in start.weights]
    if heads and all(name in frozen and not start.weights[name].any() for name in heads):
        raise SettingError(
            f"the head is a new one of zeros and freeze {' '.join(config.freeze)} keeps it so: "
            f"nothing before it would learn; leave the head to train"
        )


def _check_warmup(config: TrainConfig, steps: TrainingSteps) -> None:
    """The warm-up in steps, which are what it is made of."""
    each = steps.steps_per_epoch
    warmup, total = round(config.warmup_epochs * each), config.epochs * each
    if config.warmup_epochs and warmup >= total:
        raise SettingError(
            f"warmup_epochs {config.warmup_epochs:g} are all {plural(total, 'step')} of the run; "
            f"lower it"
        )
    if config.sched == "rsqrt" and not warmup:
        raise SettingError(
            f"sched rsqrt falls as the root of warm-up over step, and warmup_epochs "
            f"{config.warmup_epochs:g} of {plural(each, 'step')} an epoch is none; raise it to "
            f"{1 / each:.2g} or more"
        )


def _check_against(config: TrainConfig, dataset: Dataset) -> None:
    """What the settings ask for must be possible with these data."""
    num_classes = len(dataset.classes)
    asked = config.spec.get("num_classes", num_classes)
    if asked != num_classes:
        raise SettingError(
            f"spec.num_classes {asked} contradicts the data, which has {num_classes} classes; "
            f"leave it out"
        )
    if config.probe and "val" not in dataset.splits:
        raise SettingError("a probe is judged on validation, and there is none; set val_fraction")
    if config.patience is not None and "val" not in dataset.splits:
        raise SettingError(
            f"patience {config.patience} waits for validation, and there is none; set "
            f"val_fraction, or leave patience out"
        )
    mixed = [f"{name} {getattr(config, name):g}" for name in ("mixup", "cutmix")
             if getattr(config, name)]  # fmt: skip
    check_loss(config.loss, num_classes, mixed=" and ".join(mixed) or None)


def _batch_size(config: TrainConfig, images: int) -> int:
    """A probe takes no steps, and a batch that is looked for later is not this one."""
    later = config.probe is not None or config.find_batch_size
    return min(config.batch_size, images) if later else config.batch_size


def _fields(config: TrainConfig) -> dict[str, Any]:
    """The fields of `ViTSpec` that the settings name, but for the classes: data decide those."""
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
    """The preset with every override; the head is as wide as there are classes."""
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
