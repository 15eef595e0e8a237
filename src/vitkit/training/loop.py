"""The training loop, on PyTorch-Ignite: its events carry what happens between two steps.

The state that decides the next step is in `Progress`, the model and the optimizer, nowhere else;
everything random is drawn from (seed, step) or (seed, epoch, index). So a run that stops anywhere
and goes on ends with the same bits.
"""

from __future__ import annotations

import math
import shlex
import time
from pathlib import Path

import torch
from ignite.engine import Engine, Events
from torch import Tensor
from torch.nn import functional as F
from torch.nn.utils import clip_grad_norm_

from vitkit.data.loader import Batch, batches
from vitkit.data.randomness import hash64
from vitkit.errors import DataError, Interrupted, NonFiniteError, SettingError
from vitkit.models.vit import ViT
from vitkit.training.checkpointing import Progress, load_state, save_state
from vitkit.training.evaluation import Metrics, evaluate, quiet_engine
from vitkit.training.log import RunLog
from vitkit.training.optimizer import make_optimizer
from vitkit.training.plan import Plan
from vitkit.training.precision import Precision, autocast
from vitkit.training.run_folder import RunFolder
from vitkit.training.schedule import warmup_cosine
from vitkit.training.signals import StopFlag
from vitkit.weights.own import save

DROPOUT = 0x0D09
"""What the generator of a step is for, among the things drawn from the seed."""


class Trainer:
    """One run: the model, the optimizer, and where it stands.

    Args:
        plan: what to do.
        run: where to leave it.
        log: where to say it.
        model: fresh, on the plan's device.
        precision: `off` or `bfloat16`.
        stop: raised by a signal.
    """

    def __init__(
        self,
        plan: Plan,
        run: RunFolder,
        log: RunLog,
        model: ViT,
        precision: Precision,
        stop: StopFlag,
    ) -> None:
        config = plan.config
        self.plan, self.run_folder, self.log, self.stop = plan, run, log, stop
        self.model, self.precision = model, precision
        self.optimizer = make_optimizer(
            model,
            config.opt,
            lr=config.lr,
            weight_decay=config.weight_decay,
            betas=(config.beta1, config.beta2),
        )
        self.progress = Progress(data=plan.dataset.fingerprint)
        self.stopped = f"all {config.epochs} epochs"
        self._started = time.monotonic()
        self._mark = (0, self._started)

    def resume(self, state: Path) -> None:
        """Go on from a whole state.

        Raises:
            CheckpointError: a state of another model.
            DataError: the data are not what the run began with.
        """
        progress = load_state(state, self.model, self.optimizer)
        if progress.data != self.plan.dataset.fingerprint:
            raise DataError(
                f"{self.plan.config.data}: the pictures, labels or classes are not those the run "
                f"{self.run_folder.root} began with; bring them back, or start afresh"
            )
        self.progress = progress
        self.log.say(f"going on from step {self.progress.step} ({state})")

    def train(self) -> None:
        """Run to the last epoch, to the end of patience, or to a signal.

        Raises:
            Interrupted: a signal came; the state is saved.
            NonFiniteError: the loss or the gradient is not a finite number.
            OutputError: the run folder cannot be written.
        """
        steps_per_epoch = self.plan.steps.steps_per_epoch
        remaining = range(self.progress.step, self.plan.total_steps)
        if self._out_of_patience():
            self.stopped = self._why_patience_ended()
            return
        if not remaining:
            return
        engine = quiet_engine(self._step)
        engine.add_event_handler(Events.ITERATION_COMPLETED, self._after_step)
        engine.add_event_handler(Events.EPOCH_COMPLETED, self._after_epoch)
        engine.load_state_dict(
            {
                "iteration": self.progress.step,
                "max_epochs": self.plan.config.epochs,
                "epoch_length": steps_per_epoch,
            }
        )
        self.model.train()
        self._started = time.monotonic()
        self._mark = (self.progress.step, self._started)
        engine.run(batches(self.plan.steps, remaining, workers=self.plan.workers))

    def _step(self, engine: Engine, batch: Batch) -> float:
        """Forward, loss, backward, clip, update; a number that is not finite updates nothing."""
        config, step = self.plan.config, self.progress.step
        rate = self._learning_rate(step)
        for group in self.optimizer.param_groups:
            group["lr"] = rate * group.get("lr_scale", 1.0)
        torch.manual_seed(int(hash64(config.seed, step, DROPOUT)) >> 1)
        images = batch.images(self.plan.preprocess, self.plan.device)
        labels = batch.labels.to(self.plan.device)
        try:
            with autocast(self.precision, self.plan.device):
                logits = self.model(images)
            loss = F.cross_entropy(logits.float(), labels, label_smoothing=config.label_smoothing)
            value = float(loss.detach())
            self._refuse_non_finite("loss", value, batch)
            loss.backward()
        except torch.OutOfMemoryError:
            raise SettingError(
                f"{self.plan.device} is out of memory at a batch of {config.batch_size}; "
                f"lower --batch-size, --img-size or the model's size"
            ) from None
        norm = clip_grad_norm_(self.model.parameters(), config.clip_grad or math.inf)
        self._refuse_non_finite("gradient norm", float(norm), batch)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.progress.step += 1
        self.progress.loss_sum += value
        return value

    def _learning_rate(self, step: int) -> float:
        config = self.plan.config
        return warmup_cosine(
            step,
            peak=config.lr,
            low=config.min_lr,
            warmup=round(config.warmup_epochs * self.plan.steps.steps_per_epoch),
            total=self.plan.total_steps,
        )

    def _refuse_non_finite(self, what: str, value: float, batch: Batch) -> None:
        if math.isfinite(value):
            return
        split = self.plan.dataset.splits["train"]
        names = ", ".join(split.name(int(i)) for i in batch.indices[:3])
        raise NonFiniteError(
            f"the {what} is {value} at step {self.progress.step} (lr "
            f"{self._learning_rate(self.progress.step):.3g}, pictures {names} ...); the weights "
            f"before it are kept in {self.run_folder.root}; try a lower --lr or --amp off"
        )

    def _after_step(self, engine: Engine) -> None:
        """The progress bar, the curves, and the signal."""
        step, config = self.progress.step, self.plan.config
        loss, speed = float(engine.state.output), self._pictures_per_second()  # type: ignore[arg-type]
        epoch = f"epoch {engine.state.epoch}/{config.epochs}"
        self.log.advance(epoch, f"loss {loss:.3f}  {speed:,.0f} images/s")
        if step % config.log_interval == 0:
            curves = {"train/loss": loss, "lr": self._learning_rate(step - 1)}
            self.log.curve(curves | {"perf/images_per_s": speed}, step)
        if self.stop.signum is not None and step % self.plan.steps.steps_per_epoch:
            self._interrupt(self.stop.signum)

    def _after_epoch(self, engine: Engine) -> None:
        """Validate; write the row, the weights and the state; see whether to stop here."""
        speed, step = self._pictures_per_second(), self.progress.step
        epoch, steps = engine.state.epoch, self.plan.steps.steps_per_epoch
        train_loss = self.progress.loss_sum / steps
        self.progress.loss_sum = 0.0
        validation = self.evaluate("val") if "val" in self.plan.dataset.splits else {}
        if not math.isfinite(validation.get("loss", 0.0)):
            raise NonFiniteError(
                f"the validation loss is {validation['loss']} after epoch {epoch}; the state "
                f"before it is kept in {self.run_folder.state}; try a lower --lr"
            )
        better = self._count_best(epoch, validation)
        self._count_time()
        self._report(epoch, train_loss, validation, speed, better)
        if better:
            self.save_weights(self.run_folder.best, {"val": validation})
        self.save_weights(self.run_folder.last, {"val": validation})
        save_state(self.run_folder.state, self.model, self.optimizer, self.progress)
        if self.stop.signum is not None:
            self._interrupt(self.stop.signum)
        if self._out_of_patience() and step < self.plan.total_steps:
            self.stopped = self._why_patience_ended()
            engine.terminate()
        self.model.train()
        self._mark = (step, time.monotonic())

    def evaluate(self, split: str) -> Metrics:
        """Metrics of the model as it stands on a split of the data, in eval mode."""
        plan = self.plan
        self.model.eval()

        def forward(images: Tensor) -> Tensor:
            with autocast(self.precision, plan.device):
                logits: Tensor = self.model(images)
            return logits

        return evaluate(
            forward,
            plan.dataset.splits[split],
            plan.preprocess,
            num_classes=plan.spec.num_classes,
            device=plan.device,
            workers=plan.workers,
        )

    def save_weights(self, path: Path, metrics: dict[str, Metrics]) -> None:
        """Write the model as it stands, with everything needed to use it. Raises `OutputError`."""
        plan, steps = self.plan, self.plan.steps.steps_per_epoch
        save(
            path,
            self.model,
            preprocess=plan.preprocess,
            classes=plan.dataset.classes,
            recipe=plan.config.to_json(),
            metrics=metrics,
            epoch=self.progress.step / steps,
            data={
                "name": plan.dataset.name,
                "fingerprint": plan.dataset.fingerprint,
                "pictures": {name: len(part) for name, part in plan.dataset.splits.items()},
            },
        )

    def _report(
        self, epoch: int, train_loss: float, validation: Metrics, speed: float, better: bool
    ) -> None:
        step = self.progress.step
        rate = self._learning_rate(step - 1)
        values = {f"val_{name}": v for name, v in validation.items() if name != "pictures"}
        row = {"epoch": epoch, "step": step, "lr": rate, "train_loss": train_loss, **values}
        self.log.row(row | {"images_per_s": speed, "seconds": self.progress.seconds})
        self.log.curve({f"val/{name.removeprefix('val_')}": v for name, v in values.items()}, step)
        shown = "  ".join(f"{name} {value:.4f}" for name, value in values.items())
        mark = "  best" if better else ""
        self.log.say(
            f"epoch {epoch:>3}/{self.plan.config.epochs}  train_loss {train_loss:.4f}  {shown}  "
            f"{speed:,.0f} images/s{mark}"
        )

    def _count_best(self, epoch: int, validation: Metrics) -> bool:
        """Whether this epoch is the best so far: by validation top-1, then by loss."""
        progress = self.progress
        if not validation:
            return True
        top1, loss = validation["top1"], validation["loss"]
        progress.stale = 0 if top1 > progress.best_top1 else progress.stale + 1
        if (top1, -loss) <= (progress.best_top1, -progress.best_loss):
            return False
        progress.best_top1, progress.best_loss, progress.best_epoch = top1, loss, epoch
        return True

    def _interrupt(self, signum: int) -> None:
        """Save everything and leave."""
        self._count_time()
        self.save_weights(self.run_folder.last, {})
        save_state(self.run_folder.state, self.model, self.optimizer, self.progress)
        raise Interrupted(
            signum,
            f"stopped at step {self.progress.step} of {self.plan.total_steps}; all is saved, go "
            f"on with: vitkit train --resume {shlex.quote(str(self.run_folder.root))}",
        )

    def _pictures_per_second(self) -> float:
        step, moment = self._mark
        seconds = max(time.monotonic() - moment, 1e-9)
        return (self.progress.step - step) * self.plan.config.batch_size / seconds

    def _count_time(self) -> None:
        now = time.monotonic()
        self.progress.seconds += now - self._started
        self._started = now

    def _why_patience_ended(self) -> str:
        return f"no higher validation top-1 for {self.progress.stale} epochs"

    def _out_of_patience(self) -> bool:
        patience = self.plan.config.patience
        return patience is not None and self.progress.stale >= patience
