"""The context of a search: data, weights and settings that all candidates share."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from vitkit.data.sources.open import Split
from vitkit.devices import on_device
from vitkit.evaluation.predict import predict_batches
from vitkit.training.auto.heuristics import ImageStatistics
from vitkit.training.auto.results import CandidateResult
from vitkit.training.auto.search import Clock
from vitkit.training.config.field_types import Settings
from vitkit.training.config.merging import layered
from vitkit.training.config.train_config import TrainConfig
from vitkit.training.optimization.precision import wait_for
from vitkit.training.setup import Plan
from vitkit.weights.load import load

TIMED_IMAGES = 256
"""Images that are timed."""


@dataclass
class SearchContext:
    """Data, weights and settings that all candidates of a search share.

    Attributes:
        settings: the user's settings, without those that the search decides.
        pretrained: the weights to start from, if any.
        plan: plan of a run, for the data and the device.
        statistics: statistics of the training images.
        setup_seconds: duration of making a plan.
        say: called with a line for every measurement.
        clock: the current time, in seconds.
    """

    settings: Settings
    pretrained: str | None
    plan: Plan
    statistics: ImageStatistics
    setup_seconds: float
    say: Callable[[str], None]
    clock: Clock

    @property
    def train(self) -> Split:
        """The training images."""
        return self.plan.dataset.splits["train"]

    @property
    def val(self) -> Split:
        """The validation images."""
        return self.plan.dataset.splits["val"]

    def config(self, *layers: Settings, **required: object) -> TrainConfig:
        """Make the settings of a candidate.

        The test split is not evaluated, and no time is spent on image grids.

        Args:
            *layers: settings of the candidate, such as a recipe; the user's settings replace them.
            **required: settings of the candidate that replace the user's.
        """
        # Only the winner is evaluated on test, after the search.
        fixed = {"test": False, "log_examples": False, "log_histograms": False}
        return TrainConfig(**layered(*layers, self.settings, fixed | required))

    def evaluate(
        self, name: str, description: str, weights: Path, started: float, trained: int | None = None
    ) -> CandidateResult:
        """Evaluate weights on the validation images.

        Args:
            name: name of the candidate.
            description: the candidate in a few words.
            weights: file of the weights.
            started: start of the candidate, by the clock.
            trained: number of trained parameters; all of the model by default.
        """
        stored = load(weights)
        if trained is None:
            trained = sum(parameter.numel() for parameter in stored.model.parameters())
        plan = self.plan
        model = on_device(stored.model, plan.device)
        batches = predict_batches(
            model, self.val, stored.preprocess, device=plan.device, workers=plan.workers
        )
        correct = torch.cat([logits.argmax(1).cpu() == labels for logits, labels in batches])
        seconds = self.clock() - started
        return CandidateResult(name, description, trained, correct.numpy(), weights, seconds)


def seconds_per_image(forward: Callable[[Tensor], Tensor], plan: Plan, clock: Clock) -> float:
    """Time a forward function on training images, with their loading; the mean in seconds."""
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
