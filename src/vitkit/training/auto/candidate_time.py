"""Measurement of how long a candidate takes on this machine."""

from __future__ import annotations

import math
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from vitkit.evaluation.evaluation_loop import predict_batches
from vitkit.training.auto.context import SearchContext
from vitkit.training.auto.results import Clock
from vitkit.training.config.field_types import Settings
from vitkit.training.optimization.precision import wait_for
from vitkit.training.run_plan import Plan
from vitkit.training.setup.initial_weights import make_model
from vitkit.training.tuning.trial import trial
from vitkit.training.tuning.tune import tune_settings
from vitkit.weights.formats.vitkit import save

TIMED_IMAGES = 256
"""Images that are timed."""
SHARE = 0.85
"""Part of the remaining time that must suffice; a machine may be slower than measured."""
WARM_UP, TIMED = 1, 4
"""Steps before the timed ones, and timed steps."""
FILES = 6
"""Size of the files that an epoch writes, in sizes of the weights: best and last weights, and a
state with two moments."""


@dataclass(frozen=True)
class Throughput:
    """The measured speed of a run on this machine.

    Attributes:
        epoch: seconds of an epoch, with its validation and its files.
        rest: seconds before the first and after the last epoch.
        evaluation: those after it.
        images_per_s: images per second in its steps.
        arithmetic: the settings that it was measured with.
    """

    epoch: float
    rest: float
    evaluation: float
    images_per_s: float
    arithmetic: Settings

    def epochs(self, seconds: float) -> int:
        """Return how many epochs fit into a time, with a reserve."""
        return math.floor((seconds * SHARE - self.rest) / self.epoch)

    def most_epochs(self, seconds: float) -> int:
        """Return how many epochs may fit into a time, if the machine is faster than measured."""
        return math.ceil((seconds - self.rest) / self.epoch / SHARE)

    @property
    def minimum_seconds(self) -> float:
        """The seconds for one epoch, with the same reserve."""
        return (self.epoch + self.rest) / SHARE


def measure_throughput(plan: Plan, context: SearchContext) -> Throughput:
    """Time a few steps of a copy of the model, their loading, validation, and writing weights.

    Args:
        plan: plan of the run, whose settings may still have `auto`.
        context: has the clock, and the seconds that the plan took.
    """
    clock = context.clock
    with torch.random.fork_rng():
        torch.manual_seed(plan.config.seed)  # the weights that the run will start from
        model = make_model(plan.spec, plan.weights, plan.config, plan.device)
        plan = plan.with_settings(tune_settings(plan, model, context.log))
        step = trial(plan, model)
        loading = training = 0.0
        for number in range(WARM_UP + TIMED):
            start = clock()
            batch = plan.steps[number % plan.total_steps]  # loads in this process
            loaded = clock()
            step(batch, number)
            wait_for(plan.device)
            if number >= WARM_UP:
                loading += loaded - start
                training += clock() - loaded
    # Workers load batches in parallel.
    step_seconds = (training + loading / max(1, plan.workers)) / TIMED
    evaluation = seconds_per_image(model.eval(), plan, clock)
    start = clock()
    with tempfile.TemporaryDirectory(prefix="vitkit-") as name:
        save(Path(name) / "model.safetensors", model, preprocess=plan.preprocess)
    writing = FILES * (clock() - start)
    sizes = {name: len(split) for name, split in plan.dataset.splits.items()}
    epoch = plan.steps.steps_per_epoch * step_seconds + sizes["val"] * evaluation + writing
    end = (3 * sizes["val"] + sizes.get("test", 0)) * evaluation + writing
    rest = context.setup_seconds + end
    arithmetic = {name: getattr(plan.config, name) for name in ("amp", "attention_kernel")}
    return Throughput(epoch, rest, end, plan.config.batch_size / step_seconds, arithmetic)


def seconds_per_image(forward: Callable[[Tensor], Tensor], plan: Plan, clock: Clock) -> float:
    """Time a forward function on training images, with their loading.

    Args:
        forward: images (B, C, H, W) on the plan's device -> any outputs.
        plan: has the images and the device.
        clock: the current time, in seconds.

    Returns:
        The mean of an image, in seconds.
    """
    train = plan.dataset.splits["train"]
    sample = train.subset(np.arange(min(len(train), TIMED_IMAGES)))
    batches = predict_batches(forward, sample, plan.preprocess, batch_size=64, device=plan.device)
    next(batches)  # warms up
    # Only the later batches are timed.
    started = clock()
    count = sum(len(labels) for _, labels in batches)
    if count == 0:  # a single batch: it is evaluated again
        batches = predict_batches(forward, sample, plan.preprocess, device=plan.device)
        count = sum(len(labels) for _, labels in batches)
    wait_for(plan.device)
    return (clock() - started) / count
