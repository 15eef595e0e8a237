"""The ends of a run: early stopping by `patience`, last step, signal, deadline."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass

from vitkit.io.atomic import write_bytes
from vitkit.messages import plural
from vitkit.training.config.config_yaml import to_yaml
from vitkit.training.defaults.schedule import limit_warmup
from vitkit.training.run import Run
from vitkit.training.step import StepResult
from vitkit.training.trainer import Callback, Trainer

WRITTEN_EVERY = 5.0
"""Seconds after which a new number of epochs is written to config.yaml again."""


class Stop(Callback):
    """Ends the run at its last step, when patience is over, or when a signal came.

    It comes before `Save` in the list, which writes what an ending run leaves.

    Args:
        run: the run.
    """

    def __init__(self, run: Run) -> None:
        self.run = run

    def on_start(self, trainer: Trainer) -> None:
        """End a resumed run whose patience was over already."""
        # an epoch that is not validated yet may be better
        if not trainer.progress.unvalidated and (why := self.out_of_patience()):
            trainer.end(why)

    def after_step(self, trainer: Trainer, result: StepResult) -> None:
        """End within an epoch."""
        step, world = trainer.progress.step, self.run.world
        if step % trainer.steps_per_epoch == 0:
            return  # `after_epoch` checks the same
        # the results of a step tell all processes of a signal to one of them
        signum = result.signum if world.size > 1 else self.run.stop.signum
        if signum:
            trainer.end(error=self.run.interrupted(signum))
        elif step == trainer.last_step:
            trainer.end()

    def after_epoch(self, trainer: Trainer) -> None:
        """End after an epoch."""
        why = self.out_of_patience()
        if signum := self.run.world.all_reduce_max(self.run.stop.signum or 0):
            trainer.end(why, error=self.run.interrupted(signum))
        elif why or trainer.progress.step == trainer.last_step:
            trainer.end(why)

    def out_of_patience(self) -> str | None:
        """Return why the run ends before its last step, where its patience is over."""
        patience, progress = self.run.plan.config.patience, self.run.progress
        if patience is None or progress.stale < patience:
            return None
        if progress.step >= self.run.plan.total_steps:
            return None
        return f"{plural(progress.stale, 'epoch')} without a higher validation top-1"


@dataclass(frozen=True)
class Deadline:
    """The time at which training must end.

    Attributes:
        ends: by the clock, in seconds.
        clock: returns the current time, in seconds.
    """

    ends: float
    clock: Callable[[], float]


class KeepDeadline(Callback):
    """Rescales the learning rate schedule after each epoch, so that it ends at the deadline.

    The epochs of the settings are the most; as many are made as fit, by the mean duration of those
    so far. The learning rate follows the number of epochs, so that it is low at the end.

    Args:
        run: the run; its plan and config.yaml get the number of epochs.
        deadline: the end of its time.
    """

    def __init__(self, run: Run, deadline: Deadline) -> None:
        self.run, self.deadline = run, deadline
        self._most = run.plan.config.epochs
        self._warmup = run.plan.config.warmup_epochs
        self._first_end: float | None = None
        self._first_epoch = 0
        self._written = time.monotonic()

    def after_epoch(self, trainer: Trainer) -> None:
        """End the run at the deadline; else plan for the epochs that fit."""
        if trainer.progress.step >= trainer.last_step:
            return
        now, epoch = self.deadline.clock(), trainer.epoch
        left = self.deadline.ends - now
        if left <= 0:
            trainer.end(f"epoch {epoch}, when the budget was used up")
            return
        if self._first_end is None:  # the first epoch is slower than the others
            self._first_end, self._first_epoch = now, epoch
            return
        each = (now - self._first_end) / (epoch - self._first_epoch)
        more = math.floor(left / each) if each > 0 else self._most
        # there is time left, so one more epoch is begun even if it takes longer
        self._plan(trainer, min(self._most, epoch + max(1, more)))

    def on_end(self, trainer: Trainer) -> None:
        """Write the number of epochs."""
        self._write()

    def _plan(self, trainer: Trainer, epochs: int) -> None:
        plan = self.run.plan
        if epochs == plan.config.epochs:
            return
        # far fewer epochs than planned must not be all warm-up
        warmup = limit_warmup(self._warmup, epochs)
        plan = plan.with_settings({"epochs": epochs, "warmup_epochs": warmup})
        self.run.plan = plan
        trainer.epochs, trainer.last_step = epochs, plan.last_step
        trainer.schedule = plan.learning_rate
        self.run.log.set_total(plan.last_step)
        if time.monotonic() - self._written >= WRITTEN_EVERY:
            self._write()

    def _write(self) -> None:
        folder = self.run.folder
        stored = self.run.plan.settings_to_store(folder.root)
        write_bytes(folder.config, to_yaml(stored.to_json()).encode())
        self._written = time.monotonic()
