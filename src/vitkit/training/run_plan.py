"""`Plan`: the resolved inputs of a run: settings, data, model spec, steps, device."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from vitkit.data.checks.check import Report
from vitkit.data.datasets.dataset import Dataset
from vitkit.data.loading.loader import TrainingSteps
from vitkit.messages import plural
from vitkit.spec import Preprocess, ViTSpec
from vitkit.training.config.field_types import Settings
from vitkit.training.config.passed_objects import resume_command
from vitkit.training.config.run_config import RunConfig
from vitkit.training.distillation import Teacher
from vitkit.training.optimization.precision import Precision
from vitkit.training.optimization.schedule import learning_rate


@dataclass(frozen=True)
class Plan:
    """A run that is ready to start.

    Attributes:
        config: the settings with all defaults resolved; `auto` stays until the trials.
        dataset: train, val where there is one, test where there is one; every image decodes.
        spec: the model, its head as wide as there are classes.
        preprocess: the evaluation transform, which goes into the checkpoints.
        steps: every training batch of the run.
        device: where the model trains.
        workers: loader processes.
        notes: lines to print before the start.
        chosen: one more line, on the settings that follow from the data; empty where all are given.
        weights: initial weights; None for random ones, and for a resumed run, whose state
            has them.
        teacher: a model to learn from besides the labels, on the device.
        check: the report of the check of the images; None where they were not checked.
    """

    config: RunConfig
    dataset: Dataset
    spec: ViTSpec
    preprocess: Preprocess
    steps: TrainingSteps
    device: torch.device
    workers: int
    notes: tuple[str, ...]
    chosen: str = ""
    weights: Mapping[str, Tensor] | None = None
    teacher: Teacher | None = None
    check: Report | None = None

    @property
    def total_steps(self) -> int:
        """Optimizer steps of the whole schedule."""
        return self.config.epochs * self.steps.steps_per_epoch

    @property
    def last_step(self) -> int:
        """Where the run ends: the schedule's end, or `max_steps`."""
        # a run that is resumed with fewer epochs may end before an earlier `max_steps`
        return min(self.total_steps, self.config.max_steps or self.total_steps)

    @property
    def precision(self) -> Precision:
        """The precision of the steps, once it is decided; a probe computes in float32."""
        amp = self.config.amp
        if self.config.probe is not None:
            return "off"
        # `tune_settings` replaces `auto` before a run is built
        assert amp != "auto", "the precision is decided before any step"
        return amp

    def end_in_words(self, step: int) -> str:
        """Return the planned length of the run, in words.

        Args:
            step: the steps done; more than planned for a finished run that is resumed with fewer.
        """
        epochs, rest = divmod(step, self.steps.steps_per_epoch)
        if rest or step < self.total_steps:
            return plural(step, "step")
        return "1 epoch" if epochs == 1 else f"all {epochs} epochs"

    def learning_rate(self, step: int) -> float:
        """Return the learning rate of a step, counted from 0."""
        return learning_rate(
            step,
            schedule=self.config.sched,
            peak=self.config.lr,
            low=self.config.min_lr,
            warmup=round(self.config.warmup_epochs * self.steps.steps_per_epoch),
            total=self.total_steps,
        )

    def python_call_to_resume(self, root: Path) -> str | None:
        """Return the call that resumes a run with objects of Python; `None` for any other run.

        Args:
            root: folder of the run.
        """
        return resume_command(self.config, root)

    def with_settings(self, settings: Settings) -> Plan:
        """Return the plan with other settings, such as the results of tuning."""
        # the batch size decides which images a batch has
        steps = self.steps
        if "batch_size" in settings:
            steps = steps.with_batch_size(settings["batch_size"])
        return replace(self, config=replace(self.config, **settings), steps=steps)

    def settings_to_store(self, root: Path) -> RunConfig:
        """Return the settings for the config.yaml of a run folder, without those of the call."""
        return replace(self.config, output=str(root), resume=None, overwrite=False)

    def without_weights(self) -> Plan:
        """Return the plan without the initial weights, once the model has them."""
        return replace(self, weights=None)
