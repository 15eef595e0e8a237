"""The ends of a run: its last step, patience, a signal, numbers that are not finite, divergence."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass

from vitkit.distributed import local_tensor
from vitkit.errors import NonFiniteError
from vitkit.io.atomic import write_bytes
from vitkit.messages import plural
from vitkit.training.config.yaml_files import to_yaml
from vitkit.training.defaults.schedule import limit_warmup
from vitkit.training.run import Run
from vitkit.training.step import StepResult
from vitkit.training.trainer import Callback, Trainer

MOST_SKIPPED = 3
"""After so many steps in a row without a finite number, `on_nan: skip` stops the run as well."""
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
        # an epoch that is still to be validated may be the better one
        if not trainer.progress.unvalidated and (why := self.out_of_patience()):
            trainer.end(why)

    def after_step(self, trainer: Trainer, result: StepResult) -> None:
        """End within an epoch."""
        step, world = trainer.progress.step, self.run.world
        if step % trainer.steps_per_epoch == 0:
            return  # `after_epoch` looks at the same
        # with the results of a step all processes know of a signal to one
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
    """The time at which the training of a run must be over.

    Attributes:
        ends: by the clock, in seconds.
        clock: returns the current time, in seconds.
    """

    ends: float
    clock: Callable[[], float]


class KeepDeadline(Callback):
    """Plans the schedule anew after each epoch, so that it ends with the time of the run.

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
        """End the run if its time is over; else plan for the epochs that fit."""
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
        # far fewer epochs than planned must not be warm-up alone
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


class HandleBadNumbers(Callback):
    """Skips a step without finite numbers, or stops the run; refuses a loss that diverges.

    Args:
        run: the run; `on_nan` says which.
    """

    def __init__(self, run: Run) -> None:
        self.run = run

    def after_step(self, trainer: Trainer, result: StepResult) -> None:
        """Count a step that changed nothing. Raises `NonFiniteError` where the run stops."""
        self._count(trainer, result)
        step = trainer.progress.step
        is_checked = step == trainer.last_step
        if step % trainer.steps_per_epoch == 0:  # validation would show it
            is_checked = "val" not in self.run.plan.dataset.splits
        if is_checked:
            self._refuse_bad_weights(trainer)

    def _count(self, trainer: Trainer, result: StepResult) -> None:
        progress, log = trainer.progress, self.run.log
        if result.overflow:
            step = progress.step - 1
            log.info(f"float16: the gradient overflows at step {step}; lowering the loss scale")
        if result.bad is None:
            return
        progress.skipped += 1
        progress.skipped_in_a_row += 1
        text = describe_bad_step(self.run, result, trainer.learning_rate)
        stops = self.run.plan.config.on_nan == "stop"
        # the step changed nothing, so it is not counted: a resumed run makes it again
        if stops or progress.skipped_in_a_row >= MOST_SKIPPED:
            progress.step -= 1
            mend = "try a lower --lr (--find-lr searches for one)"
            if self.run.plan.precision != "off":
                mend += " or --amp off"
            raise NonFiniteError(f"{text}; {self.run.folder.last_state_hint()}; {mend}")
        log.info(f"{text}; step skipped ({progress.skipped} so far)")

    def _refuse_bad_weights(self, trainer: Trainer) -> None:
        """Raise `NonFiniteError` for weights that are not finite numbers, in all processes."""
        # a rate far too high overflows them with a gradient that is finite
        weights = (local_tensor(weight) for weight in self.run.model.parameters())
        is_bad = not all(bool(weight.isfinite().all()) for weight in weights)
        if self.run.world.all_reduce_max(int(is_bad)):
            raise NonFiniteError(
                f"the weights are not finite after step {trainer.progress.step} (lr "
                f"{trainer.learning_rate:.3g}); {self.run.folder.last_state_hint()}; try a lower "
                "--lr (--find-lr searches for one)"
            )

    def after_epoch(self, trainer: Trainer) -> None:
        """Raise `NonFiniteError` far above ln K, the cross-entropy of a uniform guess."""
        config, chance = self.run.plan.config, math.log(self.run.plan.spec.num_classes)
        train_loss = trainer.progress.mean_loss
        # ln K bounds no other loss
        labels_alone = config.loss == "cross-entropy" and config.teacher is None
        # of two classes twice ln K is 1.39, which a few bad steps may exceed
        if labels_alone and train_loss > max(2 * chance, chance + 2):
            raise NonFiniteError(
                f"training loss {train_loss:.3g} after epoch {trainer.epoch}; guessing gives "
                f"{chance:.3g}; {self.run.folder.last_state_hint()}; try a --lr below "
                f"{config.lr:g} (--find-lr searches for one)"
            )


def describe_bad_step(run: Run, result: StepResult, rate: float) -> str:
    """Name what was not finite in the last step, with the images of its batch."""
    step, plan = run.progress.step - 1, run.plan
    indices, where = plan.steps.indices(step), ""
    if run.world.size > 1 and result.rank is not None:
        # every process has each n-th image of the batch
        indices = indices[result.rank :: run.world.size]
        where = f" on rank {result.rank}"
    split = plan.dataset.splits["train"]
    names = ", ".join(split.name(int(i)) for i in indices[:3])
    value = result.loss if result.bad == "loss" else result.norm
    return (
        f"the {result.bad} is {value}{where} at step {step} (lr {rate:.3g}, "
        f"loss {result.loss:.3g}, gradient norm {result.norm:.3g}, images {names} ...)"
    )
