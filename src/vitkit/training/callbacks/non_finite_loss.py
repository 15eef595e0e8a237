"""A loss, gradient or weight that is not finite (NaN, infinity), and a loss that diverges."""

from __future__ import annotations

import math

from vitkit.distributed import local_tensor
from vitkit.errors import NonFiniteError
from vitkit.training.run import Run
from vitkit.training.step import StepResult
from vitkit.training.trainer import Callback, Trainer

MOST_SKIPPED = 3
"""After so many steps in a row without a finite number, `on_nan: skip` stops the run as well."""


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
        # with a far too high rate weights overflow although the gradient is finite
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
        # ln K is a bound for cross-entropy only
        labels_alone = config.loss == "cross-entropy" and config.teacher is None
        # of two classes twice ln K is 1.39, which a few bad steps may exceed
        if labels_alone and train_loss > max(2 * chance, chance + 2):
            raise NonFiniteError(
                f"training loss {train_loss:.3g} after epoch {trainer.epoch}; guessing gives "
                f"{chance:.3g}; {self.run.folder.last_state_hint()}; try a --lr below "
                f"{config.lr:g} (--find-lr searches for one)"
            )


def describe_bad_step(run: Run, result: StepResult, rate: float) -> str:
    """Name the non-finite value of the last step, with the images of its batch."""
    step, plan = run.progress.step - 1, run.plan
    indices, where = plan.steps.indices(step), ""
    if run.world.size > 1 and result.rank is not None:
        # each of n processes has every n-th image of the batch
        indices = indices[result.rank :: run.world.size]
        where = f" on rank {result.rank}"
    split = plan.dataset.splits["train"]
    names = ", ".join(split.name(int(i)) for i in indices[:3])
    value = result.loss if result.bad == "loss" else result.norm
    return (
        f"the {result.bad} is {value}{where} at step {step} (lr {rate:.3g}, "
        f"loss {result.loss:.3g}, gradient norm {result.norm:.3g}, images {names} ...)"
    )
