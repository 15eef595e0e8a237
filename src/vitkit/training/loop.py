"""The training loop, on PyTorch-Ignite: its events carry what happens between two steps.

The state that decides the next step is in `Progress`, the model and the optimizer, nowhere else;
everything random is drawn from (seed, step) or (seed, epoch, index). So a run that stops anywhere
and goes on ends with the same bits.
"""

from __future__ import annotations

import math
import shlex
import time
from collections.abc import Iterator
from pathlib import Path
from typing import cast

from ignite.engine import Engine, Events
from torch import Tensor

from vitkit.data.loader import Batch, batches
from vitkit.errors import DataError, Interrupted, NonFiniteError, SettingError
from vitkit.models.attention import use_attention
from vitkit.models.vit import ViT
from vitkit.training.augmenting import make_feed
from vitkit.training.checkpointing import load_state, save_state
from vitkit.training.distributed import World
from vitkit.training.ema import EMA
from vitkit.training.evaluation import Output, outputs, quiet_engine, tallied
from vitkit.training.log import RunLog
from vitkit.training.memory import checkpoint_gradients
from vitkit.training.metrics import Metrics
from vitkit.training.optimizer import configured_optimizer
from vitkit.training.plan import Plan
from vitkit.training.precision import Precision, autocast
from vitkit.training.reporter import Reporter
from vitkit.training.run_folder import RunFolder
from vitkit.training.schedule import learning_rate
from vitkit.training.sharding import shard, whole_model
from vitkit.training.signals import StopFlag
from vitkit.training.starting import started_from, train_mode
from vitkit.training.state import ModelPart, OptimizerPart, Progress, Registry
from vitkit.training.step import Outcome, TrainingStep, is_out_of_memory
from vitkit.training.teaching import Teaching
from vitkit.weights.own import save

MOST_SKIPPED = 3
"""At so many steps in a row without a finite number, `on_nan: skip` stops the run as well."""


class Trainer:
    """One run: the model, the optimizer, and where it stands.

    Args:
        plan: what to do.
        run: where to leave it.
        log: where to say it.
        model: fresh, on the plan's device.
        precision: `off`, `bfloat16` or `float16`.
        stop: raised by a signal.
        world: the processes that share every batch; each has a loop, the first one writes.
    """

    def __init__(
        self,
        plan: Plan,
        run: RunFolder,
        log: RunLog,
        model: ViT,
        precision: Precision,
        stop: StopFlag,
        world: World | None = None,
    ) -> None:
        config = plan.config
        self.world = world or World()
        self.plan, self.run_folder, self.log, self.stop = plan, run, log, stop
        self.model, self.precision = model, precision
        if config.attention_kernel != "auto":
            for one in (model, *([plan.teacher.model] if plan.teacher else [])):
                use_attention(one, config.attention_kernel)
        self.ema = EMA(model, config.model_ema_decay) if config.model_ema else None
        checkpoint_gradients(model, config.grad_checkpointing)
        if config.parallel == "fsdp" and self.world.size > 1:
            for one in (model, *([cast(ViT, self.ema.model)] if self.ema else [])):
                shard(one, self.world, plan.device)
        self.optimizer = configured_optimizer(model, config)
        self.progress = Progress(data=plan.dataset.fingerprint)
        self.registry = Registry()
        self.registry.register("model", ModelPart(model), model)
        self.registry.register("optimizer", OptimizerPart(self.optimizer), self.optimizer)
        if self.ema is not None:
            self.registry.register("ema", self.ema)
        self.registry.register("progress", self.progress)
        feed = make_feed(plan)
        self.teaching = None
        if plan.teacher is not None:
            self.teaching = Teaching(
                plan.teacher, plan, feed, precision, run.teacher, self.world, stop
            )
            self.registry.register("teacher", self.teaching)
        self.step = TrainingStep(
            model, self.optimizer, config, self.teaching or feed, precision, plan.device,
            self.world, stop,
        )  # fmt: skip
        if self.step.scale is not None:
            self.registry.register("loss_scale", self.step.scale)
        self._agreed = 0  # the signal that any of several processes has had
        self.stopped = "the epoch" if config.epochs == 1 else f"all {config.epochs} epochs"
        if plan.last_step < plan.total_steps:
            self.stopped = f"{plan.last_step} steps"
        self._started = time.monotonic()
        self.reporter = Reporter(plan, log, share=self.world.local_size)

    def resume(self, state: Path) -> None:
        """Go on from a whole state.

        Raises:
            CheckpointError: a state of another run.
            DataError: the data are not what the run began with.
        """
        load_state(state, self.registry)
        if self.progress.data != self.plan.dataset.fingerprint:
            raise DataError(
                f"{self.plan.config.data}: the pictures, labels or classes are not those the run "
                f"{self.run_folder.root} began with; bring them back, or start afresh"
            )
        self.log.say(f"going on from step {self.progress.step} ({state})")

    def train(self) -> None:
        """Run to the last epoch, to the end of patience, or to a signal.

        Raises:
            Interrupted: a signal came; the state is saved.
            NonFiniteError: the loss or the gradient is not a finite number, or the loss diverges.
            OutputError: the run folder cannot be written.
        """
        self.registry.refuse_strangers(self)
        steps_per_epoch = self.plan.steps.steps_per_epoch
        remaining = range(self.progress.step, self.plan.last_step)
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
        if self.teaching is not None:
            self.teaching.prepare(remaining, self.log)
        train_mode(self.model)
        self._started = time.monotonic()
        arriving = batches(self.plan.steps, remaining, workers=self.plan.workers)
        engine.run(self.reporter.watched(arriving))

    def _step(self, engine: Engine, batch: Batch) -> float:
        """One step of the arithmetic, and what a number that is not finite means."""
        progress, step = self.progress, self.progress.step
        rate = self._learning_rate(step)
        for group in self.optimizer.param_groups:
            group["lr"] = rate * group.get("lr_scale", 1.0)
        made: Outcome | None = None
        try:
            made = self.step(batch, step)
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
        if made is None:  # only out here, where the error no longer holds what the step had made
            raise self._out_of_memory(batch)
        progress.step += 1
        self.world.note(progress.step)
        self._agreed = made.signum
        if made.bad is not None:
            self._leave_out(made)
            return made.loss
        if made.overflow:
            self.log.say(f"float16: the gradient overflows at step {step}; smaller loss scale")
        elif self.ema is not None:
            self.ema.update(self.model)
        progress.skipped_in_a_row = 0
        progress.loss_sum += made.loss
        progress.losses += 1
        return made.loss

    def _out_of_memory(self, batch: Batch) -> SettingError:
        fits, config = self.step.largest_that_fits(batch), self.plan.config
        mine = config.batch_size // self.world.size
        parts = next((n for n in range(2, mine + 1) if mine % n == 0 and mine // n <= fits),
                     None) if fits else None  # fmt: skip
        mend = "" if fits is None else f"{fits} fitted; "
        mend += f"pass --grad-accum-steps {parts}, or " if parts else ""
        return SettingError(
            f"{self.plan.device} is out of memory at {mine // config.grad_accum_steps}"
            f" pictures at once; {mend}lower --batch-size, --img-size or the model"
        )

    def _leave_out(self, made: Outcome) -> None:
        """Count a step that changed nothing, or stop. Raises `NonFiniteError`."""
        progress, config = self.progress, self.plan.config
        progress.skipped += 1
        progress.skipped_in_a_row += 1
        said = self._what_was_not_finite(made)
        if config.on_nan == "stop" or progress.skipped_in_a_row >= MOST_SKIPPED:
            progress.step -= 1
            raise NonFiniteError(
                f"{said}; {self._last_good()}; try a lower --lr "
                f"(--find-lr looks for one)" + ("" if self.precision == "off" else " or --amp off")
            )
        self.log.say(f"{said}; the step is skipped ({progress.skipped} so far)")

    def _what_was_not_finite(self, made: Outcome) -> str:
        split, step = self.plan.dataset.splits["train"], self.progress.step - 1
        indices = self.plan.steps.indices(step)
        where = ""
        if self.world.size > 1 and made.rank is not None:
            indices, where = indices[made.rank :: self.world.size], f" on rank {made.rank}"
        names = ", ".join(split.name(int(i)) for i in indices[:3])
        value = made.loss if made.bad == "loss" else made.norm
        return (
            f"the {made.bad} is {value}{where} at step {step} (lr {self._learning_rate(step):.3g}, "
            f"loss {made.loss:.3g}, gradient norm {made.norm:.3g}, pictures {names} ...)"
        )

    def _last_good(self) -> str:
        """Where to go on from: the newest state, where there is one yet."""
        states = sorted(self.run_folder.state.glob("step-*"))
        return f"the state before it is kept in {states[-1]}" if states else "no state is kept yet"

    def _learning_rate(self, step: int) -> float:
        config = self.plan.config
        return learning_rate(
            step,
            config.sched,
            peak=config.lr,
            low=config.min_lr,
            warmup=round(config.warmup_epochs * self.plan.steps.steps_per_epoch),
            total=self.plan.total_steps,
        )

    def _after_step(self, engine: Engine) -> None:
        """What is reported of it, and the signal."""
        step, config = self.progress.step, self.plan.config
        loss, rate = float(engine.state.output), self._learning_rate(step - 1)  # type: ignore[arg-type]
        self.reporter.after_step(engine.state.epoch, step, loss, rate)
        if step % self.plan.steps.steps_per_epoch == 0:
            return  # the end of an epoch does all of this
        if signum := self._signal():
            self.save_weights(self.run_folder.last, {})
            self._save_state()
            self._interrupt(signum)
        if step == self.plan.last_step:
            self.save_weights(self.run_folder.last, {})
        if step == self.plan.last_step or (config.save_every and step % config.save_every == 0):
            self._save_state()
        if step == self.plan.last_step:
            engine.terminate()

    def _after_epoch(self, engine: Engine) -> None:
        """Validate; write the row, the weights and the state; see whether to stop here."""
        step, epoch = self.progress.step, engine.state.epoch
        train_loss = self.progress.loss_sum / max(self.progress.losses, 1)
        self.progress.loss_sum, self.progress.losses = 0.0, 0
        self._refuse_divergence(epoch, train_loss)
        validation = self.evaluate("val") if "val" in self.plan.dataset.splits else {}
        if not math.isfinite(validation.get("loss", 0.0)):
            raise NonFiniteError(
                f"the validation loss is {validation['loss']} after epoch {epoch}; "
                f"{self._last_good()}; try a lower --lr"
            )
        better = self._count_best(epoch, validation)
        self._count_time()
        rate = self._learning_rate(step - 1)
        self.reporter.after_epoch(epoch, self.progress, rate, train_loss, validation, better)
        shown = self.shared_model().eval()
        if self.world.first:
            self.reporter.look_at(shown, self.precision, epoch, step)
        if better:
            self.save_weights(self.run_folder.best, {"val": validation})
        self.save_weights(self.run_folder.last, {"val": validation})
        self._save_state()
        self._agreed = self.world.most(self.stop.signum or 0)
        if signum := self._signal():
            self._interrupt(signum)
        if step == self.plan.last_step < self.plan.total_steps:
            engine.terminate()
        if self._out_of_patience() and step < self.plan.total_steps:
            self.stopped = self._why_patience_ended()
            engine.terminate()
        train_mode(self.model)
        self.reporter.next_epoch()

    def _refuse_divergence(self, epoch: int, train_loss: float) -> None:
        """Raises `NonFiniteError` far above ln K, the cross-entropy of knowing nothing."""
        config, blind = self.plan.config, math.log(self.plan.spec.num_classes)
        labels_alone = config.loss == "cross-entropy" and config.teacher is None
        if labels_alone and train_loss > max(2 * blind, blind + 2):
            raise NonFiniteError(
                f"epoch {epoch} has a training loss of {train_loss:.3g}, a guess {blind:.3g}; "
                f"{self._last_good()}; try a --lr below {config.lr:g} (--find-lr looks for one)"
            )

    def evaluate(self, split: str) -> Metrics:
        """Metrics of the model as it stands on a split of the data."""
        return self.measure(split, self.shared_model())

    def measure(self, split: str, model: ViT) -> Metrics:
        """Metrics of any model on a split of the data, in eval mode."""
        made = self.outputs(split, model)
        return tallied(made, self.plan.spec.num_classes).counts(self.world).scores()

    def outputs(self, split: str, model: ViT) -> Iterator[Output]:
        """What any model, in eval mode, makes of this process's pictures of a split."""
        plan = self.plan
        model.eval()

        def forward(images: Tensor) -> Tensor:
            with autocast(self.precision, plan.device):
                logits: Tensor = model(images)
            return logits

        return outputs(
            forward,
            plan.dataset.splits[split],
            plan.preprocess,
            device=plan.device,
            workers=plan.workers,
            world=self.world,
        )

    def shared_model(self) -> ViT:
        """What is evaluated and shared, whole: the average of the weights where there is one."""
        return whole_model(self.model if self.ema is None else cast(ViT, self.ema.model))

    def save_weights(self, path: Path, metrics: dict[str, Metrics]) -> None:
        """Write the model as it stands, with everything needed to use it. Raises `OutputError`."""
        plan, steps, model = self.plan, self.plan.steps.steps_per_epoch, self.shared_model()
        self.world.decided(lambda: str(save(
            path,
            model,
            preprocess=plan.preprocess,
            classes=plan.dataset.classes,
            recipe=plan.config.to_json(),
            metrics=metrics,
            epoch=self.progress.step / steps,
            weights="average" if self.ema else "as trained",
            data={
                "name": plan.dataset.name,
                "fingerprint": plan.dataset.fingerprint,
                "pictures": {name: len(part) for name, part in plan.dataset.splits.items()},
            },
            **started_from(plan.config),
        )))  # fmt: skip

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
        """Leave; everything is saved."""
        raise Interrupted(
            signum,
            f"stopped at step {self.progress.step} of {self.plan.total_steps}; all is saved, go "
            f"on with: vitkit train --resume {shlex.quote(str(self.run_folder.root))}",
        )

    def _signal(self) -> int:
        """The signal to act on, or 0; several processes act on what all of them know of."""
        return (self.stop.signum or 0) if self.world.size == 1 else self._agreed

    def _save_state(self) -> None:
        self._count_time()
        self.log.flush()
        save_state(self.run_folder.state, self.registry, self.progress.step, self.world)

    def _count_time(self) -> None:
        now = time.monotonic()
        self.progress.seconds += now - self._started
        self._started = now

    def _why_patience_ended(self) -> str:
        return f"no higher validation top-1 for {self.progress.stale} epochs"

    def _out_of_patience(self) -> bool:
        patience = self.plan.config.patience
        return patience is not None and self.progress.stale >= patience
