"""The log of a run: speed, data wait, memory, curves, rows of epochs and example predictions."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator

from vitkit.data.loading.batch import Batch
from vitkit.models.vit import ViT
from vitkit.training.monitoring.figures import (
    StepTimer,
    TimingSnapshot,
    example_predictions,
    memory,
)
from vitkit.training.monitoring.run_log import epochs_per_line
from vitkit.training.run import EpochResult, Run
from vitkit.training.state.registry import Progress
from vitkit.training.step import StepResult
from vitkit.training.trainer import Callback, Trainer

WARM_UP_STEPS, MEASURED_STEPS = 5, 25
"""The wait for images is measured once, over some steps after the first ones, which are slow."""
LONG_WAIT = 0.1
"""Share of the time from which on the wait for images is reported."""
LOOK_EVERY = 10.0
"""Least seconds between two logs of examples and weights, which would slow short epochs."""


class ReportProgress(Callback):
    """Writes steps and epochs to the log.

    Args:
        run: the run; the processes on this machine share its cores.
    """

    def __init__(self, run: Run) -> None:
        self.run, self.plan, self.log = run, run.plan, run.log
        self._meter = StepTimer()
        self._start = self._epoch = self._warm = self._pace = TimingSnapshot()
        # Long ago, so that the first epoch has examples.
        self._looked = -LOOK_EVERY

    def watched(self, batches: Iterable[Batch]) -> Iterator[Batch]:
        """Yield the batches, and measure the time spent waiting for them."""
        self._start = self._epoch = self._meter.read()
        return self._meter.watched(batches)

    def before_epoch(self, trainer: Trainer) -> None:
        """Restart the epoch's timing: the time between two epochs counts for neither."""
        self._epoch = self._meter.read()

    def after_step(self, trainer: Trainer, result: StepResult) -> None:
        """Show the bar or a line, log the curves, and once a long wait for images."""
        epoch, step, loss = trainer.epoch, trainer.progress.step, result.loss
        config = self.plan.config
        self._meter.step_done(config.batch_size)
        if self.log.display.is_due():
            self._show(epoch, step, loss)
        if self._is_logged(step, trainer.last_step):
            values = {"train_loss": loss, "lr": trainer.learning_rate} | self._speed()
            self.log.step({"epoch": epoch, "step": step}, values | memory(self.plan.device))
        # read now: validation must not count for the epoch's speed
        if step % self.plan.steps.steps_per_epoch == 0:
            self._pace = self._meter.read() - self._epoch
        # counts steps of this process, as its first ones are slow
        steps = self._meter.steps
        if steps == WARM_UP_STEPS:
            self._warm = self._meter.read()
        elif steps == WARM_UP_STEPS + MEASURED_STEPS:
            self._report_wait()

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
        speed = {"images_per_s": self._pace.images_per_s, "data_wait": self._pace.data_wait}
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
            row.append(f"{self._pace.images_per_s:,.0f} images/s")
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

    def _speed(self) -> dict[str, float]:
        pace = self._meter.read() - self._epoch
        return {"images_per_s": pace.images_per_s, "data_wait": pace.data_wait}

    def _show(self, epoch: int, step: int, loss: float) -> None:
        speed = self._speed()
        used = memory(self.plan.device)
        since_start = self._meter.read() - self._start
        on_device = f" + {used['cuda_memory'] / 1000:.1f} on CUDA" if "cuda_memory" in used else ""
        self.log.display.show(
            step,
            f"epoch {epoch}/{self.run.plan.config.epochs}",
            f"loss {loss:.3f}  {speed['images_per_s']:,.0f} images/s  data wait "
            f"{speed['data_wait']:.0%}  {used['memory'] / 1000:.1f}{on_device} GB",
            # By the mean since the start, which a single slow step hardly changes.
            left=(self.run.plan.last_step - step) * since_start.moment / since_start.steps,
        )

    def _report_wait(self) -> None:
        """Log a line where the steps after the first ones waited long for images."""
        wait = (self._meter.read() - self._warm).data_wait
        if wait >= LONG_WAIT:
            self.log.info(
                f"{wait:.0%} of the time is spent waiting for images (workers: "
                f"{self.plan.workers}); more --workers or --cache may help"
            )
