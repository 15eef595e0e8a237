"""Resolve `auto` settings (precision, attention kernel, compile, learning rate) before training.

Precision and attention kernel follow from a rule. The learning rate is measured if the user asks
for it, with a copy of the model on training images of the run. The results are settings like any
others: they are written to config.yaml and kept on resume.
"""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import NamedTuple

import torch

from vitkit.errors import NonFiniteError, SettingError
from vitkit.models.attention import use_attention
from vitkit.models.vit import ViT
from vitkit.training.config.meaning import Settings
from vitkit.training.monitoring.figures import write_figure
from vitkit.training.optimization.optimizers import configured_optimizer
from vitkit.training.optimization.parameters import train_mode
from vitkit.training.optimization.precision import (
    checkpoint_gradients,
    choose_kernel,
    choose_precision,
)
from vitkit.training.plan import Plan, make_step
from vitkit.training.run_folder import LR_FINDER, RunFolder
from vitkit.training.step import TrainingStep


def tune_settings(
    plan: Plan,
    model: ViT,
    log: Callable[[str], None],
    *,
    resumes: bool = False,
    folder: RunFolder | None = None,
) -> Settings:
    """Resolve the `auto` settings of a run.

    Args:
        plan: plan of the run.
        model: freshly initialised, on the plan's device; it is not changed.
        log: called with one line for every decision, and its reason.
        resumes: the run is resumed; it was compiled from its start if `compile` is set.
        folder: receives a figure of the search for the learning rate.

    Returns:
        The settings that were decided.

    Raises:
        SettingError: there is no compiler here for a run that began with one.
        NonFiniteError: the search for a learning rate finds no finite loss.
    """
    config = plan.config
    decided = _arithmetic(plan, model, log) | {"find_lr": False}
    if config.compile:
        problem = _compiler_problem(plan.device)
        if problem is None:
            log("compile: the first steps take long, as they are compiled")
        elif resumes:
            raise SettingError(
                f"the run is compiled, and {problem}; resume it on a machine with a compiler"
            )
        else:
            decided["compile"] = False
            log(f"compile: {problem}; the training step is not compiled")
    if config.find_lr:
        found = find_lr(plan.with_settings(decided), model)
        decided["lr"] = found.lr
        # a final rate above the peak would be refused
        decided["min_lr"] = min(config.min_lr, found.lr)
        log(found.line)
        if folder is not None and config.plots:
            # imported here: no other run needs matplotlib before its end
            from vitkit.plots.curves import draw_rate_search

            drawn = found.rates, found.losses, found.lowest, found.lr
            write_figure(folder.root / LR_FINDER, lambda: draw_rate_search(*drawn), log)
    return decided


def _arithmetic(plan: Plan, model: ViT, log: Callable[[str], None]) -> Settings:
    """Choose the precision and the attention kernel where the settings have `auto`."""
    config = plan.config
    precision, kernel, reason = config.amp, config.attention_kernel, ""
    if precision == "auto":
        if config.probe is None:
            precision, reason = choose_precision(model, config.batch_size, plan.device)
        else:  # a probe computes its features once, exactly
            precision = "off"
    if kernel == "auto":
        kernel = choose_kernel(model, precision, plan.device)
    if reason:
        name = "float32" if precision == "off" else f"{precision} autocast"
        log(f"precision: {name}, {kernel} attention ({reason})")
    return {"amp": precision, "attention_kernel": kernel}


def _compiler_problem(device: torch.device) -> str | None:
    """Return in a few words why torch.compile cannot work on a device; `None` if it can."""
    # imported here: few runs are compiled, and the first one takes a second
    if device.type == "cuda":
        from torch.utils._triton import has_triton

        return None if has_triton() else "there is no Triton for this GPU"
    from vitkit.engines.registry import has_compiler

    return None if has_compiler() else "there is no C++ compiler here"


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
    return make_step(plan, copied, configured_optimizer(copied, config))


def _preserve_generators(device: torch.device) -> AbstractContextManager[None]:
    """Restore torch's random generators after a block, so that a trial does not change the run."""
    gpus = [device] if device.type == "cuda" else []  # the CPU generator is always restored
    return torch.random.fork_rng(gpus)


# Find a learning rate by a range test: a short run whose learning rate rises.

LOWEST, HIGHEST = 1e-6, 10.0
"""Range of the learning rates that are tried."""
STEPS = 100
"""Steps of the trial; each learning rate is a constant factor above the one before."""
MOMENTUM = 0.8
"""Weight of the earlier steps in the moving average of the loss."""
DIVERGED = 2.0
"""The trial ends when the loss is this many times its minimum."""
SAFETY = 10.0
"""The learning rate of the lowest loss is divided by this."""


class FoundRate(NamedTuple):
    """The result of the search for a learning rate.

    Attributes:
        lr: the learning rate, to two digits.
        line: a line on the trial.
        rates: the rates that were tried, increasing.
        losses: the moving average of the training loss at each of them.
        lowest: the rate of the lowest loss.
    """

    lr: float
    line: str
    rates: list[float]
    losses: list[float]
    lowest: float


def find_lr(plan: Plan, model: ViT) -> FoundRate:
    """Return a tenth of the learning rate at which the loss of a range test is lowest.

    The range test of Smith, "Cyclical Learning Rates for Training Neural Networks" (arXiv
    1506.01186), Sec. 3.3, with learning rates that grow by a constant factor. The tenth is fastai's
    rule, because the loss is lowest just before it diverges. The loss is a moving average.

    Args:
        plan: plan of the run.
        model: freshly initialised, on the plan's device; it is not changed.

    Raises:
        NonFiniteError: the loss or its gradient is not a finite number, whatever the rate.
    """
    start, mean, rate = time.monotonic(), 0.0, LOWEST
    rates, losses = list[float](), list[float]()
    with _preserve_generators(plan.device):
        step = trial(plan, model)
        for number in range(STEPS):
            # a geometric series from the lowest to the highest
            rate = LOWEST * (HIGHEST / LOWEST) ** (number / (STEPS - 1))
            step.set_learning_rate(rate)
            result = step(plan.steps[number % plan.total_steps], number)
            if result.bad is not None:  # not a finite number: it has diverged
                break
            mean = MOMENTUM * mean + (1 - MOMENTUM) * result.loss
            # Without this correction the average of the first steps would be near 0, as in Adam.
            smoothed = mean / (1 - MOMENTUM ** (number + 1))
            has_diverged = smoothed > DIVERGED * min(losses, default=math.inf)
            rates.append(rate)
            losses.append(smoothed)
            if has_diverged:
                break
    if not rates:
        raise NonFiniteError(
            "--find-lr: the loss or its gradient is not a finite number, even at the rate "
            f"{LOWEST:g}; check --loss and the weights, or pass --amp off"
        )
    lowest = rates[losses.index(min(losses))]
    lr = float(f"{lowest / SAFETY:.1e}")
    line = (
        f"lr: {lr:g} (the loss fell from {losses[0]:.4g} to {min(losses):.4g} at {lowest:.2g}; "
        f"rates tried up to {rate:.2g}, in {time.monotonic() - start:.0f} s)"
    )
    return FoundRate(lr, line, rates, losses, lowest)
