"""The training loop: it makes the steps and calls the callbacks, nothing else.

The state that decides the next step is in `Progress`, the model and the optimizer; everything
random is a function of (seed, step) or (seed, epoch, index). So a run that is stopped anywhere and
resumed ends with the same bits.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import closing

from vitkit import devices, errors
from vitkit.data.loading.loader import Batch
from vitkit.training.state.registry import Progress
from vitkit.training.step import StepResult, TrainingStep


class Callback:
    """Part of a run, called at its events; a method that is not overridden does nothing.

    The callbacks of a list are called in its order. In a run of several processes each process has
    its own, and a method that communicates must be reached by all of them. An exception ends the
    run as `Trainer.end(error=...)` does; in a run of several processes it is raised at once, and
    the run is resumed from its last state.
    """

    def on_start(self, trainer: Trainer) -> None:
        """Called once, before the first step of this process."""

    def before_epoch(self, trainer: Trainer) -> None:
        """Called before the first step of an epoch that this process makes."""

    def before_step(self, trainer: Trainer, batch: Batch) -> None:
        """Called with the batch of the next step; `trainer.progress.step` counts those before.

        Args:
            trainer: trainer of the run.
            batch: this process's images, augmented but not yet mixed, as uint8 (B, H, W, C).
        """

    def after_step(self, trainer: Trainer, result: StepResult) -> None:
        """Called after a step, which `trainer.progress.step` includes.

        Args:
            trainer: trainer of the run.
            result: mean loss and gradient norm over the images of all processes; `result.bad` where
                one of them was not finite, and the step changed nothing.
        """

    def after_epoch(self, trainer: Trainer) -> None:
        """Called after the last step of an epoch.

        A run that stopped before the epoch was validated calls it first when it is resumed.
        """

    def after_evaluation_batch(self, split: str) -> None:
        """Called after each batch of an evaluation; `split` is `val` or `test`.

        An exception ends the run at once.
        """

    def on_end(self, trainer: Trainer) -> None:
        """Called once, after the last step of this process, also where a callback ended the run.

        The test split is evaluated after it.
        """


def call_event(callback: Callback, event: str, *arguments: object) -> None:
    """Call a callback at an event; `UserCodeError` names one that is not vitkit's and raises."""
    try:
        getattr(callback, event)(*arguments)
    except Exception as error:  # a callback of the user may raise anything
        # errors of vitkit have their message; one of vitkit's callbacks is a bug
        if isinstance(error, errors.VitkitError) or _is_own(callback):
            raise
        name = f"the callback {type(callback).__qualname__}"
        raise errors.UserCodeError.raised_by(name, error, f"in {event}") from error


def _is_own(callback: Callback) -> bool:
    """Return True for a callback of vitkit's."""
    return type(callback).__module__.startswith("vitkit.")


class Trainer:
    """Makes the steps that remain of a run.

    Args:
        training_step: the arithmetic of a step, with its optimizer.
        progress: where the run is; a resumed one continues from there.
        batches: the batches of a range of steps.
        schedule: step -> learning rate.
        steps_per_epoch: optimizer steps of an epoch.
        epochs: epochs of the whole schedule.
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

        An epoch whose last step is made is still validated. All is saved, whatever the event.

        Args:
            why: becomes `stopped`.
            error: raised after `on_end`; of several the first one.
        """
        self.stopped, self.is_ending = why or self.stopped, True
        self._error = self._error or error

    def run(self) -> None:
        """Make the steps that remain; an error that ends the run is raised after `on_end`.

        Raises:
            MemoryError: a step is out of memory, on whichever device.
            UserCodeError: a callback that is not vitkit's raised.
        """
        self.is_ending, self._error = False, None
        self._call("on_start")
        if self.progress.unvalidated:  # a kill or a signal came after the last step
            self._call("after_epoch")
        with closing(self._arriving(range(self.progress.step, self.last_step))) as batches:
            for batch in batches:
                self._call("after_step", self._step(batch))
                if self.progress.unvalidated:  # until a callback closes the epoch
                    self._call("after_epoch")
        self._call("on_end")
        if self._error is not None:
            raise self._error

    def _arriving(self, remaining: range) -> Generator[Batch, None, None]:
        """Yield the batch of each step, after the events before it, until a callback ends all."""
        if self.is_ending or not remaining:
            return
        batches = self.batches(remaining)
        arriving = iter(batches)
        try:
            for step in remaining:
                if step == remaining[0] or step % self.steps_per_epoch == 0:
                    self._call("before_epoch")
                if not self.is_ending:
                    batch = next(arriving)
                    self._call("before_step", batch)
                if self.is_ending:
                    return
                yield batch
                if self.is_ending:
                    return
        finally:  # ends loader processes now, not at garbage collection
            if isinstance(batches, Generator):
                batches.close()

    def _step(self, batch: Batch) -> StepResult:
        """Make one step and count it. Raises `MemoryError`."""
        self.training_step.set_learning_rate(self.schedule(self.progress.step))
        try:
            result = self.training_step(batch, self.progress.step)
        except (RuntimeError, MemoryError) as error:
            if not devices.is_out_of_memory(error):
                raise
            result = None
        if result is None:  # raised out here, where no exception keeps the step's tensors alive
            raise MemoryError
        self.progress.step += 1
        self.progress.unvalidated = self.progress.step % self.steps_per_epoch == 0
        self.training_step.world.step = self.progress.step
        # a step without finite numbers changed nothing, and has no loss to count
        if result.bad is None:
            self.progress.count_loss(result.loss)
        return result

    def _call(self, event: str, *arguments: object) -> None:
        for callback in self.callbacks:
            try:
                call_event(callback, event, self, *arguments)
            except Exception as error:  # as above: raised again after the run is saved
                # vitkit's callbacks depend on each other; other processes may not have failed
                if _is_own(callback) or self.training_step.world.size > 1:
                    raise
                self.end(error=error)
