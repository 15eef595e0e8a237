"""The callbacks of a run: its ends, EMA, validation, bad numbers, and its log."""

from __future__ import annotations

import math
import operator
import resource
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

import torch

from vitkit import distributed, errors, messages
from vitkit.data.loading.loader import Batch
from vitkit.evaluation.loop import KeptOutputs, count_predictions, load_metrics
from vitkit.evaluation.metrics import Metrics
from vitkit.models.vit import ViT
from vitkit.training.config.merging import write_yaml
from vitkit.training.monitoring import figures, run_log
from vitkit.training.optimization.parameters import EMA, train_mode
from vitkit.training.run import EpochResult, Run, evaluate_split
from vitkit.training.saving import Save
from vitkit.training.state.state_folder import withdraw_state
from vitkit.training.step import StepResult, unsharded_model
from vitkit.training.trainer import Callback, Trainer

# The ends of a run: early stopping by `patience`, last step, signal, deadline.


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
        return f"{messages.plural(progress.stale, 'epoch')} without a higher validation top-1"


class KeepDeadline(Callback):
    """Rescales the learning rate schedule after each epoch, so that it ends at the deadline.

    The epochs of the settings are the most; as many are made as fit, by the mean duration of those
    so far. The learning rate follows the number of epochs, so that it is low at the end.

    Args:
        run: the run; its plan and config.yaml get the number of epochs.
        time_left: returns the seconds until the deadline.
    """

    def __init__(self, run: Run, time_left: Callable[[], float]) -> None:
        self.run, self.time_left = run, time_left
        self._most, self._warmup = run.plan.config.epochs, run.plan.config.warmup_epochs
        self._first: tuple[int, float] | None = None

    def after_epoch(self, trainer: Trainer) -> None:
        """End the run at the deadline; else plan for the epochs that fit."""
        if trainer.progress.step >= trainer.last_step:
            return
        left, epoch = self.time_left(), trainer.epoch
        if left <= 0:
            trainer.end(f"epoch {epoch}, when the budget was used up")
            return
        if self._first is None:  # the first epoch is slower than the others
            self._first = epoch, left
            return
        first_epoch, first_left = self._first
        each = max(first_left - left, 1e-9) / (epoch - first_epoch)
        # there is time left, so one more epoch is begun even if it takes longer
        epochs = min(self._most, epoch + max(1, math.floor(left / each)))
        plan = self.run.plan
        if epochs == plan.config.epochs:
            return
        # far fewer epochs than planned must not be all warm-up
        warmup = min(self._warmup, epochs / 10)
        plan = plan.with_settings({"epochs": epochs, "warmup_epochs": warmup})
        self.run.plan = plan
        trainer.epochs, trainer.last_step = epochs, plan.last_step
        trainer.schedule = plan.learning_rate
        self.run.log.set_total(plan.last_step)
        write_yaml(self.run.folder.config, self.run.settings_to_store())


# Callbacks that update the EMA of the weights, and set the mode of frozen parts.


class AverageWeights(Callback):
    """Updates the exponential moving average after each step that changed the weights.

    Args:
        ema: the average.
        model: whose weights are averaged.
    """

    def __init__(self, ema: EMA[ViT], model: ViT) -> None:
        self.ema, self._model = ema, model

    def after_step(self, trainer: Trainer, result: StepResult) -> None:
        """Update the average."""
        # a step that changed nothing would count the same weights twice
        if result.bad is None and not result.overflow:
            self.ema.update(self._model)


class TrainMode(Callback):
    """Sets the model to training mode before each epoch; validation sets it to eval mode.

    Args:
        model: the model; its frozen parts stay in eval mode.
    """

    def __init__(self, model: ViT) -> None:
        self._model = model

    def before_epoch(self, trainer: Trainer) -> None:
        """Set the mode."""
        train_mode(self._model)


# Validation after each epoch, with the same scores as `vitkit eval`.


class Evaluate(Callback):
    """Validates each epoch and keeps its result in `run.epoch_result`.

    Args:
        run: the run.
        save: writes the state before validation, and the weights where that is interrupted.
    """

    def __init__(self, run: Run, save: Save) -> None:
        self.run, self.save = run, save

    def after_epoch(self, trainer: Trainer) -> None:
        """Validate and close the epoch.

        Raises:
            Interrupted: a signal came; all is saved.
            NonFiniteError: the validation loss is not a finite number.
        """
        self.save.before_validation(trainer.last_step)
        run, progress = self.run, self.run.progress
        validation = {}
        if "val" in run.plan.dataset.splits:
            validation = self._validate(trainer.epoch)
        # after validation, so that a kill during it validates again
        train_loss = progress.close_epoch()
        is_best = progress.count_best(trainer.epoch, validation)
        run.count_time()
        # every process must call it, as all of them send their parts
        whole = unsharded_model(run.model_to_save, run.world).eval()
        run.epoch_result = EpochResult(
            trainer.epoch, trainer.learning_rate, train_loss, validation, is_best, whole
        )

    def _validate(self, epoch: int) -> Metrics:
        run = self.run
        assert run.held_out is not None, "there is a validation split"
        own = load_metrics(run.plan.config.metrics)
        watched = run.held_out.watched(evaluate_split(run, "val", run.model_to_save), run.world)
        outputs = KeptOutputs(watched, keep=bool(own))
        try:
            counts = count_predictions(outputs, run.plan.spec.num_classes)
            validation = counts.counts(run.world).scores() | outputs.scores(own, run.world)
        except errors.Interrupted:
            # the epoch's steps are made, and only its validation is missing
            self.save.save_state()
            self.save.save_weights(run.folder.last)
            raise
        if not math.isfinite(validation["loss"]):
            run.world.broadcast_from_main(
                lambda: withdraw_state(run.folder.state, run.progress.step)
            )
            raise _non_finite(
                run, f"the validation loss is {validation['loss']} after epoch {epoch}"
            )
        run.held_out.add(run.world)
        return validation


# A loss, gradient or weight that is not finite (NaN, infinity), and a loss that diverges.

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
        run, progress = self.run, trainer.progress
        if result.overflow:
            step = progress.step - 1
            run.log.info(f"float16: the gradient overflows at step {step}; lowering the loss scale")
        if result.bad is not None:
            progress.skipped += 1
            progress.skipped_in_a_row += 1
            text = _describe_bad_step(run, result, trainer.learning_rate)
            if run.plan.config.on_nan == "stop" or progress.skipped_in_a_row >= MOST_SKIPPED:
                # the step changed nothing, so it is not counted: a resumed run makes it again
                progress.step -= 1
                raise _non_finite(run, text)
            run.log.info(f"{text}; step skipped ({progress.skipped} so far)")
        is_checked = progress.step == trainer.last_step
        if progress.step % trainer.steps_per_epoch == 0:  # validation would show it
            is_checked = "val" not in run.plan.dataset.splits
        if is_checked:
            # with a far too high rate weights overflow although the gradient is finite
            weights = (distributed.local_tensor(weight) for weight in run.model.parameters())
            is_bad = not all(bool(weight.isfinite().all()) for weight in weights)
            if run.world.all_reduce_max(int(is_bad)):
                rate = f"lr {trainer.learning_rate:.3g}"
                raise _non_finite(
                    run, f"the weights are not finite after step {progress.step} ({rate})"
                )

    def after_epoch(self, trainer: Trainer) -> None:
        """Raise `NonFiniteError` far above ln K, the cross-entropy of a uniform guess."""
        config, chance = self.run.plan.config, math.log(self.run.plan.spec.num_classes)
        loss = trainer.progress.mean_loss
        # ln K is a bound for cross-entropy only
        labels_alone = config.loss == "cross-entropy" and config.teacher is None
        # of two classes twice ln K is 1.39, which a few bad steps may exceed
        if labels_alone and loss > max(2 * chance, chance + 2):
            text = f"training loss {loss:.3g} after epoch {trainer.epoch}"
            raise _non_finite(self.run, f"{text}; guessing gives {chance:.3g}")


def _non_finite(run: Run, text: str) -> errors.NonFiniteError:
    """Return the error with where to resume, and what to change."""
    mend = "try a lower --lr"
    if run.plan.precision != "off":
        mend += " or --amp off"
    return errors.NonFiniteError(f"{text}; {run.folder.last_state_hint()}; {mend}")


def _describe_bad_step(run: Run, result: StepResult, rate: float) -> str:
    """Name the non-finite value of the last step, with the images of its batch."""
    step, plan, where = run.progress.step - 1, run.plan, ""
    indices = plan.steps.indices(step)
    if run.world.size > 1 and result.rank is not None:
        # each of n processes has every n-th image of the batch
        indices = indices[result.rank :: run.world.size]
        where = f" on rank {result.rank}"
    names = ", ".join(map(plan.dataset.splits["train"].name, indices[:3].tolist()))
    value = result.loss if result.bad == "loss" else result.norm
    return (
        f"the {result.bad} is {value}{where} at step {step} (lr {rate:.3g}, "
        f"loss {result.loss:.3g}, gradient norm {result.norm:.3g}, images {names} ...)"
    )


# The log of a run: speed, data wait, memory, curves, rows of epochs and example predictions.

LOOK_EVERY = 10.0
"""Least seconds between two logs of examples and weights, which would slow short epochs."""


class Timing(NamedTuple):
    """Totals of a run at one moment, or the difference of two of them; times in seconds.

    Attributes:
        moment: the time, on a clock that never goes back; in a difference, the duration.
        steps: optimizer steps.
        images: images in these steps, over all processes.
        waiting: time spent waiting for batches of the loader.
    """

    moment: float = 0.0
    steps: int = 0
    images: int = 0
    waiting: float = 0.0

    def since(self, earlier: Timing) -> Timing:
        """Return the difference to an earlier moment."""
        return Timing(*map(operator.sub, self, earlier))

    def speed(self) -> dict[str, float]:
        """Return images per second and the share of the time spent waiting, of a difference."""
        duration = max(self.moment, 1e-9)
        return {"images_per_s": self.images / duration, "data_wait": self.waiting / duration}


def memory(device: torch.device) -> dict[str, float]:
    """Return the most memory that this process has had, in MB: `memory`, and `cuda_memory`."""
    # bytes on macOS, kilobytes elsewhere
    unit = 1 if sys.platform == "darwin" else 1024
    found = {"memory": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 1e6}
    if device.type == "cuda":
        found["cuda_memory"] = torch.cuda.max_memory_allocated(device) / 1e6
    return found


class ReportProgress(Callback):
    """Writes steps and epochs to the log.

    Args:
        run: the run; the processes on this machine share its cores.
    """

    def __init__(self, run: Run) -> None:
        self.run, self.plan, self.log = run, run.plan, run.log
        self._steps, self._waiting = 0, 0.0
        self._start = self._epoch = self._pace = Timing()
        # Long ago, so that the first epoch has examples.
        self._looked = -LOOK_EVERY

    def watched(self, batches: Iterable[Batch]) -> Iterator[Batch]:
        """Yield the batches, and measure the time spent waiting for each."""
        self._start = self._epoch = self._now()
        iterator = iter(batches)
        while True:
            start = time.perf_counter()
            batch = next(iterator, None)
            if batch is None:
                return
            self._waiting += time.perf_counter() - start
            yield batch

    def _now(self) -> Timing:
        images = self._steps * self.plan.config.batch_size
        return Timing(time.perf_counter(), self._steps, images, self._waiting)

    def before_epoch(self, trainer: Trainer) -> None:
        """Restart the epoch's timing: the time between two epochs counts for neither."""
        self._epoch = self._now()

    def after_step(self, trainer: Trainer, result: StepResult) -> None:
        """Show the bar or a line, and log the curves."""
        epoch, step, loss = trainer.epoch, trainer.progress.step, result.loss
        self._steps += 1
        if self.log.display.is_due():
            self._show(epoch, step, loss)
        # the last step is logged, too, and those that end short epochs
        interval, steps = self.plan.config.log_interval, trainer.steps_per_epoch
        ends_epoch = step % steps == 0
        if step % interval == 0 or step == trainer.last_step or (ends_epoch and steps < interval):
            speed = self._now().since(self._epoch).speed() | memory(self.plan.device)
            values = {"train_loss": loss, "lr": trainer.learning_rate}
            self.log.step({"epoch": epoch, "step": step}, values | speed)
        # read now: validation must not count for the epoch's speed
        if ends_epoch:
            self._pace = self._now().since(self._epoch)

    def after_epoch(self, trainer: Trainer) -> None:
        """Log a validated epoch, and sometimes example predictions."""
        result, step = self.run.epoch_result, self.run.progress.step
        assert result is not None, "after `Evaluate`"
        self._write_row(result)
        # unless the last ones are only seconds old
        recent = time.monotonic() - self._looked < LOOK_EVERY
        config = self.run.plan.config
        if not self.run.world.is_main or (recent and result.epoch < config.epochs):
            return
        if config.log_examples and "val" in self.plan.dataset.splits:
            device = next(result.model.parameters()).device
            sheet = figures.example_predictions(
                result.model, self.plan.dataset, self.plan.preprocess, device
            )
            self.log.image("val/examples", sheet, step)
        if config.log_histograms:
            self.log.weights(result.model, step)
        self._looked = time.monotonic()

    def _write_row(self, result: EpochResult) -> None:
        epoch, validation, progress = result.epoch, result.validation, self.run.progress
        values = {f"val_{name}": v for name, v in validation.items() if name != "images"}
        speed = self._pace.speed()
        self.log.epoch(
            {"epoch": epoch, "step": progress.step},
            {"lr": result.learning_rate, "train_loss": result.train_loss}
            | values
            | speed
            | {"seconds": progress.seconds},
        )
        # without validation every epoch replaces the best weights
        is_better = result.is_best and bool(validation)
        epochs = self.run.plan.config.epochs
        row = [f"epoch {epoch:>3}/{epochs}", f"loss {result.train_loss:.4f}"]
        # the row fits 80 columns; metrics.csv has the other scores
        if validation:
            row += [f"val_loss {validation['loss']:.4f}", f"top1 {validation['top1']:.4f}"]
        # a resumed run may only validate an epoch, without making steps of it
        if self._pace.steps:
            row.append(f"{speed['images_per_s']:,.0f} images/s")
        if is_better:
            row.append("best")
        self.log.info(
            "  ".join(row),
            on_terminal=is_better
            or epoch % run_log.epochs_per_line(epochs) == 0
            or epoch == epochs,
        )

    def _show(self, epoch: int, step: int, loss: float) -> None:
        now, used = self._now(), memory(self.plan.device)
        speed, since_start = now.since(self._epoch).speed(), now.since(self._start)
        on_device = ""
        if "cuda_memory" in used:
            on_device = f" + {used['cuda_memory'] / 1000:.1f} on CUDA"
        self.log.display.show(
            step,
            f"epoch {epoch}/{self.run.plan.config.epochs}",
            f"loss {loss:.3f}  {speed['images_per_s']:,.0f} images/s  data wait "
            f"{speed['data_wait']:.0%}  {used['memory'] / 1000:.1f}{on_device} GB",
            # By the mean since the start, which a single slow step hardly changes.
            left=(self.run.plan.last_step - step) * since_start.moment / since_start.steps,
        )
