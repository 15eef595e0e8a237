"""Candidates that train: fine-tuning, and a model from scratch, in the time that is left."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from vitkit.messages import plural
from vitkit.training.auto.context import SearchContext
from vitkit.training.auto.heuristics import SIZES, scratch_settings
from vitkit.training.auto.results import CandidateResult, Clock
from vitkit.training.auto.throughput import Throughput, measure_throughput
from vitkit.training.config.field_types import Settings
from vitkit.training.recipes.transfer import finetune
from vitkit.training.run_plan import Plan
from vitkit.training.setup.make_plan import make_plan
from vitkit.training.trainer import Callback, Trainer
from vitkit.training.tuning.batch_size import limit_batch_size
from vitkit.weights.load import load

FINETUNE_EPOCHS, FINETUNE_STEPS = 20, 500
"""Fine-tuning needs no more than the longer: the recipe's epochs, or AugReg's 500 steps."""
SCRATCH_EPOCHS = 300
"""From scratch, more epochs than this gained little in the papers on small data."""


@dataclass(frozen=True)
class TrainingOption:
    """One model that a candidate may train.

    Attributes:
        settings: all settings but the epochs.
        epochs: epochs that must fit into the time; otherwise a smaller model is used.
    """

    settings: Settings
    epochs: int = 0


@dataclass
class TrainingCandidate:
    """Training for as many epochs as the time allows.

    Attributes:
        context: context of the search.
        name: name of the candidate.
        description: the candidate in a word or two.
        options: models from large to small; the first that fits is used, otherwise the last.
        max_epochs: steps of an epoch -> epochs beyond which training gains little.
        leaves_weights: True.
    """

    context: SearchContext
    name: str
    description: str
    options: Sequence[TrainingOption]
    max_epochs: Callable[[int], int]
    leaves_weights: bool = True
    _measured: dict[int, tuple[Plan, Throughput]] = field(default_factory=dict)

    def minimum_seconds(self) -> float:
        """Measure the time for one epoch of the smallest model."""
        _, throughput = self._measure(len(self.options) - 1)
        return throughput.minimum_seconds

    def run(self, folder: Path, seconds: float) -> CandidateResult:
        """Train a model that fits into the time, and end in time."""
        context = self.context
        started = context.clock()
        number = self._fitting_option(seconds)
        settings = self.options[number].settings
        plan, throughput = self._measure(number)
        left = seconds - (context.clock() - started)
        # more epochs than this would gain little
        most = self.max_epochs(plan.steps.steps_per_epoch)
        epochs = max(1, min(most, throughput.epochs(left)))
        reason = "as many as pay" if epochs == most else "to fill the time"
        context.log(
            f"{self.name}: {throughput.images_per_s:,.0f} images/s, {throughput.epoch:.2g} s an "
            f"epoch; {plural(epochs, 'epoch')}, {reason}"
        )
        output = throughput.arithmetic | {"output": str(folder)}
        config = context.config(settings, with_epochs(settings, epochs), output)
        # measured speeds may be wrong, and the budget is kept all the same
        deadline = context.clock() + left
        result = context.start_run(config, [lambda: TimeLimit(deadline, context.clock)])
        # Fewer than planned if the time was over.
        trained_epochs = round(load(result.last).metadata["epoch"])
        duration = plural(epochs, "epoch")
        if trained_epochs != epochs:
            duration = f"{trained_epochs} of {duration}"
        spec = plan.spec
        size = f"width {spec.width}, {plural(spec.depth, 'block')}"
        description = f"{self.description}, {size}, {duration}"
        return context.evaluate(self.name, description, result.best, started)

    def _fitting_option(self, seconds: float) -> int:
        """Return the index of the largest model that fits into the time."""
        deadline = self.context.clock() + seconds
        for number, option in enumerate(self.options[:-1]):
            plan, throughput = self._measure(number)
            # Measuring takes time, so the clock is read again.
            if throughput.epochs(deadline - self.context.clock()) >= option.epochs:
                return number
            self.context.log(
                f"{self.name}: width {plan.spec.width} with {plural(plan.spec.depth, 'block')} "
                f"takes {throughput.epoch:.2g} s an epoch; {option.epochs} epochs do not fit"
            )
        return len(self.options) - 1

    def _measure(self, number: int) -> tuple[Plan, Throughput]:
        """Return the plan and the throughput of an option; it is measured once."""
        if number not in self._measured:
            settings = self.options[number].settings
            plan = make_plan(self.context.config(settings, with_epochs(settings, 1)))
            # Kept: the check of the budget measured the smallest one already.
            self._measured[number] = plan, measure_throughput(plan, self.context)
        return self._measured[number]


def with_epochs(settings: Settings, epochs: int) -> Settings:
    """Return the epochs and a warm-up of at most a tenth of them."""
    return {"epochs": epochs, "warmup_epochs": min(settings["warmup_epochs"], epochs / 10)}


class TimeLimit(Callback):
    """A callback that ends a run after the epoch in which its time is over.

    Args:
        deadline: end of its time, by the clock.
        clock: the current time.
    """

    def __init__(self, deadline: float, clock: Clock) -> None:
        self._deadline = deadline
        self._clock = clock

    def after_epoch(self, trainer: Trainer) -> None:
        """End the run if its time is over, unless this was its last epoch."""
        if self._clock() > self._deadline and trainer.progress.step < trainer.last_step:
            trainer.end(f"epoch {trainer.epoch}, when the budget was used up")


def finetuning_candidate(context: SearchContext) -> TrainingCandidate:
    """Make the candidate that trains all pretrained weights, by the recipe `finetune`."""
    recipe = finetune()
    side = min(context.plan.spec.image_size)
    settings = recipe | context.statistics.augmentation(side)
    settings |= {
        "pretrained": context.pretrained,
        "model": context.settings.get("model"),
        "batch_size": limit_batch_size(len(context.train), recipe["batch_size"]),
    }

    def max_epochs(steps: int) -> int:
        return max(FINETUNE_EPOCHS, math.ceil(FINETUNE_STEPS / steps))

    options = [TrainingOption(settings)]
    return TrainingCandidate(context, "finetune", "all weights", options, max_epochs)


def scratch_candidate(context: SearchContext) -> TrainingCandidate:
    """Make the candidate that trains from scratch, with sizes that fit the number of images."""
    images = len(context.train)
    options = []
    for size in SIZES:
        if size.images > images:  # a large model would overfit
            continue
        settings = scratch_settings(size, context.statistics)
        settings["batch_size"] = limit_batch_size(images, settings["batch_size"])
        options.append(TrainingOption(settings, size.epochs))
    return TrainingCandidate(
        context, "scratch", "from noise", options, lambda steps: SCRATCH_EPOCHS
    )
