"""What a run reports of its steps and epochs: speed, waiting, memory, curves, examples."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence

from vitkit.data.loading.loader import Batch
from vitkit.evaluation.metrics import Metrics, headline
from vitkit.models.vit import ViT
from vitkit.training.monitoring.bottleneck import (
    AFTER,
    WARM_UP,
    Machine,
    cores_here,
    diagnosis,
    image_cost,
    is_waiting,
)
from vitkit.training.monitoring.image_grids import example_predictions
from vitkit.training.monitoring.run_log import RunLog
from vitkit.training.monitoring.throughput import StepTimer, TimingSnapshot, memory
from vitkit.training.recipes.reference import ReferenceMonitor, receipt_of
from vitkit.training.setup import Plan
from vitkit.training.state.registry import Progress

LOOK_EVERY = 10.0
"""Seconds between two looks at examples and weights, so that short epochs are not spent on them."""


class Reporter:
    """Goes along with the loop and tells the log.

    Args:
        plan: of the run.
        log: where it is said.
        share: processes of the run on this machine, which share its cores.
    """

    def __init__(self, plan: Plan, log: RunLog, share: int = 1) -> None:
        self.plan, self.log, self.share = plan, log, share
        self._meter = StepTimer()
        self._start = self._epoch = self._warm = self._pace = TimingSnapshot()
        self._looked = -LOOK_EVERY
        self._failed, self._failures = set[str](), 0
        settings, train = plan.config.to_json(), plan.dataset.splits["train"]
        receipt = receipt_of(plan.config.recipe)
        self._watch = None if receipt is None else ReferenceMonitor(receipt, settings, len(train))

    def watched(self, batches: Iterable[Batch]) -> Iterator[Batch]:
        """The same batches; from now on the time runs."""
        self._start = self._epoch = self._meter.read()
        return self._meter.watched(self._told(batches))

    def _told(self, batches: Iterable[Batch]) -> Iterator[Batch]:
        for batch in batches:
            self.tell_failed(batch.failed)
            yield batch

    def tell_failed(self, failed: Sequence[str]) -> None:
        """Name images that could not be read, each once, and count how often that was so."""
        self._failures += len(failed)
        for line in dict.fromkeys(failed):
            if line not in self._failed:
                self.log.say(f"{line}; another image of its class takes its place")
                self._failed.add(line)

    def after_step(self, epoch: int, step: int, loss: float, rate: float) -> None:
        """The bar or the line, the curves, and after `AFTER` steps the diagnosis."""
        config = self.plan.config
        self._meter.step_done(config.batch_size)
        if self.log.display.is_due():
            self._show(epoch, step, loss)
        if step % config.log_interval == 0:
            values = {"train_loss": loss, "lr": rate} | self._speed()
            self.log.step({"epoch": epoch, "step": step}, values | memory(self.plan.device))
        if step % self.plan.steps.steps_per_epoch == 0:
            self._pace = self._meter.read() - self._epoch
        steps = self._meter.steps
        if steps == WARM_UP:
            self._warm = self._meter.read()
        elif steps == AFTER:
            self._diagnose(step)

    def after_epoch(
        self,
        epoch: int,
        progress: Progress,
        rate: float,
        train_loss: float,
        validation: Metrics,
        better: bool,
    ) -> None:
        """The row and the line of an epoch."""
        values = {f"val_{name}": v for name, v in validation.items() if name != "images"}
        speed = {"images_per_s": self._pace.images_per_s, "data_wait": self._pace.data_wait}
        self.log.epoch(
            {"epoch": epoch, "step": progress.step},
            {"lr": rate, "train_loss": train_loss} | values | speed | {"seconds": progress.seconds},
        )
        shown = "  ".join(f"val_{line}" for line in headline(validation))
        if self._failures:
            times = "once" if self._failures == 1 else f"{self._failures:,} times"
            self.log.say(f"epoch {epoch}: {times} an image could not be read; see the lines above")
            self._failures = 0
        mark = "  best" if better else ""
        self.log.say(
            f"epoch {epoch:>3}/{self.plan.config.epochs}  train_loss {train_loss:.4f}  {shown}  "
            f"{self._pace.images_per_s:,.0f} images/s{mark}"
        )
        if self._watch is not None:
            said = self._watch.after_epoch(epoch, validation, progress.best_top1, progress.skipped)
            if said is not None:
                self.log.say(said)

    def look_at(self, model: ViT, epoch: int, step: int) -> None:
        """Example predictions and histograms, unless the last ones are only seconds old.

        Args:
            model: in eval mode.
            epoch: counted from 1; the last one is always looked at.
            step: of the run.
        """
        config, plan = self.plan.config, self.plan
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

    def next_epoch(self) -> None:
        """What came between two epochs counts for neither."""
        self._epoch = self._meter.read()

    def _speed(self) -> dict[str, float]:
        pace = self._meter.read() - self._epoch
        return {"images_per_s": pace.images_per_s, "data_wait": pace.data_wait}

    def _show(self, epoch: int, step: int, loss: float) -> None:
        speed, held = self._speed(), memory(self.plan.device)
        gone = self._meter.read() - self._start
        on_device = f" + {held['cuda_memory'] / 1000:.1f} on CUDA" if "cuda_memory" in held else ""
        self.log.display.show(
            step,
            f"epoch {epoch}/{self.plan.config.epochs}",
            f"loss {loss:.3f}  {speed['images_per_s']:,.0f} images/s  data wait "
            f"{speed['data_wait']:.0%}  {held['memory'] / 1000:.1f}{on_device} GB",
            left=(self.plan.last_step - step) * gone.moment / gone.steps,
        )

    def _diagnose(self, step: int) -> None:
        """Say what waits for what; where that is the loader, time some images first."""
        pace, plan = self._meter.read() - self._warm, self.plan
        cost = image_cost(plan.steps, step) if is_waiting(pace) else None
        cores = max(1, cores_here() // self.share)
        machine = Machine(cores, plan.workers, accelerator=plan.device.type != "cpu")
        self.log.say(diagnosis(pace, cost, machine))
