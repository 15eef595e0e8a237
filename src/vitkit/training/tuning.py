"""Resolve `auto` settings (precision, compile, batch size, learning rate) before training."""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch

from vitkit.data.loading.batch import Batch
from vitkit.devices import is_out_of_memory
from vitkit.engines.registry import has_compiler
from vitkit.errors import NonFiniteError, SettingError
from vitkit.messages import plural
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
    wait_for,
)
from vitkit.training.plan import Plan, make_objective, make_step
from vitkit.training.run_folder import LR_FINDER, RunFolder
from vitkit.training.setup.defaults import MIN_STEPS, limit_batch_size
from vitkit.training.step import TrainingStep

if TYPE_CHECKING:
    from vitkit.plots.figure import NotebookFigure


# Find a batch size: double it until throughput stops rising, or memory is full.

SMALLEST, LARGEST = 8, 4096
"""Range of the batch sizes that are tried, in images."""
SPEEDUP = 1.05
"""Least gain in images per second from doubling the batch size."""
TIMED = 3
"""Timed steps of each size, after one that warms up; the fastest counts."""


def find_batch_size(
    plan: Plan, model: ViT, clock: Callable[[], float] = time.perf_counter
) -> tuple[int, str]:
    """Find the batch size beyond which doubling is no faster, or does not fit into memory.

    An epoch keeps `MIN_STEPS` steps. Every trial is a complete step of a copy of the model,
    including the state of the optimizer. The learning rate is not adapted, although a larger batch
    may need another one.

    Args:
        plan: plan of the run.
        model: freshly initialised, on the plan's device; it is not changed.
        clock: seconds since some start, that the trials are timed by.

    Returns:
        The batch size, and a line with the images per second of each size.

    Raises:
        SettingError: the smallest batch does not fit into memory.
    """
    limit = limit_batch_size(len(plan.steps.split), LARGEST)
    # the views of one image must not fill a batch; a power of two, as all sizes are
    more_than_views = 1 << plan.config.repeated_aug.bit_length()
    size = min(max(SMALLEST, more_than_views), limit)
    chosen, best = size, 0.0
    speeds = []
    with _preserve_generators(plan.device):
        while size <= limit:
            speed = _images_per_second(plan, model, size, clock)
            if not speed:
                speeds.append(f"{size}: out of memory")
                break
            speeds.append(f"{size}: {speed:.4g}")
            # The first size that gains nothing ends the search: larger ones gain less.
            if speed < SPEEDUP * best:
                break
            chosen, best = size, speed
            size *= 2
    if not best:
        raise SettingError(
            f"{plan.device} is out of memory with {plural(size, 'image')} at once; lower "
            "--img-size, use a smaller model, or pass --grad-checkpointing"
        )
    line = f"batch size: {chosen} (images per second at {', '.join(speeds)})"
    if limit < size <= LARGEST:
        line += f"; with a larger one an epoch would have fewer than {MIN_STEPS} steps"
    if chosen != plan.config.batch_size and not plan.config.find_lr:
        line += f"; lr {plan.config.lr:g} is unchanged"
    return chosen, line


def _images_per_second(plan: Plan, model: ViT, size: int, clock: Callable[[], float]) -> float:
    """Time training steps of a batch size; return images/s of the fastest, 0 if out of memory."""
    try:
        step = trial(plan, model)
        sizes = plan.steps.sizes
        epoch = 0
        if sizes:  # with images that grow, the epoch of the largest ones
            epoch = sizes.index(max(sizes))
        batch: Batch = plan.steps.variants(np.arange(size), epoch)
        times = []
        for number in range(TIMED + 1):
            start = clock()
            step(batch, number)
            wait_for(plan.device)  # GPU calls are asynchronous
            times.append(clock() - start)
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        return 0.0
    return size / min(times[1:])


# Check whether torch.compile works on this machine.


def _compiler_problem(device: torch.device) -> str | None:
    """Return in a few words why torch.compile cannot work on a device; `None` if it can."""
    if device.type == "cuda":
        from torch.utils._triton import has_triton  # imported here: it takes a second

        return None if has_triton() else "there is no Triton for this GPU"
    return None if has_compiler() else "there is no C++ compiler here"


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


@dataclass
class _RangeTest:
    """The losses and rates of a range test.

    Attributes:
        first_loss: loss of the first step.
        lowest_loss: lowest moving average of the loss.
        best_rate: learning rate of the lowest loss.
        highest_rate: highest learning rate that was tried.
        rates: learning rates of the steps, increasing.
        losses: moving average of the loss after each of them.
    """

    first_loss: float = math.nan
    lowest_loss: float = math.inf
    best_rate: float = LOWEST
    highest_rate: float = LOWEST
    rates: list[float] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)


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
    start = time.monotonic()
    with _preserve_generators(plan.device):
        test = _run_range_test(plan, model)
    if not test.rates:
        raise NonFiniteError(
            "--find-lr: the loss or its gradient is not a finite number, even at the rate "
            f"{LOWEST:g}; check --loss and the weights, or pass --amp off"
        )
    lr = float(f"{test.best_rate / SAFETY:.1e}")
    seconds = time.monotonic() - start
    line = (
        f"lr: {lr:g} (the loss fell from {test.first_loss:.4g} to {test.lowest_loss:.4g} at "
        f"{test.best_rate:.2g}; rates tried up to {test.highest_rate:.2g}, in {seconds:.0f} s)"
    )
    return FoundRate(lr, line, test.rates, test.losses, test.best_rate)


def _run_range_test(plan: Plan, model: ViT) -> _RangeTest:
    """Train a copy of the model with rising learning rates, until the loss diverges."""
    test = _RangeTest()
    step = trial(plan, model)
    mean = 0.0
    for number in range(STEPS):
        # a geometric series from the lowest to the highest
        rate = LOWEST * (HIGHEST / LOWEST) ** (number / (STEPS - 1))
        test.highest_rate = rate
        step.set_learning_rate(rate)
        result = step(plan.steps[number % plan.total_steps], number)
        if result.bad is not None:  # not a finite number: it has diverged
            break
        mean = MOMENTUM * mean + (1 - MOMENTUM) * result.loss
        # Without this correction the average of the first steps would be near 0, as in Adam.
        smoothed = mean / (1 - MOMENTUM ** (number + 1))
        test.rates.append(rate)
        test.losses.append(smoothed)
        if number == 0:
            test.first_loss = smoothed
        if smoothed > DIVERGED * test.lowest_loss:
            break
        if smoothed < test.lowest_loss:
            test.lowest_loss = smoothed
            test.best_rate = rate
    return test


# Trials: training steps on a copy of the model, which leave the run unchanged.


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


def _preserve_generators(device: torch.device) -> AbstractContextManager[None]:
    """Restore torch's random generators after a block, so that a trial does not change the run."""
    gpus = [device] if device.type == "cuda" else []  # the CPU generator is always restored
    return torch.random.fork_rng(gpus)


# Resolve `auto` settings (precision, compile, batch size, learning rate) before training.
#
# Precision and attention kernel follow from a rule. Batch size and learning rate are measured if
# the user asks for it, with a copy of the model on training images of the run. The results are
# settings like any others: they are written to config.yaml and kept on resume.


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
        SettingError: there is no compiler here for a run that began with one; or the smallest
            batch does not fit into memory.
        NonFiniteError: the search for a learning rate finds no finite loss.
    """
    config = plan.config
    decided: Settings = {"find_lr": False, "find_batch_size": False}
    decided |= _arithmetic(plan, model, log)
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
    if config.find_batch_size:
        plan = plan.with_settings(decided)
        decided["batch_size"], line = find_batch_size(plan, model)
        log(line)
    # After the batch size, on which the best learning rate depends.
    if config.find_lr:
        plan = plan.with_settings(decided)
        found = find_lr(plan, model)
        decided["lr"] = found.lr
        # a final rate above the peak would be refused
        decided["min_lr"] = min(config.min_lr, found.lr)
        log(found.line)
        if folder is not None and config.plots:
            write_figure(folder.root / LR_FINDER, lambda: _rate_search(found), log)
    return decided


def _rate_search(found: FoundRate) -> NotebookFigure:
    # imported here: no other run needs matplotlib before its end
    from vitkit.plots.curves import draw_rate_search

    return draw_rate_search(found.rates, found.losses, found.lowest, found.lr)


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
