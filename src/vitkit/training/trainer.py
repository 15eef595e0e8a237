"""The training loop, on PyTorch-Ignite: it makes the steps and calls the callbacks, nothing else.

The state that decides the next step is in `Progress`, the model and the optimizer; everything
random is a function of (seed, step) or (seed, epoch, index). So a run that stops anywhere and goes
on ends with the same bits.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Generator, Iterable, Sequence
from typing import TYPE_CHECKING

from vitkit.data.loading.loader import Batch
from vitkit.training.state.registry import Progress
from vitkit.training.step import StepResult, TrainingStep, step_or_advice

if TYPE_CHECKING:
    from ignite.engine import Engine


class Callback:
    """One concern of a run, called at its events; a method that is not overridden does nothing.

    The callbacks of a list are called in its order. In a run of several processes each process has
    its own, and a method that communicates must be reached by all of them.
    """

    def on_start(self, trainer: Trainer) -> None:
        """Called once, before the first step of this process."""

    def before_epoch(self, trainer: Trainer) -> None:
        """Called before the first step of an epoch that this process makes."""

    def before_step(self, trainer: Trainer, batch: Batch) -> None:
        """Called with the batch of the next step; `trainer.progress.step` counts those before."""

    def after_step(self, trainer: Trainer, result: StepResult) -> None:
        """Called after a step, which `trainer.progress.step` includes."""

    def after_epoch(self, trainer: Trainer) -> None:
        """Called after the last step of an epoch."""

    def after_evaluation_batch(self, split: str) -> None:
        """Called after each batch of an evaluation, of validation or test."""

    def on_end(self, trainer: Trainer) -> None:
        """Called once, after the last step of this process."""


class Trainer:
    """Makes the steps that remain of a run.

    Args:
        training_step: the arithmetic of a step, with its optimizer.
        progress: where the run is; a resumed one goes on from there.
        batches: the batches of a range of steps.
        schedule: step -> learning rate.
        steps_per_epoch: optimizer steps of an epoch.
        epochs: of the whole schedule.
        last_step: where the run ends; at most `epochs * steps_per_epoch`.
        callbacks: called at every event in this order.

    Attributes:
        stopped: the reason why the run ended, where a callback gave one.
        is_ending: True where a callback has asked to end the run.
    """

    def __init__(
        self,
        training_step: TrainingStep,
        progress: Progress,
        batches: Callable[[range], Iterable[Batch]],
        *,
        schedule: Callable[[int], float],
        steps_per_epoch: int,
        epochs: int,
        last_step: int | None = None,
        callbacks: Sequence[Callback] = (),
    ) -> None:
        self.training_step, self.progress, self.batches = training_step, progress, batches
        self.schedule, self.steps_per_epoch, self.epochs = schedule, steps_per_epoch, epochs
        self.last_step = epochs * steps_per_epoch if last_step is None else last_step
        self.callbacks = callbacks
        self.stopped: str | None = None
        self.is_ending = False
        self._error: Exception | None = None
        self._engine: Engine | None = None

    @property
    def epoch(self) -> int:
        """The epoch of the last step, counted from 1."""
        return (self.progress.step - 1) // self.steps_per_epoch + 1

    @property
    def learning_rate(self) -> float:
        """The rate of the last step."""
        return self.schedule(self.progress.step - 1)

    def end(self, why: str | None = None, error: Exception | None = None) -> None:
        """End the run once all callbacks have been called for this event.

        Args:
            why: becomes `stopped`.
            error: to be raised then.
        """
        self.stopped, self.is_ending, self._error = why or self.stopped, True, error

    def run(self) -> None:
        """Make the steps that remain; raises what a callback gives to `end`, or raises itself."""
        self.is_ending, self._error = False, None
        if self.progress.unvalidated:  # a kill or a signal came between the last step and here
            self._call("after_epoch")
        self._call("on_start")
        remaining = range(self.progress.step, self.last_step)
        if remaining and not self.is_ending:
            self._run_steps(self.batches(remaining))
        self._call("on_end")

    def _run_steps(self, batches: Iterable[Batch]) -> None:
        from ignite.engine import Engine, Events  # a second, which no wrong setting waits for

        engine = self._engine = Engine(self._step)
        # whoever catches an error words it; Ignite would log it first
        engine.logger = logging.Logger("vitkit", level=logging.CRITICAL + 1)
        position = {"iteration": self.progress.step, "max_epochs": self.epochs}
        engine.load_state_dict(position | {"epoch_length": self.steps_per_epoch})
        engine.add_event_handler(Events.EPOCH_STARTED, lambda: self._call("before_epoch"))
        engine.add_event_handler(Events.ITERATION_COMPLETED, self._end_step)
        engine.add_event_handler(Events.EPOCH_COMPLETED, self._end_epoch)
        try:
            engine.run(batches)
        finally:  # ends loader processes at once, not when the collector comes
            self._engine = None
            if isinstance(batches, Generator):
                batches.close()

    def _step(self, engine: Engine, batch: Batch) -> StepResult:
        self._call("before_step", batch)
        step = self.progress.step
        self.training_step.set_learning_rate(self.schedule(step))
        result = step_or_advice(self.training_step, batch, step)
        self.progress.step += 1
        self.training_step.world.record_step(self.progress.step)
        # a step without finite numbers changed nothing, and has no loss to count
        if result.bad is None:
            self.progress.count_loss(result.loss)
        return result

    def _end_step(self, engine: Engine) -> None:
        self._call("after_step", engine.state.output)  # what `_step` returned

    def _end_epoch(self) -> None:
        self.progress.unvalidated = True  # until `after_epoch` closes it
        self._call("after_epoch")

    def _call(self, event: str, *arguments: object) -> None:
        for callback in self.callbacks:
            getattr(callback, event)(self, *arguments)
        if self._error is not None:
            raise self._error
        if self.is_ending and self._engine is not None:
            self._engine.terminate()
