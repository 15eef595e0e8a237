"""Trials: training steps on a copy of the model, which leave the run unchanged."""

from __future__ import annotations

import copy
from contextlib import AbstractContextManager

import torch

from vitkit.models.attention import use_attention
from vitkit.models.vit import ViT
from vitkit.training.optimization.activation_checkpointing import checkpoint_gradients
from vitkit.training.optimization.freezing import train_mode
from vitkit.training.optimization.optimizers import configured_optimizer
from vitkit.training.run_plan import Plan
from vitkit.training.setup.build_step import make_objective, make_step
from vitkit.training.step import TrainingStep


def trial(plan: Plan, model: ViT) -> TrainingStep:
    """Build the training step of the run on a copy of the model, not compiled.

    Args:
        plan: plan of the run, whose precision is decided.
        model: on the plan's device; it is not changed.
    """
    config = plan.config
    # The run starts from the weights that the model has now.
    copied = copy.deepcopy(model)
    train_mode(copied)
    checkpoint_gradients(copied, config.grad_checkpointing)
    if config.attention_kernel != "auto":
        use_attention(copied, config.attention_kernel)
    objective = make_objective(plan, copied, plan.precision)
    optimizer = configured_optimizer(copied, config)
    return make_step(plan, objective, optimizer)


def preserve_generators(device: torch.device) -> AbstractContextManager[None]:
    """Restore torch's random generators after a block, so that a trial does not change the run."""
    gpus = [device] if device.type == "cuda" else []  # the CPU generator is always restored
    return torch.random.fork_rng(gpus)
