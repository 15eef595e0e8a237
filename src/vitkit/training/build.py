"""From the settings of a run to its parts: the batch transform, the objective, one step."""

from __future__ import annotations

from torch import nn, optim

from vitkit.data.augmentation.mixup import Mixing
from vitkit.data.loading.batch_transform import BatchTransform
from vitkit.distributed import World
from vitkit.training.distillation.losses import Distillation
from vitkit.training.distillation.objective import DistillingObjective
from vitkit.training.distillation.teacher_targets import Taught, TeacherTargets
from vitkit.training.interrupts import StopFlag
from vitkit.training.optimization.losses import make_loss
from vitkit.training.optimization.precision import Precision
from vitkit.training.run_folder import RunFolder
from vitkit.training.setup import Plan
from vitkit.training.step import Objective, TrainingStep, Transform


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
    taught = Taught(
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
        plan.teacher, distillation, taught, make_transform(plan), run.teacher, world, stop
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
