"""From settings to `Plan`: the data, model, batches and step of a run; wrong settings end here."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor, nn, optim

from vitkit.data.augmentation.mixing import Mixing
from vitkit.data.augmentation.pipeline import BatchTransform, UserTransform
from vitkit.data.checks.check import Report, drop_or_refuse_unreadable
from vitkit.data.checks.check import with_corrections as relabel
from vitkit.data.datasets.dataset import Dataset
from vitkit.data.datasets.pixel_cache import cached, show_progress
from vitkit.data.datasets.split import LabelChanges, Split, read_label_changes
from vitkit.data.datasets.splitting import POOL_FRACTIONS, with_validation
from vitkit.data.loading.batch import class_counts, sizes_of_epochs
from vitkit.data.loading.crop_flip import Augmentation
from vitkit.data.loading.loader import TrainingSteps
from vitkit.data.sources.open import open_dataset
from vitkit.devices import is_out_of_memory, resolve_device
from vitkit.distributed import ProcessGroup
from vitkit.errors import SettingError, UserCodeError, VitkitError
from vitkit.messages import plural
from vitkit.process import StopFlag, available_cores
from vitkit.shapes import Logits, Loss, Targets
from vitkit.spec import Preprocess, ViTSpec
from vitkit.training.config.data_settings import DataSettings, DistillationSettings
from vitkit.training.config.meaning import Settings
from vitkit.training.config.passed_objects import resume_command
from vitkit.training.config.train_config import RunConfig, TrainConfig
from vitkit.training.distillation import (
    Distillation,
    DistillingObjective,
    Teacher,
    TeacherTargets,
    as_teacher,
)
from vitkit.training.optimization.losses import make_loss
from vitkit.training.optimization.parameters import learning_rate
from vitkit.training.optimization.precision import Precision
from vitkit.training.run_folder import RunFolder, resumed_folder
from vitkit.training.setup.checks import check_settings, check_steps, import_transform
from vitkit.training.setup.defaults import chooses_model, decide_settings
from vitkit.training.setup.initial_weights import (
    InitialWeights,
    from_checkpoint,
    from_stored,
    load_initial,
    preset_spec,
    random_weights,
    spec_fields,
)
from vitkit.training.setup.model_and_data import (
    check_data,
    check_head,
    check_model,
    check_warmup,
    note_on_colours,
)
from vitkit.training.setup.unused_settings import notes_on_settings, resolve_defaults
from vitkit.training.state.data_record import restore_labels
from vitkit.training.step import Objective, TrainingStep, Transform

# `Plan`: the resolved inputs of a run: settings, data, model spec, steps, device.


@dataclass(frozen=True)
class Plan:
    """A run that is ready to start.

    Attributes:
        config: the settings with all defaults resolved; `auto` stays until the trials.
        dataset: train, val where there is one, test where there is one; every image decodes.
        spec: the model, its head as wide as there are classes.
        preprocess: the evaluation transform, which goes into the checkpoints.
        steps: every training batch of the run.
        device: where the model trains.
        workers: loader processes.
        notes: lines to print before the start.
        chosen: one more line, on the settings that follow from the data; empty where all are given.
        weights: initial weights; None for random ones, and for a resumed run, whose state
            has them.
        teacher: a model to learn from besides the labels, on the device.
        check: the report of the check of the images; None where they were not checked.
    """

    config: RunConfig
    dataset: Dataset
    spec: ViTSpec
    preprocess: Preprocess
    steps: TrainingSteps
    device: torch.device
    workers: int
    notes: tuple[str, ...]
    chosen: str = ""
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
            return plural(step, "step")
        return "1 epoch" if epochs == 1 else f"all {epochs} epochs"

    def learning_rate(self, step: int) -> float:
        """Return the learning rate of a step, counted from 0."""
        return learning_rate(
            step,
            schedule=self.config.sched,
            peak=self.config.lr,
            low=self.config.min_lr,
            warmup=round(self.config.warmup_epochs * self.steps.steps_per_epoch),
            total=self.total_steps,
        )

    def python_call_to_resume(self, root: Path) -> str | None:
        """Return the call that resumes a run with objects of Python; `None` for any other run.

        Args:
            root: folder of the run.
        """
        return resume_command(self.config, root)

    def with_settings(self, settings: Settings) -> Plan:
        """Return the plan with other settings, such as the results of tuning."""
        # the batch size decides which images a batch has
        steps = self.steps
        if "batch_size" in settings:
            steps = steps.with_batch_size(settings["batch_size"])
        return replace(self, config=replace(self.config, **settings), steps=steps)

    def settings_to_store(self, root: Path) -> RunConfig:
        """Return the settings for the config.yaml of a run folder, without those of the call."""
        return replace(self.config, output=str(root), resume=None, overwrite=False)

    def without_weights(self) -> Plan:
        """Return the plan without the initial weights, once the model has them."""
        return replace(self, weights=None)


def make_plan(
    config: TrainConfig, world: ProcessGroup | None = None, *, resumes: bool = False
) -> Plan:
    """Open the data, check every image, and build the spec; nothing is written.

    Args:
        config: the settings.
        world: the processes that share the run.
        resumes: a resumed run has its weights, so the initial ones are not needed.

    Raises:
        CheckpointError: weights to start from that cannot be read, or are of another model.
        SettingError, SpecError: settings that contradict each other, a model that cannot exist.
        DataError: data that cannot be trained on.
        DeviceError: a device that is not there.
    """
    world = world or ProcessGroup()
    config, notes = resolve_defaults(config)
    check_settings(config, world.size, resumes=resumes)
    device = world.device(resolve_device(config.device))
    # refuses an impossible model before any image is read
    named = None if chooses_model(config) else _start(config, resumes)
    resumed = resumed_folder(config.resume, config.output) if resumes and config.resume else None
    dataset, data_notes, check = open_training_data(config, resumed)
    # before the head is adapted to the classes
    check_data(config, dataset)
    decided, chosen = decide_settings(config, dataset, world.size)
    check_steps(decided, world.size)
    start = (named or _start(decided, resumes))(dataset.classes)
    check_head(config, decided.opt, start.spec, start.weights)
    train = dataset.splits["train"]
    steps = _training_steps(decided, train, start.preprocess, world)
    check_warmup(decided, steps.steps_per_epoch)
    notes += [*data_notes, *start.notes, *balance_notes(config, dataset)]
    notes += notes_on_settings(decided, world.size, steps.steps_per_epoch)
    notes += [] if resumes else note_on_colours(config, start.spec, train)
    workers, worker_notes = _loader_processes(config.workers, train, world)
    # last, as it may take long to load
    teacher, teacher_notes = None, list[str]()
    if config.teacher is not None:
        teacher = as_teacher(config.teacher, "--teacher", trust_pickle=config.trust_pickle)
        teacher, teacher_notes = teacher.for_classes(
            dataset.classes, start.preprocess, device, config.progressive
        )
    return Plan(
        config=replace(decided, start=start.facts or None),
        dataset=dataset,
        spec=start.spec,
        preprocess=start.preprocess,
        steps=steps,
        device=device,
        workers=workers,
        notes=(*notes, *worker_notes, *teacher_notes),
        chosen=chosen,
        weights=start.weights,
        teacher=teacher,
        check=check,
    )


def make_plan_in_turn(config: TrainConfig, world: ProcessGroup, *, resumes: bool) -> Plan:
    """Make the plan on the first process first, so that the other processes read its caches."""
    plans: list[Plan] = []
    world.broadcast_from_main(lambda: plans.append(make_plan(config, world, resumes=resumes)))
    # the first process has it already
    return plans[0] if plans else make_plan(config, world, resumes=resumes)


def _start(config: TrainConfig, resumes: bool) -> Callable[[Sequence[str]], InitialWeights]:
    """Return a function from the classes to the initial weights: random, loaded, or resumed."""
    if config.pretrained is None:
        check_model(config, preset_spec(config, num_classes=1))
        return lambda classes: random_weights(config, len(classes), resumes=resumes)
    facts = config.start
    if resumes and facts is not None:
        return lambda classes: from_stored(facts)
    loaded = load_initial(config, spec_fields(config))
    # the data decide the number of classes, and are not open yet
    check_model(config, loaded.checkpoint.model.spec.replace(num_classes=1))
    return lambda classes: from_checkpoint(loaded, classes, keeps_head=config.probe is None)


# The parts of a training step: teacher targets, objective and the step itself.


def make_teacher_targets(plan: Plan) -> TeacherTargets | None:
    """Build the transform that adds a teacher's targets; `None` for a run without a teacher."""
    if plan.teacher is None:
        return None
    return TeacherTargets(
        plan.teacher,
        _distillation(plan.config),
        make_transform(plan),
        plan.preprocess,
        plan.precision,
        source=str(plan.config.teacher),
    )


def _distillation(settings: DistillationSettings) -> Distillation:
    return Distillation(
        temperature=settings.distill_temperature,
        alpha=settings.distill_alpha,
        hard=settings.distill == "hard",
    )


def make_objective(plan: Plan, model: nn.Module, precision: Precision) -> Objective:
    """Build the loss of a run, with a teacher's part where there is one."""
    config = plan.config
    loss = make_loss(config.loss, smoothing=config.label_smoothing, threshold=config.bce_threshold)
    if ":" in config.loss:
        loss = _named_in_errors(loss, config.loss)
    plain = Objective(model, loss, precision, plan.device)
    return plain if plan.teacher is None else DistillingObjective(plain, _distillation(config))


def _named_in_errors(loss: Loss, name: str) -> Loss:
    """Wrap a user's loss, so that its errors are `UserCodeError` and name it."""

    def call(logits: Logits, targets: Targets) -> Tensor:
        try:
            return loss(logits, targets)
        except Exception as error:  # a function of the user may raise anything
            # errors of vitkit have their message, and out-of-memory is handled elsewhere
            if isinstance(error, VitkitError) or is_out_of_memory(error):
                raise
            raise UserCodeError.raised_by(f"the loss {name}", error, "in a step") from error

    return call


def make_step(
    plan: Plan,
    objective: Objective,
    optimizer: optim.Optimizer,
    transform: Transform | None = None,
    *,
    compile: bool = False,
    world: ProcessGroup | None = None,
    stop: StopFlag | None = None,
) -> TrainingStep:
    """Build the step of a run from its settings and parts.

    Args:
        plan: the run.
        objective: the model and its loss.
        optimizer: over the model's parameters.
        transform: makes the inputs of the objective; default the augmentation of the run.
        compile: as for `TrainingStep`.
        world: the processes of the run.
        stop: set by a signal.
    """
    config = plan.config
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


# The augmentation of a run, built from its settings: the parts of `data.augmentation.pipeline`.


def user_transform(config: RunConfig) -> UserTransform | None:
    """Return the user's own transform of training images, if there is one."""
    if config.transform is None:
        return None
    return UserTransform(import_transform(config.transform), config.transform, config.seed)


def _augmentation_of(config: RunConfig) -> Augmentation:
    """Return the random changes to the training images of a run."""
    return Augmentation(
        flip=config.flip,
        shift=config.shift,
        crop_scale=config.crop_scale,
        aa=config.aa,
        color_jitter=config.color_jitter,
        reprob=config.reprob,
        resizer=config.resizer,
        scaled_jpeg=config.scaled_jpeg,
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


# The training batches of a run, and the processes that load them.

MOST_WORKERS = 8
"""Loader processes of each process by default, at most."""


def _training_steps(
    config: RunConfig, train: Split, preprocess: Preprocess, world: ProcessGroup
) -> TrainingSteps:
    """Return every training batch of the run, of which this process loads its part."""
    batch_size = config.batch_size
    if config.probe is not None or config.find_batch_size:
        # neither a probe nor a later search must be refused for small data
        batch_size = min(batch_size, len(train))
    return TrainingSteps(
        train,
        preprocess,
        _augmentation_of(config),
        batch_size=batch_size,
        seed=config.seed,
        rank=world.rank,
        world_size=world.size,
        balance=config.balance,
        sizes=sizes_of_epochs(config.progressive, config.epochs),
        repeats=config.repeated_aug,
        fill=config.last_batch == "fill",
        transform=user_transform(config),
    )


def _loader_processes(
    workers: int | None, train: Split, world: ProcessGroup
) -> tuple[int, list[str]]:
    """Return the number of loader processes, and a note where it exceeds the cores."""
    cores = max(1, available_cores() // world.local_size)
    if workers is None:
        # images in memory take longer to send to another process than to read
        return (0 if train.in_memory else min(cores, MOST_WORKERS)), []
    if workers > cores:
        return workers, [f"--workers {workers} on {plural(cores, 'core')}: fewer would be as fast"]
    return workers, []


def balance_notes(settings: DataSettings, dataset: Dataset) -> list[str]:
    """Return a line on how uneven the classes are, where they are drawn equally often."""
    if not settings.balance:
        return []
    return [class_counts(dataset.splits["train"].labels, dataset.classes)]


# The data of a run: opened, split and checked.


def open_training_data(
    config: TrainConfig, resumed: RunFolder | None
) -> tuple[Dataset, list[str], Report | None]:
    """Open, split and check the data.

    Args:
        config: the settings.
        resumed: the run to resume.

    Returns:
        The dataset, whose images can all be decoded, notes on it, and the report of its check; None
        where images in memory were not checked.

    Raises:
        DataError: data that cannot be trained on, or corrected labels of other data.
        SettingError: a validation fraction that the data leave no room for.
    """
    changes, change_notes = _label_changes(config.relabel, resumed)
    dataset = open_dataset(
        config.data,
        data_root=config.data_root,
        ignore_extra_classes=config.ignore_extra_classes,
        follow_links=config.follow_links,
    )
    if resumed is None:  # an older run may resume with a fraction that had no effect
        _refuse_val_fraction(dataset, config.val_fraction)
    dataset, notes, report = _checked(dataset, config, changes, quiet=config.quiet)
    return dataset, [*notes, *change_notes], report


def _label_changes(
    file: str | None, resumed: RunFolder | None
) -> tuple[LabelChanges | None, list[str]]:
    """Return the corrected labels (for a resumed run, its own copy) and notes on them."""
    if resumed is not None:
        return restore_labels(resumed.relabel, file, resumed.config)
    return (None, []) if file is None else (read_label_changes(file), [])


def _refuse_val_fraction(dataset: Dataset, fraction: float) -> None:
    """Refuse another fraction where all images were divided by fixed shares."""
    # a pool too small for a validation split has none, and its train split is divided again
    if dataset.cut and "val" in dataset.splits and fraction != DataSettings.val_fraction:
        shares = ", ".join(f"{share:.0%} {name}" for name, share in POOL_FRACTIONS.items())
        raise SettingError(
            f"--val-fraction {fraction:g} has no effect on {dataset.name}: the data have no splits "
            f"and are always divided into {shares}; leave it out, or put the training images into "
            "a train split"
        )


def _checked(
    dataset: Dataset, settings: DataSettings, changes: LabelChanges | None, *, quiet: bool
) -> tuple[Dataset, list[str], Report | None]:
    """Cut the validation split where there is none, correct labels, and check every image."""
    if settings.cache is not None:
        folder = None if settings.cache == "auto" else settings.cache
        dataset = cached(dataset, folder, progress=None if quiet else show_progress)
    has_val = "val" in dataset.splits
    if settings.val_fraction > 0:
        # before the check, which then also finds copies across this cut
        dataset = with_validation(dataset, settings.val_fraction)
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
        notes += [f"skipped {plural(len(problems), 'image')} of {split} that cannot be decoded:"]
        notes += [f"  {problem.name}: {problem.reason}: {problem.detail}" for problem in problems]
    is_whole = not any(split.in_memory for split in dataset.splits.values())
    return dataset, notes, report if is_whole else None
