"""What is decided before the first step: arithmetic, a compiler, the batch size, the learning rate.

Arithmetic follows a rule; the last two are tried, where the user asks for it, with a copy of the
model on training images of the run. What was found is a setting like any other: it is written to
config.yaml and kept on resume.
"""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Callable
from contextlib import AbstractContextManager

import numpy as np
import torch

from vitkit.data.loading.loader import Batch
from vitkit.errors import SettingError, plural
from vitkit.models.attention import use_attention
from vitkit.models.vit import ViT
from vitkit.training.auto.heuristics import LEAST_STEPS, batch_of
from vitkit.training.build import make_objective, make_step, make_transform
from vitkit.training.config.train_config import Settings
from vitkit.training.initial_weights import train_mode
from vitkit.training.optimization.activation_checkpointing import checkpoint_gradients
from vitkit.training.optimization.optimizers import configured_optimizer
from vitkit.training.optimization.precision import choose_kernel, choose_precision, wait_for
from vitkit.training.setup import Plan
from vitkit.training.step import TrainingStep, is_out_of_memory

Say = Callable[[str], None]
SMALLEST, LARGEST = 8, 4096
"""Batches between which a size is looked for, in images."""
FASTER = 1.05
"""A batch twice as large must train at least so many times as many images a second."""
TIMED = 3
"""Steps of each size that are timed, after one that warms up; the fastest counts."""
RATES = (1e-6, 10.0)
"""Learning rates between which one is looked for."""
TRIED = 100
"""Steps of that, each at a rate a constant factor above the one before."""
KEPT = 0.8
"""Part of the mean loss that is kept in each of them."""
DIVERGED = 2.0
"""The search ends where the loss is so many times the lowest."""
BELOW = 10.0
"""How far below the rate of the lowest loss a run is safe."""


def try_out(plan: Plan, model: ViT, say: Say) -> Settings:
    """Decide what the settings leave open.

    Args:
        plan: of the run.
        model: fresh, on the plan's device; left as it is.
        say: told what was decided and why, a line each.

    Returns:
        The settings that are decided now.
    """
    config = plan.config
    found: Settings = {"find_lr": False, "find_batch_size": False}
    precision, reason = config.amp, ""
    if precision == "auto" and config.probe is not None:
        precision = "off"
    elif precision == "auto":
        precision, reason = choose_precision(model, config.batch_size, plan.device)
    found["amp"], kernel = precision, config.attention_kernel
    if kernel == "auto":
        kernel = choose_kernel(model, precision, plan.device)
    found["attention_kernel"] = kernel
    if reason:
        name = "float32" if precision == "off" else f"{precision} autocast"
        say(f"precision: {name}, {kernel} attention ({reason})")
    if config.compile and (missing := no_compiler(plan.device)) is not None:
        found["compile"] = False
        say(f"compile: {missing}; the training step stays as it is")
    if config.compile and "compile" not in found:
        say("compile: the first steps take long, as they are compiled")
    if config.find_batch_size:
        plan = plan.with_settings(found)
        found["batch_size"], said = find_batch_size(plan, model)
        say(said)
    if config.find_lr:
        plan = plan.with_settings(found)
        found["lr"], said = find_lr(plan, model)
        found["min_lr"] = min(config.min_lr, found["lr"])
        say(said)
    return found


def no_compiler(device: torch.device) -> str | None:
    """Why torch.compile cannot work on a device, in a few words; `None` where it can."""
    if device.type == "cuda":
        from torch.utils._triton import has_triton

        return None if has_triton() else "there is no Triton for this GPU"
    from torch._inductor.cpp_builder import get_cpp_compiler
    from torch._inductor.exc import InvalidCxxCompiler

    try:
        get_cpp_compiler()
    except InvalidCxxCompiler:
        return "there is no C++ compiler here"
    return None


def find_lr(plan: Plan, model: ViT) -> tuple[float, str]:
    """A tenth of the rate at which the loss of a short run with rising rates is lowest.

    The range test of Smith, "Cyclical Learning Rates for Training Neural Networks" (arXiv
    1506.01186), Sec. 3.3, with rates that grow by a factor; the tenth is fastai's rule, as the loss
    is lowest just before it diverges. The mean loss of the last few steps counts.

    Returns:
        The rate, to two digits, and a line that says what was seen.
    """
    start, (low, high) = time.monotonic(), RATES
    mean, best, at, reached, first = 0.0, math.inf, low, low, math.nan
    with _generators_kept(plan.device):
        step = trial(plan, model)
        for number in range(TRIED):
            reached = low * (high / low) ** (number / (TRIED - 1))
            for group in step.optimizer.param_groups:
                group["lr"] = reached * group.get("lr_scale", 1.0)
            made = step(plan.steps[number % plan.total_steps], number)
            if made.bad is not None:
                break
            mean = KEPT * mean + (1 - KEPT) * made.loss
            smoothed = mean / (1 - KEPT ** (number + 1))
            first = smoothed if number == 0 else first
            if smoothed > DIVERGED * best:
                break
            if smoothed < best:
                best, at = smoothed, reached
    lr = float(f"{at / BELOW:.1e}")
    seconds = time.monotonic() - start
    return lr, (
        f"lr: {lr:g} (the loss fell from {first:.4g} to {best:.4g} at {at:.2g}; rates tried up to "
        f"{reached:.2g}, in {seconds:.0f} s)"
    )


def find_batch_size(plan: Plan, model: ViT) -> tuple[int, str]:
    """The batch after which doubling gains no more speed, or does not fit into memory.

    It leaves an epoch `LEAST_STEPS` steps, as `batch_of` has it. Every trial is a whole step of a
    copy, its optimizer's state included. The rate is left as it is: a larger batch may want
    another one.

    Returns:
        The size, and a line with the images per second of each.

    Raises:
        SettingError: not even the smallest fits.
    """
    most = batch_of(len(plan.steps.split), LARGEST)
    size = min(SMALLEST, most)
    chosen, best, seen = size, 0.0, []
    with _generators_kept(plan.device):
        while size <= most:
            speed = _images_per_second(plan, model, size)
            seen.append(f"{size}: {speed:.4g}" if speed else f"{size}: out of memory")
            if not speed or speed < FASTER * best:
                break
            chosen, best, size = size, speed, 2 * size
    if not best:
        raise SettingError(
            f"{plan.device} is out of memory at {plural(size, 'image')} at once; lower "
            f"--img-size or the model, or pass --grad-checkpointing"
        )
    shown, config = ", ".join(seen), plan.config
    end = f"; a larger one leaves an epoch fewer than {LEAST_STEPS} steps"
    steps = end if most < size <= LARGEST else ""
    kept = chosen != config.batch_size and not config.find_lr
    left = f"; lr {config.lr:g} is left as it is" if kept else ""
    return chosen, f"batch size: {chosen} (images per second at {shown}){steps}{left}"


def _generators_kept(device: torch.device) -> AbstractContextManager[None]:
    """Random numbers drawn in a trial are drawn again in the run."""
    return torch.random.fork_rng([device] if device.type == "cuda" else [])


def _images_per_second(plan: Plan, model: ViT, size: int) -> float:
    """Of the fastest step with a batch of `size`; 0 where memory ends."""
    try:
        step = trial(plan, model)
        sizes = plan.steps.sizes
        largest = sizes.index(max(sizes)) if sizes else 0  # the epoch of the largest images
        batch: Batch = plan.steps.variants(np.arange(size), largest)
        times = []
        for number in range(TIMED + 1):
            start = time.perf_counter()
            step(batch, number)
            wait_for(plan.device)
            times.append(time.perf_counter() - start)
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        return 0.0
    return size / min(times[1:])


def trial(plan: Plan, model: ViT) -> TrainingStep:
    """A training step of a copy of the model, as the run will have it but for compilation."""
    config = plan.config
    copied = copy.deepcopy(model)
    train_mode(copied)
    checkpoint_gradients(copied, config.grad_checkpointing)
    assert config.amp != "auto", "decided before"
    if config.attention_kernel != "auto":
        use_attention(copied, config.attention_kernel)
    objective = make_objective(plan, copied, config.amp)
    optimizer = configured_optimizer(copied, config)
    return make_step(plan, objective, optimizer, make_transform(plan))
