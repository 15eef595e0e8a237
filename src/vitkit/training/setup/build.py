"""From the plan of a run to its parts: model, average, optimizer, state, one step."""

from __future__ import annotations

from vitkit.distributed import ProcessGroup
from vitkit.models.attention import use_attention
from vitkit.models.vit import ViT
from vitkit.training.interrupts import StopFlag
from vitkit.training.monitoring.run_log import RunLog
from vitkit.training.optimization.activation_checkpointing import checkpoint_gradients
from vitkit.training.optimization.ema import EMA
from vitkit.training.optimization.optimizers import configured_optimizer
from vitkit.training.parallel.fsdp import shard
from vitkit.training.run import Run
from vitkit.training.run_folder import RunFolder
from vitkit.training.run_plan import Plan
from vitkit.training.setup.build_step import (
    make_objective,
    make_step,
    make_teacher_targets,
)
from vitkit.training.state.progress import Progress
from vitkit.training.state.registry import ModelPart, OptimizerPart, Registry


def make_run(
    plan: Plan,
    folder: RunFolder,
    log: RunLog,
    model: ViT,
    stop: StopFlag,
    world: ProcessGroup | None = None,
) -> Run:
    """Build all parts of a run around a fresh model on the plan's device."""
    config, precision, world = plan.config, plan.precision, world or ProcessGroup()
    if config.attention_kernel != "auto":
        use_attention(model, config.attention_kernel)
        if plan.teacher is not None:
            use_attention(plan.teacher.model, config.attention_kernel)
    # the EMA is a copy of the model, made before checkpointing of gradients and sharding
    ema = EMA(model, config.model_ema_decay) if config.model_ema else None
    checkpoint_gradients(model, config.grad_checkpointing)
    if config.parallel == "fsdp" and world.size > 1:
        shard(model, world, plan.device)
        if ema is not None:
            shard(ema.model, world, plan.device)
    # after sharding, which replaces the parameters
    optimizer = configured_optimizer(model, config)
    progress = Progress(data=plan.dataset.identity)
    targets = make_teacher_targets(plan)
    training_step = make_step(
        plan,
        make_objective(plan, model, precision),
        optimizer,
        targets,
        compile=config.compile,
        world=world,
        stop=stop,
    )
    # everything that decides the next step; unregistered state is not saved
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
        optimizer,
        progress,
        registry,
        training_step,
        ema,
    )
