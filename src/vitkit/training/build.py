"""From the settings of a run to its parts: model, optimizer, state, batch transform, one step."""

from __future__ import annotations

import shlex
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import cast

from torch import nn, optim

from vitkit.data.augmentation.mixup import Mixing
from vitkit.data.loading.batch_transform import BatchTransform
from vitkit.distributed import World
from vitkit.evaluation.metrics import Metrics
from vitkit.models.attention import use_attention
from vitkit.models.vit import ViT
from vitkit.training.distillation.losses import Distillation
from vitkit.training.distillation.objective import DistillingObjective
from vitkit.training.distillation.teacher_targets import TeacherInputs, TeacherTargets
from vitkit.training.interrupts import StopFlag
from vitkit.training.monitoring.failed_images import FailedImages
from vitkit.training.monitoring.run_log import RunLog
from vitkit.training.optimization.activation_checkpointing import checkpoint_gradients
from vitkit.training.optimization.ema import EMA
from vitkit.training.optimization.losses import make_loss
from vitkit.training.optimization.optimizers import configured_optimizer
from vitkit.training.optimization.precision import Precision
from vitkit.training.optimization.schedule import learning_rate
from vitkit.training.parallel.fsdp import shard
from vitkit.training.run_folder import RunFolder
from vitkit.training.setup import Plan
from vitkit.training.state.registry import ModelPart, OptimizerPart, Progress, Registry
from vitkit.training.step import Objective, TrainingStep, Transform
from vitkit.training.trainer import Callback


@dataclass(frozen=True)
class EpochResult:
    """An epoch that is validated.

    Attributes:
        epoch: counted from 1.
        learning_rate: of its last step.
        train_loss: mean of its steps.
        validation: scores; empty without a validation split.
        better: whether no epoch before was as good.
        model: what was validated, in one piece, in eval mode.
    """

    epoch: int
    learning_rate: float
    train_loss: float
    validation: Metrics
    better: bool
    model: ViT


@dataclass
class Run:
    """The parts of a run, which its callbacks share.

    Attributes:
        plan: settings, data, model spec, steps, device.
        folder: where the run is written.
        log: the terminal and the run's logs; silent in all processes but the first.
        world: the processes of the run.
        stop: raised by a signal.
        model: that trains.
        precision: `off`, `bfloat16` or `float16`.
        optimizer: over the model's parameters.
        progress: where the run is.
        registry: all state by name, as it is saved.
        training_step: the arithmetic of a step.
        ema: the average of the weights, where there is one.
        targets: the teacher's, where there is one.
        epoch_result: of the epoch that was validated last, until it is saved.
        failed_images: is given a line for each image that could not be read.
        further: callbacks that are not the run's own; evaluation calls these.
    """

    plan: Plan
    folder: RunFolder
    log: RunLog
    world: World
    stop: StopFlag
    model: ViT
    precision: Precision
    optimizer: optim.Optimizer
    progress: Progress
    registry: Registry
    training_step: TrainingStep
    failed_images: FailedImages
    ema: EMA | None = None
    targets: TeacherTargets | None = None
    epoch_result: EpochResult | None = None
    further: Sequence[Callback] = ()
    _started: float = field(default_factory=time.monotonic)

    @property
    def model_to_save(self) -> ViT:
        """The model that is validated and saved: the average of the weights, where there is one."""
        return self.model if self.ema is None else cast(ViT, self.ema.model)

    def restart_clock(self) -> None:
        """Leave the time since the last count out of the seconds of training."""
        self._started = time.monotonic()

    def count_time(self) -> None:
        """Add the time since the last count to the seconds of training."""
        now = time.monotonic()
        self.progress.seconds += now - self._started
        self._started = now

    def stops_alone(self) -> bool:
        """True where a signal may end a wait; other processes would not know of it."""
        return self.world.size == 1 and self.stop.signum is not None

    def how_to_go_on(self) -> str:
        """Return the command that resumes this run."""
        return f"go on with: vitkit train --resume {shlex.quote(str(self.folder.root))}"


def make_run(
    plan: Plan,
    folder: RunFolder,
    log: RunLog,
    model: ViT,
    precision: Precision,
    stop: StopFlag,
    world: World | None = None,
) -> Run:
    """Build all parts of a run around a fresh model on the plan's device."""
    config, world = plan.config, world or World()
    if config.attention_kernel != "auto":
        use_attention(model, config.attention_kernel)
        if plan.teacher is not None:
            use_attention(plan.teacher.model, config.attention_kernel)
    ema = EMA(model, config.model_ema_decay) if config.model_ema else None
    checkpoint_gradients(model, config.grad_checkpointing)
    if config.parallel == "fsdp" and world.size > 1:
        shard(model, world, plan.device)
        if ema is not None:
            shard(cast(ViT, ema.model), world, plan.device)
    optimizer = configured_optimizer(model, config)
    progress = Progress(data=plan.dataset.fingerprint)
    targets = make_teacher_targets(plan, folder, precision, world, stop)
    training_step = make_step(
        plan,
        make_objective(plan, model, precision, targets.distillation if targets else None),
        optimizer,
        targets or make_transform(plan),
        compile=config.compile,
        world=world,
        stop=stop,
    )
    registry = Registry()
    registry.register("model", ModelPart(model), model)
    registry.register("optimizer", OptimizerPart(optimizer), optimizer)
    if ema is not None:
        registry.register("ema", ema)
    registry.register("progress", progress)
    if targets is not None:
        registry.register("teacher", targets)
    if training_step.scale is not None:
        registry.register("loss_scale", training_step.scale)
    return Run(
        plan,
        folder,
        log,
        world,
        stop,
        model,
        precision,
        optimizer,
        progress,
        registry,
        training_step,
        FailedImages(log.say),
        ema,
        targets,
    )


def make_transform(plan: Plan) -> BatchTransform:
    """Build what turns a batch of the run into the model's images and targets."""
    config, mixing = plan.config, None
    if config.mixup > 0 or config.cutmix > 0:
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
        plan.preprocess, plan.device, plan.steps.augmentation, mixing, seed=config.seed
    )


def make_teacher_targets(
    plan: Plan, run: RunFolder, precision: Precision, world: World, stop: StopFlag
) -> TeacherTargets | None:
    """Build the transform that adds a teacher's targets; `None` for a run without a teacher."""
    config = plan.config
    if plan.teacher is None:
        return None
    distillation = Distillation(
        temperature=config.distill_temperature,
        alpha=config.distill_alpha,
        hard=config.distill == "hard",
    )
    inputs = TeacherInputs(
        plan.steps,
        plan.preprocess,
        plan.spec.num_classes,
        plan.device,
        precision,
        plan.workers,
        key=(plan.dataset.fingerprint, config.attention_kernel),
        source=str(config.teacher),
    )
    return TeacherTargets(
        plan.teacher, distillation, inputs, make_transform(plan), run.teacher, world, stop
    )


def make_objective(
    plan: Plan, model: nn.Module, precision: Precision, distillation: Distillation | None = None
) -> Objective:
    """Build the loss of a run, with a teacher's part where there is one."""
    config = plan.config
    loss = make_loss(config.loss, smoothing=config.label_smoothing, threshold=config.bce_threshold)
    if distillation is None:
        return Objective(model, loss, precision, plan.device)
    return DistillingObjective(model, loss, precision, plan.device, distillation)


def make_step(
    plan: Plan,
    objective: Objective,
    optimizer: optim.Optimizer,
    transform: Transform,
    *,
    compile: bool = False,
    world: World | None = None,
    stop: StopFlag | None = None,
) -> TrainingStep:
    """Build the step of a run from its settings and parts."""
    config = plan.config
    return TrainingStep(
        objective,
        optimizer,
        transform,
        accumulate=config.grad_accum_steps,
        clip=config.clip_grad,
        seed=config.seed,
        compile=compile,
        world=world,
        stop=stop,
    )


def schedule_of(plan: Plan) -> Callable[[int], float]:
    """Build the function from a step, counted from 0, to its learning rate."""
    config = plan.config
    return partial(
        learning_rate,
        schedule=config.sched,
        peak=config.lr,
        low=config.min_lr,
        warmup=round(config.warmup_epochs * plan.steps.steps_per_epoch),
        total=plan.total_steps,
    )
