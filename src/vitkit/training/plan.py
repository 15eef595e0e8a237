"""From settings to `Plan`: the data, model, batches and step of a run; wrong settings end here."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn, optim

from vitkit import devices, distributed, errors, frozen, messages, process, shapes
from vitkit.data.augmentation.mixing import Mixing
from vitkit.data.augmentation.pipeline import BatchTransform
from vitkit.data.checks.check import Report, drop_or_refuse_unreadable
from vitkit.data.checks.check import with_corrections as relabel
from vitkit.data.datasets import pixel_cache, splitting
from vitkit.data.datasets.dataset import Dataset
from vitkit.data.datasets.split import LabelChanges, Split, read_label_changes
from vitkit.data.loading import crop_flip, loader
from vitkit.data.sources.open import open_dataset
from vitkit.spec import Preprocess, ViTSpec
from vitkit.training import checks, recipes, run_folder
from vitkit.training.config import contradictions, meaning
from vitkit.training.config.train_config import DataSettings, RunConfig, TrainConfig
from vitkit.training.initial_weights import initial_weights, load_initial
from vitkit.training.optimization import losses, parameters
from vitkit.training.optimization.precision import Precision
from vitkit.training.recipes.defaults import chooses_model, decide_settings
from vitkit.training.step import Objective, TrainingStep, Transform

if TYPE_CHECKING:
    from vitkit.training.distillation import Teacher

# Distillation is imported in the functions that need it: few runs have a teacher.

MOST_WORKERS = 8
"""Loader processes of each process by default, at most."""


@dataclass(frozen=True)
class Plan:
    """The resolved inputs of a run.

    Attributes:
        config: the settings with all defaults resolved; `auto` stays until the trials.
        dataset: train, val where there is one, test where there is one; every image decodes.
        spec: the model, its head as wide as there are classes.
        preprocess: the evaluation transform, which goes into the checkpoints.
        steps: every training batch of the run.
        device: where the model trains.
        workers: loader processes.
        notes: lines to print before the start.
        weights: initial weights; None for random ones, and for a resumed run, whose state
            has them.
        teacher: a model to learn from besides the labels, on the device.
        check: the report of the check of the images; None where they were not checked.
    """

    config: RunConfig
    dataset: Dataset
    spec: ViTSpec
    preprocess: Preprocess
    steps: loader.TrainingSteps
    device: torch.device
    workers: int
    notes: tuple[str, ...]
    weights: Mapping[str, Tensor] | None = None
    teacher: Teacher | None = None
    check: Report | None = None

    @property
    def total_steps(self) -> int:
        """Optimizer steps of the whole schedule."""
        return self.config.epochs * self.steps.steps_per_epoch

    @property
    def last_step(self) -> int:
        """Where the run ends: the schedule's end, or `max_steps`."""
        # a run that is resumed with fewer epochs may end before an earlier `max_steps`
        return min(self.total_steps, self.config.max_steps or self.total_steps)

    @property
    def precision(self) -> Precision:
        """The precision of the steps, once it is decided; a probe computes in float32."""
        amp = self.config.amp
        if self.config.probe is not None:
            return "off"
        # `tune_settings` replaces `auto` before a run is built
        assert amp != "auto", "the precision is decided before any step"
        return amp

    def end_in_words(self, step: int) -> str:
        """Return the planned length of the run, in words.

        Args:
            step: the steps done; more than planned for a finished run that is resumed with fewer.
        """
        epochs, rest = divmod(step, self.steps.steps_per_epoch)
        if rest or step < self.total_steps:
            return messages.plural(step, "step")
        if epochs == 1:
            return "1 epoch"
        return f"all {epochs} epochs"

    def learning_rate(self, step: int) -> float:
        """Return the learning rate of a step, counted from 0."""
        return parameters.learning_rate(
            step,
            schedule=self.config.sched,
            peak=self.config.lr,
            low=self.config.min_lr,
            warmup=round(self.config.warmup_epochs * self.steps.steps_per_epoch),
            total=self.total_steps,
        )

    def with_settings(self, settings: meaning.Settings) -> Plan:
        """Return the plan with other settings, such as the results of tuning."""
        return replace(self, config=replace(self.config, **settings))


def make_plan(
    config: TrainConfig, world: distributed.ProcessGroup | None = None, *, resumes: bool = False
) -> Plan:
    """Open the data, check every image, and build the spec; nothing is written.

    Args:
        config: the settings; those of a resumed run have their defaults resolved.
        world: the processes that share the run.
        resumes: a resumed run has its weights, so the initial ones are not needed.

    Raises:
        CheckpointError: weights to start from that cannot be read, or are of another model.
        SettingError, SpecError: settings that contradict each other, a model that cannot exist.
        DataError: data that cannot be trained on.
        DeviceError: a device that is not there.
    """
    world, notes, recipe = world or distributed.ProcessGroup(), list[str](), meaning.Settings()
    if not resumes:
        recipe = recipes.recipe_settings(config.recipe)
        config, notes = contradictions.resolve_defaults(config, recipe)
    contradictions.check_contradictions(config, world.size)
    checks.check_installed(config)
    device = world.device(devices.resolve_device(config.device))
    # an impossible model is refused before any image is read
    opened = None if chooses_model(config) else load_initial(config, resumes=resumes)
    dataset, data_notes, check = open_training_data(config, resumes=resumes)
    checks.check_data(config, dataset)
    decided, chosen = decide_settings(config, dataset, world.size)
    contradictions.check_contradictions(decided, world.size)
    start = initial_weights(decided, opened, dataset.classes, resumes=resumes)
    checks.check_model(decided, start)
    steps = _training_steps(decided, dataset.splits["train"], start.preprocess, world)
    checks.check_warmup(decided, steps.steps_per_epoch)
    workers, worker_notes = _loader_processes(config.workers, steps.split, world)
    notes += [*data_notes, *start.notes, *worker_notes]
    notes += contradictions.notes_on_settings(
        decided, world.size, decided.epochs * steps.steps_per_epoch
    )
    notes += [] if resumes else checks.notes_on_recipe(decided, recipe, start.spec, steps.split)
    if config.balance:
        notes.append(loader.class_counts(steps.split.labels, dataset.classes))
    teacher = None
    if config.teacher is not None:  # last, as it may take long to load
        from vitkit.training.distillation import as_teacher

        teacher = as_teacher(config.teacher, "--teacher", trust_pickle=config.trust_pickle)
        teacher, teacher_notes = teacher.for_classes(dataset.classes, start.preprocess, device)
        notes += teacher_notes
    threads = config.threads or torch.get_num_threads()
    return Plan(
        config=replace(decided, start=start.facts or None, threads=threads),
        dataset=dataset,
        spec=start.spec,
        preprocess=start.preprocess,
        steps=steps,
        device=device,
        workers=workers,
        notes=(*notes, *filter(None, [chosen])),
        weights=start.weights,
        teacher=teacher,
        check=check,
    )


def make_step(
    plan: Plan,
    model: nn.Module,
    optimizer: optim.Optimizer,
    transform: Transform | None = None,
    *,
    compile: bool = False,
    world: distributed.ProcessGroup | None = None,
    stop: process.StopFlag | None = None,
) -> TrainingStep:
    """Build the step of a run around its model and the optimizer of the model's parameters.

    Args:
        plan: the run.
        model: on the plan's device.
        optimizer: over the model's parameters.
        transform: makes the inputs of the model; default the augmentation of the run, with the
            targets of its teacher if it has one.
        compile: as for `TrainingStep`.
        world: the processes of the run.
        stop: set by a signal.
    """
    config = plan.config
    loss = losses.make_loss(
        config.loss, smoothing=config.label_smoothing, threshold=config.bce_threshold
    )
    if ":" in config.loss:
        loss = _named_in_errors(loss, config.loss)
    objective = Objective(model, loss, plan.precision, plan.device)
    if plan.teacher is not None:
        from vitkit.training.distillation import Distillation, DistillingObjective, TeacherTargets

        distillation = Distillation(
            temperature=config.distill_temperature,
            alpha=config.distill_alpha,
            hard=config.distill == "hard",
        )
        objective = DistillingObjective(objective, distillation)
        transform = TeacherTargets(
            plan.teacher,
            distillation,
            make_transform(plan),
            plan.preprocess,
            plan.precision,
            source=str(config.teacher),
        )
    return TrainingStep(
        objective,
        optimizer,
        transform or make_transform(plan),
        accumulate=config.grad_accum_steps,
        clip=config.clip_grad,
        seed=config.seed,
        compile=compile,
        world=world,
        stop=stop,
    )


def _named_in_errors(loss: shapes.Loss, name: str) -> shapes.Loss:
    """Wrap a user's loss, so that its errors are `UserCodeError` and name it."""

    def call(logits: shapes.Logits, targets: shapes.Targets) -> Tensor:
        try:
            return loss(logits, targets)
        except Exception as error:  # a function of the user may raise anything
            # errors of vitkit have their message, and out-of-memory is handled elsewhere
            if isinstance(error, errors.VitkitError) or devices.is_out_of_memory(error):
                raise
            raise errors.UserCodeError.raised_by(f"the loss {name}", error, "in a step") from error

    return call


# The augmentation of a run, and its training batches.


def _augmentation_of(config: RunConfig) -> crop_flip.Augmentation:
    """Return the random changes to the training images of a run: the settings of these names."""
    return crop_flip.Augmentation(
        **{name: getattr(config, name) for name in frozen.field_names(crop_flip.Augmentation)}
    )


def make_transform(plan: Plan) -> BatchTransform:
    """Build the transform from a batch of the run to the model's images and targets."""
    config = plan.config
    mixing = None
    if config.mixup > 0 or config.cutmix > 0:
        # in steps; 0: mixing never stops
        off = config.mixup_off_epoch * plan.steps.steps_per_epoch
        mixing = Mixing(
            num_classes=plan.spec.num_classes,
            mixup=config.mixup,
            cutmix=config.cutmix,
            prob=config.mixup_prob,
            switch_prob=config.mixup_switch_prob,
            until=off or None,
            seed=config.seed,
        )
    return BatchTransform(
        plan.preprocess, plan.device, _augmentation_of(config), mixing, seed=config.seed
    )


def _training_steps(
    config: RunConfig, train: Split, preprocess: Preprocess, world: distributed.ProcessGroup
) -> loader.TrainingSteps:
    """Return every training batch of the run, of which this process loads its part."""
    batch_size = config.batch_size
    if config.probe is not None:  # it makes no steps, so small data are not refused
        batch_size = min(batch_size, len(train))
    return loader.TrainingSteps(
        train,
        preprocess,
        _augmentation_of(config),
        batch_size=batch_size,
        seed=config.seed,
        rank=world.rank,
        world_size=world.size,
        balance=config.balance,
        sizes=loader.sizes_of_epochs(config.progressive, config.epochs),
        repeats=config.repeated_aug,
        fill=config.last_batch == "fill",
        transform=checks.user_transform(config),
    )


def _loader_processes(
    workers: int | None, train: Split, world: distributed.ProcessGroup
) -> tuple[int, list[str]]:
    """Return the number of loader processes, and a note where it exceeds the cores."""
    cores = max(1, process.available_cores() // world.local_size)
    if workers is None:
        # images in memory take longer to send to another process than to read
        return (0 if train.in_memory else min(cores, MOST_WORKERS)), []
    process.check_processes("workers", workers)
    if workers > cores:
        return workers, [
            f"--workers {workers} on {messages.plural(cores, 'core')}: fewer would be as fast"
        ]
    return workers, []


# The data of a run: opened, split and checked.


def open_training_data(
    config: TrainConfig, *, resumes: bool = False
) -> tuple[Dataset, list[str], Report | None]:
    """Open, split and check the data.

    Args:
        config: the settings.
        resumes: the run that `config` names is resumed, with the labels that it began with.

    Returns:
        The dataset, whose images can all be decoded, notes on it, and the report of its check; None
        where images in memory were not checked.

    Raises:
        DataError: data that cannot be trained on, or corrected labels of other data.
        SettingError: a validation fraction that the data leave no room for.
    """
    changes, change_notes = _label_changes(config, resumes=resumes)
    dataset = open_dataset(
        config.data,
        data_root=config.data_root,
        ignore_extra_classes=config.ignore_extra_classes,
        follow_links=config.follow_links,
    )
    fraction = config.val_fraction
    # a pool too small for a validation split has none, and its train split is divided again
    if dataset.cut and "val" in dataset.splits and fraction != DataSettings.val_fraction:
        shares = ", ".join(
            f"{share:.0%} {name}" for name, share in splitting.POOL_FRACTIONS.items()
        )
        raise errors.SettingError(
            f"--val-fraction {fraction:g} has no effect on {dataset.name}: the data have no splits "
            f"and are always divided into {shares}; leave it out, or put the training images into "
            "a train split"
        )
    dataset, notes, report = _checked(dataset, config, changes)
    return dataset, [*notes, *change_notes], report


def _label_changes(config: TrainConfig, *, resumes: bool) -> tuple[LabelChanges | None, list[str]]:
    """Return the corrected labels (of a resumed run, its own copy) and notes on them."""
    file = config.relabel
    if file is None:
        return None, []
    folder = (
        run_folder.resumed_folder(config.resume, config.output)
        if resumes and config.resume
        else None
    )
    if folder is None:
        return read_label_changes(file), []
    kept = read_label_changes(folder.relabel)
    # `Path.expanduser` raises for an unknown user
    is_gone = not os.path.exists(os.path.expanduser(file))
    if is_gone or read_label_changes(file).digest == kept.digest:
        return kept, []
    return kept, [
        f"{file} has changed since the run began, which continues with the labels in "
        f"{folder.relabel}; start afresh to train with the new ones"
    ]


def _checked(
    dataset: Dataset, settings: TrainConfig, changes: LabelChanges | None
) -> tuple[Dataset, list[str], Report | None]:
    """Cut the validation split where there is none, correct labels, and check every image."""
    if settings.cache is not None:
        folder = None if settings.cache == "auto" else settings.cache
        dataset = pixel_cache.cached(dataset, folder)
    has_val = "val" in dataset.splits
    if settings.val_fraction > 0:
        # before the check, which then also finds copies across this cut
        dataset = splitting.with_validation(dataset, settings.val_fraction)
    if changes is not None:
        # after the cut, so that the run validates on the images of a run without corrections
        dataset = relabel(dataset, changes)
    dataset, report = drop_or_refuse_unreadable(dataset, settings.bad_images)
    notes = [*report.notes, *report.warnings()]
    if has_val and not dataset.cut and settings.val_fraction != DataSettings.val_fraction:
        notes.append(
            f"--val-fraction {settings.val_fraction:g} has no effect: the data have a val split"
        )
    for split, problems in report.problems.items():
        notes += [
            f"skipped {messages.plural(len(problems), 'image')} of {split} that cannot be decoded:"
        ]
        notes += [f"  {problem.name}: {problem.reason}: {problem.detail}" for problem in problems]
    is_whole = not any(split.in_memory for split in dataset.splits.values())
    return dataset, notes, report if is_whole else None
