"""The parts of a training step: teacher targets, objective and the step itself."""

from __future__ import annotations

from torch import Tensor, nn, optim

from vitkit.devices import is_out_of_memory
from vitkit.distributed import ProcessGroup
from vitkit.errors import UserCodeError, VitkitError
from vitkit.shapes import Logits, Loss, Targets
from vitkit.training.config.sections.distillation import DistillationSettings
from vitkit.training.distillation import Distillation, DistillingObjective, TeacherTargets
from vitkit.training.interrupts import StopFlag
from vitkit.training.optimization.losses import make_loss
from vitkit.training.optimization.precision import Precision
from vitkit.training.run_plan import Plan
from vitkit.training.setup.build_augmentation import make_transform
from vitkit.training.step import Objective, TrainingStep, Transform


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
    if plan.teacher is None:
        return Objective(model, loss, precision, plan.device)
    return DistillingObjective(model, loss, precision, plan.device, _distillation(config))


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
