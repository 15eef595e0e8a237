"""Candidates that train: fine-tuning, and a model from scratch, in the time that is left."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from vitkit.messages import plural
from vitkit.training.auto.candidate_time import Throughput, measure_throughput
from vitkit.training.auto.context import SearchContext
from vitkit.training.auto.results import CandidateResult
from vitkit.training.callbacks.early_stopping import Deadline
from vitkit.training.config.field_types import Settings
from vitkit.training.defaults.model_size import SIZES, scratch_settings
from vitkit.training.defaults.schedule import (
    FINETUNE_EPOCHS,
    MOST_EPOCHS,
    STEPS,
    limit_batch_size,
    limit_warmup,
)
from vitkit.training.recipes.transfer import finetune
from vitkit.training.run_plan import Plan
from vitkit.training.setup.make_plan import make_plan
from vitkit.weights.load import load


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
        epochs = max(1, min(most, throughput.most_epochs(left)))
        fit = throughput.epochs(left) >= most
        reason = "as more would gain little"
        if not fit:  # `KeepDeadline` plans anew after each epoch
            reason = "as many as fit into the time; their number follows the speed of those done"
        context.log(
            f"{self.name}: {throughput.images_per_s:,.0f} images/s, {throughput.epoch:.2g} s an "
            f"epoch; up to {plural(epochs, 'epoch')}, {reason}"
        )
        output = throughput.arithmetic | {"output": str(folder)}
        config = context.config(settings, with_epochs(settings, epochs), output)
        # measured speeds may be wrong, and the budget is kept all the same
        ends = context.clock() + left - throughput.evaluation
        result = context.start_run(config, deadline=Deadline(ends, context.clock))
        last = load(result.last).metadata
        planned, trained_epochs = last["recipe"]["epochs"], round(last["epoch"])
        duration = plural(planned, "epoch")
        if trained_epochs != planned:  # the time was over within one epoch
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
    return {"epochs": epochs, "warmup_epochs": limit_warmup(settings["warmup_epochs"], epochs)}


def finetuning_candidate(context: SearchContext) -> TrainingCandidate:
    """Make the candidate that trains all pretrained weights, by the recipe `finetune`."""
    recipe = finetune()
    side = min(context.plan.spec.image_size)
    settings = recipe | context.statistics.augmentation(side)
    settings |= {
        "pretrained": context.pretrained,
        "model": context.settings.get("model"),
        "batch_size": limit_batch_size(len(context.train), recipe["batch_size"]),
        "last_batch": "fill",
    }

    def max_epochs(steps: int) -> int:
        # no more than the longer: the recipe's epochs, or AugReg's 500 steps
        return max(FINETUNE_EPOCHS, math.ceil(STEPS / steps))

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
        settings["last_batch"] = "fill"
        options.append(TrainingOption(settings, size.epochs))
    return TrainingCandidate(
        context, "scratch", "from random weights", options, lambda steps: MOST_EPOCHS
    )
