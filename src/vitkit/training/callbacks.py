"""The callbacks of a run: its ends, EMA, validation, bad numbers, and its log."""

from __future__ import annotations

import math
import os
import resource
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from vitkit.data.loading.loader import Batch
from vitkit.distributed import local_tensor
from vitkit.errors import Interrupted, NonFiniteError
from vitkit.evaluation.loop import KeptOutputs, count_predictions, load_metrics
from vitkit.evaluation.metrics import Metrics
from vitkit.messages import plural
from vitkit.models.vit import ViT
from vitkit.training.config.merging import write_yaml
from vitkit.training.monitoring.figures import example_predictions
from vitkit.training.monitoring.run_log import epochs_per_line
from vitkit.training.optimization.parameters import EMA, train_mode
from vitkit.training.recipes.defaults import limit_warmup
from vitkit.training.run import EpochResult, Run, evaluate_split
from vitkit.training.saving import Save
from vitkit.training.state.registry import Progress
from vitkit.training.state.state_folder import withdraw_state
from vitkit.training.step import StepResult, unsharded_model
from vitkit.training.trainer import Callback, Trainer

# The ends of a run: early stopping by `patience`, last step, signal, deadline.

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
        write_yaml(self.run.folder.config, self.run.settings_to_store())
        self._written = time.monotonic()


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
        save: writes the state and the weights where validation is interrupted.
    """

    def __init__(self, run: Run, save: Save) -> None:
        self.run, self.save = run, save

    def after_epoch(self, trainer: Trainer) -> None:
        """Validate and close the epoch.

        Raises:
            Interrupted: a signal came; all is saved.
            NonFiniteError: the validation loss is not a finite number.
        """
        run, progress = self.run, self.run.progress
        validation = self._validate(trainer.epoch) if "val" in run.plan.dataset.splits else {}
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
        except Interrupted:
            # the epoch's steps are made, and only its validation is missing
            self.save.save_state()
            self.save.save_weights(run.folder.last)
            raise
        if not math.isfinite(validation["loss"]):
            run.world.broadcast_from_main(
                lambda: withdraw_state(run.folder.state, run.progress.step)
            )
            raise NonFiniteError(
                f"the validation loss is {validation['loss']} after epoch {epoch}; "
                f"{run.folder.last_state_hint()}; try a lower --lr"
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
        text = _describe_bad_step(self.run, result, trainer.learning_rate)
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


def _describe_bad_step(run: Run, result: StepResult, rate: float) -> str:
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


# The log of a run: speed, data wait, memory, curves, rows of epochs and example predictions.

LOOK_EVERY = 10.0
"""Least seconds between two logs of examples and weights, which would slow short epochs."""


@dataclass
class Timing:
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
        return Timing(
            self.moment - earlier.moment,
            self.steps - earlier.steps,
            self.images - earlier.images,
            self.waiting - earlier.waiting,
        )

    def speed(self) -> dict[str, float]:
        """Return images per second and the share of the time spent waiting, of a difference."""
        duration = max(self.moment, 1e-9)
        return {"images_per_s": self.images / duration, "data_wait": self.waiting / duration}


def memory(device: torch.device) -> dict[str, float]:
    """Return the memory of this process in MB: `memory` (resident), and `cuda_memory` (peak)."""
    try:
        # The second number of statm is the resident set.
        pages = int(Path("/proc/self/statm").read_bytes().split()[1])
        used = float(pages * os.sysconf("SC_PAGE_SIZE"))
    except OSError:  # not Linux: the peak, in bytes on macOS and in kilobytes elsewhere
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        used = float(peak if sys.platform == "darwin" else peak * 1024)
    found = {"memory": used / 1e6}
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
        self._totals = Timing()
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
            self._totals.waiting += time.perf_counter() - start
            yield batch

    def _now(self) -> Timing:
        # a copy: the totals change with the next step
        return replace(self._totals, moment=time.perf_counter())

    def before_epoch(self, trainer: Trainer) -> None:
        """Restart the epoch's timing: the time between two epochs counts for neither."""
        self._epoch = self._now()

    def after_step(self, trainer: Trainer, result: StepResult) -> None:
        """Show the bar or a line, and log the curves."""
        epoch, step, loss = trainer.epoch, trainer.progress.step, result.loss
        self._totals.steps += 1
        self._totals.images += self.plan.config.batch_size
        if self.log.display.is_due():
            self._show(epoch, step, loss)
        if self._is_logged(step, trainer.last_step):
            speed = self._now().since(self._epoch).speed() | memory(self.plan.device)
            values = {"train_loss": loss, "lr": trainer.learning_rate}
            self.log.step({"epoch": epoch, "step": step}, values | speed)
        # read now: validation must not count for the epoch's speed
        if step % self.plan.steps.steps_per_epoch == 0:
            self._pace = self._now().since(self._epoch)

    def _is_logged(self, step: int, last_step: int) -> bool:
        """Return whether a step is logged: also the last one, and those that end short epochs."""
        interval, steps = self.plan.config.log_interval, self.plan.steps.steps_per_epoch
        ends_short_epoch = steps < interval and step % steps == 0
        return step % interval == 0 or step == last_step or ends_short_epoch

    def after_epoch(self, trainer: Trainer) -> None:
        """Log a validated epoch, and sometimes example predictions."""
        result, progress = self.run.epoch_result, self.run.progress
        assert result is not None, "after `Evaluate`"
        self._write_row(result, progress)
        if self.run.world.is_main:
            self._show_examples(result.model, result.epoch, progress.step)

    def _write_row(self, result: EpochResult, progress: Progress) -> None:
        epoch, validation = result.epoch, result.validation
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
            on_terminal=is_better or epoch % epochs_per_line(epochs) == 0 or epoch == epochs,
        )

    def _show_examples(self, model: ViT, epoch: int, step: int) -> None:
        """Log example predictions and histograms, unless the last ones are only seconds old.

        Args:
            model: in eval mode.
            epoch: counted from 1; the last one is always looked at.
            step: step of the run.
        """
        plan = self.run.plan
        config = plan.config
        recent = time.monotonic() - self._looked < LOOK_EVERY
        if recent and epoch < config.epochs:
            return
        if config.log_examples and "val" in plan.dataset.splits:
            device = next(model.parameters()).device
            sheet = example_predictions(model, plan.dataset, plan.preprocess, device)
            self.log.image("val/examples", sheet, step)
        if config.log_histograms:
            self.log.weights(model, step)
        self._looked = time.monotonic()

    def _show(self, epoch: int, step: int, loss: float) -> None:
        speed = self._now().since(self._epoch).speed()
        used = memory(self.plan.device)
        since_start = self._now().since(self._start)
        on_device = f" + {used['cuda_memory'] / 1000:.1f} on CUDA" if "cuda_memory" in used else ""
        self.log.display.show(
            step,
            f"epoch {epoch}/{self.run.plan.config.epochs}",
            f"loss {loss:.3f}  {speed['images_per_s']:,.0f} images/s  data wait "
            f"{speed['data_wait']:.0%}  {used['memory'] / 1000:.1f}{on_device} GB",
            # By the mean since the start, which a single slow step hardly changes.
            left=(self.run.plan.last_step - step) * since_start.moment / since_start.steps,
        )
