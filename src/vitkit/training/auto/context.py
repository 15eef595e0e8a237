"""The context of a search: data, weights and settings that all candidates share."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, runtime_checkable

import torch

from vitkit.data.datasets.split import Split
from vitkit.devices import on_device
from vitkit.errors import CheckpointError, SettingError
from vitkit.evaluation.evaluation_loop import predict_batches
from vitkit.training.auto.results import CandidateResult, Clock
from vitkit.training.callbacks.early_stopping import Deadline
from vitkit.training.config.field_types import Settings
from vitkit.training.config.merging import layered
from vitkit.training.config.sections.fine_tuning import CATALOGUE
from vitkit.training.config.train_config import TrainConfig
from vitkit.training.defaults.model_size import ImageStatistics
from vitkit.training.result import TrainResult
from vitkit.training.run_plan import Plan
from vitkit.training.setup.make_plan import make_plan
from vitkit.weights.load import load

PIXEL_SPEC = {"image_size": 16, "patch_size": 16}
"""Size to which images are resized before their pixels are compared."""


@runtime_checkable
class Train(Protocol):
    """The function `train`: makes a run from its settings, which ends by a deadline."""

    def __call__(self, config: TrainConfig, *, deadline: Deadline | None = None) -> TrainResult:
        """Make the run of these settings.

        Args:
            config: every setting.
            deadline: the end of its training; without one, all epochs are made.
        """


@dataclass
class SearchContext:
    """Data, weights and settings that all candidates of a search share.

    Attributes:
        settings: the user's settings, without those that the search decides.
        pretrained: the weights to start from, if any.
        plan: plan of a run, for the data and the device.
        statistics: statistics of the training images.
        setup_seconds: duration of making a plan.
        log: called with a line for every measurement.
        clock: the current time, in seconds.
        start_run: makes the run of a candidate.
    """

    settings: Settings
    pretrained: str | None
    plan: Plan
    statistics: ImageStatistics
    setup_seconds: float
    log: Callable[[str], None]
    clock: Clock
    start_run: Train

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

        Raises:
            SettingError: a value out of range.
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
        # preprocessed as the file says, so that `vitkit eval` gives the same score
        batches = predict_batches(
            model, self.val, stored.preprocess, device=plan.device, workers=plan.workers
        )
        correct = torch.cat([logits.argmax(1).cpu() == labels for logits, labels in batches])
        seconds = self.clock() - started
        return CandidateResult(name, description, trained, correct.numpy(), weights, seconds)


def make_context(
    settings: Settings, log: Callable[[str], None], clock: Clock, train: Train
) -> SearchContext:
    """Open and check the data, and the weights to start from, if any.

    Args:
        settings: those of the user that all candidates share.
        log: called with a line for every measurement.
        clock: the current time, in seconds.
        train: makes a run.

    Raises:
        SettingError, DataError, DeviceError: as for `make_plan`; or data without validation images.
        CheckpointError: weights to start from that cannot be read.
    """
    started = clock()
    pretrained = settings.pop("pretrained", None)
    plan: Plan | None = None
    if pretrained is not None:
        try:
            plan = _make_plan(settings, {"pretrained": pretrained})
        except CheckpointError as error:
            if pretrained != CATALOGUE:  # a file that the user named must be readable
                raise
            log(
                f"no published weights can be reached ({error}); training from random weights "
                "instead"
            )
            pretrained = None
            settings.pop("model", None)
    if plan is None:  # from random weights: nearest neighbours compare small images
        plan = _make_plan(settings, {"spec": PIXEL_SPEC, "fit": "squash"})
    for line in plan.notes:  # not what was chosen: the candidates choose for themselves
        log(line)
    if "val" not in plan.dataset.splits:
        raise SettingError(
            "--auto chooses by the validation split, and the data have none; raise "
            "--val-fraction above 0"
        )
    statistics = ImageStatistics.of(plan.dataset.splits["train"])
    log(statistics.describe())
    duration = clock() - started
    return SearchContext(settings, pretrained, plan, statistics, duration, log, clock, train)


def _make_plan(settings: Settings, layer: Settings) -> Plan:
    # of no steps: the plan is for the data, the device and the weights
    steps = {"batch_size": 1, "epochs": 1}
    return make_plan(TrainConfig(**layered(settings, steps, layer)))
