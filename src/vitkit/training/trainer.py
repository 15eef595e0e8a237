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
from typing import NoReturn, cast

from ignite.engine import Engine, Events

from vitkit.data.loading.loader import Batch, batches
from vitkit.distributed import World
from vitkit.errors import Interrupted, NonFiniteError, plural
from vitkit.evaluation.evaluate import Output, count_predictions, quiet_engine
from vitkit.evaluation.metrics import Metrics
from vitkit.models.attention import use_attention
from vitkit.models.vit import ViT
from vitkit.training.build import make_objective, make_step, make_teacher_targets, make_transform
from vitkit.training.callbacks.evaluate import judged
from vitkit.training.callbacks.missing_images import other_data, saved_when_images_fail
from vitkit.training.callbacks.report import Reporter
from vitkit.training.callbacks.write_weights import write_weights
from vitkit.training.failures import last_good, not_finite, out_of_memory, refuse_divergence
from vitkit.training.initial_weights import train_mode
from vitkit.training.interrupts import StopFlag
from vitkit.training.monitoring.run_log import RunLog
from vitkit.training.optimization.activation_checkpointing import checkpoint_gradients
from vitkit.training.optimization.ema import EMA
from vitkit.training.optimization.optimizers import configured_optimizer
from vitkit.training.optimization.precision import Precision
from vitkit.training.optimization.schedule import learning_rate
from vitkit.training.parallel.fsdp import shard, unsharded_model
from vitkit.training.run_folder import RunFolder
from vitkit.training.setup import Plan
from vitkit.training.state.registry import ModelPart, OptimizerPart, Progress, Registry
from vitkit.training.state.save import load_state, save_state, save_values, withdraw_state
from vitkit.training.step import Outcome, is_out_of_memory

SAVED_EVERY = 5.0
"""Seconds since the last state after which the end of an epoch saves one: the epochs of small data
take less time than writing a state."""
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
        self.teaching = make_teacher_targets(plan, run, precision, self.world, stop)
        if self.teaching is not None:
            self.registry.register("teacher", self.teaching)
        distillation = self.teaching.distillation if self.teaching else None
        self.step = make_step(
            plan,
            make_objective(plan, model, precision, distillation),
            self.optimizer,
            self.teaching or make_transform(plan),
            compile=config.compile,
            world=self.world,
            stop=stop,
        )
        if self.step.scale is not None:
            self.registry.register("loss_scale", self.step.scale)
        self._agreed = 0  # the signal that any of several processes has had
        self.stopped = "the epoch" if config.epochs == 1 else f"all {config.epochs} epochs"
        if plan.last_step < plan.total_steps:
            self.stopped = plural(plan.last_step, "step")
        self.settings = config.to_json()
        self._started = self._saved = time.monotonic()
        self._saved_step = -1
        self.reporter = Reporter(plan, log, share=self.world.local_size)

    def resume(self, state: Path) -> None:
        """Go on from a whole state.

        Raises:
            CheckpointError: a state of another run.
            DataError: the data are not what the run began with.
        """
        load_state(state, self.registry)
        if what := self.plan.dataset.difference(self.progress.data):
            raise other_data(self, what)
        self._saved_step = self.progress.step
        self.log.say(f"going on from step {self.progress.step} ({state})")

    @property
    def is_finished(self) -> bool:
        """Whether there is nothing left to train or to validate."""
        ended = self.progress.step >= self.plan.last_step or self._out_of_patience()
        return ended and not self.progress.unvalidated

    def train(self) -> None:
        """Run to the last epoch, to the end of patience, or to a signal.

        Raises:
            Interrupted: a signal came; the state is saved.
            NonFiniteError: the loss or the gradient is not a finite number, or the loss diverges.
            OutputError: the run folder cannot be written.
        """
        self.registry.check_all_registered(self)
        self._started = time.monotonic()
        with saved_when_images_fail(self):
            if self.progress.unvalidated:  # a signal or a kill came between the last step and here
                self._end_epoch(self.progress.step // self.plan.steps.steps_per_epoch)
            remaining = range(self.progress.step, self.plan.last_step)
            if not self._out_of_patience() and remaining:
                self._train(remaining)
            elif not self.world.decided(self.run_folder.last.exists):
                self.save_weights(self.run_folder.last, {})

    def _train(self, remaining: range) -> None:
        """Make the remaining steps."""
        engine = quiet_engine(self._step)
        engine.add_event_handler(Events.ITERATION_COMPLETED, self._after_step)
        engine.add_event_handler(Events.EPOCH_COMPLETED, self._after_epoch)
        epochs, length = self.plan.config.epochs, self.plan.steps.steps_per_epoch
        engine.load_state_dict(
            {"iteration": self.progress.step, "max_epochs": epochs, "epoch_length": length}
        )
        if self.teaching is not None:
            self.teaching.prepare(remaining, self.log.say)
        train_mode(self.model)
        self._started = time.monotonic()
        arriving = batches(
            self.plan.steps, remaining, workers=self.plan.workers, stopped=self.stops_alone
        )
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
            raise out_of_memory(self.step, batch, self.plan, self.world)
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

    def _leave_out(self, made: Outcome) -> None:
        """Count a step that changed nothing, or stop. Raises `NonFiniteError`."""
        progress, config = self.progress, self.plan.config
        progress.skipped += 1
        progress.skipped_in_a_row += 1
        done = progress.step - 1
        said = not_finite(made, done, self._learning_rate(done), self.plan, self.world)
        if config.on_nan == "stop" or progress.skipped_in_a_row >= MOST_SKIPPED:
            progress.step -= 1
            raise NonFiniteError(
                f"{said}; {last_good(self.run_folder)}; try a lower --lr "
                f"(--find-lr looks for one)" + ("" if self.precision == "off" else " or --amp off")
            )
        self.log.say(f"{said}; the step is skipped ({progress.skipped} so far)")

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
        signum, last = self._signal(), step == self.plan.last_step
        if signum or last:  # before the state: a run that is killed in between makes both again
            self.save_weights(self.run_folder.last, {})
        if signum or last or (config.save_every and step % config.save_every == 0):
            self._save_state()
        if signum:
            self.interrupt(signum)
        if last:
            engine.terminate()

    def stops_alone(self) -> bool:
        """Whether a signal may end the wait for a batch; others of several would not know of it."""
        return self.world.size == 1 and self.stop.signum is not None

    def _after_epoch(self, engine: Engine) -> None:
        """Save the epoch's last step, then end the epoch; see whether to stop here."""
        progress, epoch = self.progress, engine.state.epoch
        train_loss = progress.loss_sum / max(progress.losses, 1)
        refuse_divergence(self.plan, self.run_folder, epoch, train_loss)
        progress.unvalidated = True
        if due := self._is_due():
            self._save_state()  # before validation, which may be long and be killed
        self._end_epoch(epoch, save=due)
        if progress.step == self.plan.last_step < self.plan.total_steps or self._out_of_patience():
            engine.terminate()
        train_mode(self.model)
        self.reporter.next_epoch()

    def _is_due(self) -> bool:
        """Whether this epoch's end saves: the first and the last do, `--save-every`, a late one."""
        step, every = self.progress.step, self.plan.config.save_every
        late = self._saved_step < 0 or time.monotonic() - self._saved >= SAVED_EVERY
        due = late or step == self.plan.last_step or (every is not None and step % every == 0)
        return self.world.decided(lambda: due)

    def _end_epoch(self, epoch: int, *, save: bool = True) -> None:
        """Validate; write the row and the best weights; save, or let a later epoch do it."""
        progress, rate = self.progress, self._learning_rate(self.progress.step - 1)
        validation = self._validated(epoch) if "val" in self.plan.dataset.splits else {}
        train_loss = progress.loss_sum / max(progress.losses, 1)
        progress.loss_sum, progress.losses, progress.unvalidated = 0.0, 0, False
        better = progress.count_best(epoch, validation)
        self._count_time()
        self.reporter.after_epoch(epoch, progress, rate, train_loss, validation, better)
        shown = unsharded_model(self.model_to_save(), self.world).eval()
        if self.world.first:
            self.reporter.look_at(shown, epoch, progress.step)
        if better:
            self.save_weights(self.run_folder.best, {"val": validation}, shown)
        signum = self.world.most(self.stop.signum or 0)
        if save or signum or self._out_of_patience():
            self.save_weights(self.run_folder.last, {"val": validation}, shown)
            self.log.flush()
            if not save_values(self.run_folder.state, self.registry, progress.step, self.world):
                self._save_state()
        if signum:
            self.interrupt(signum)

    def _leave_if_asked(self) -> None:
        """Look at the signals of all processes; each must call. Raises `Interrupted`."""
        if signum := self.world.most(self.stop.signum or 0):
            self.interrupt(signum)

    def _validated(self, epoch: int) -> Metrics:
        """The scores on the validation split. Raises `NonFiniteError`, `Interrupted`."""
        try:
            validation = self.evaluate("val")
        except Interrupted:
            self._save_state()
            self.save_weights(self.run_folder.last, {})
            raise
        if not math.isfinite(validation["loss"]):
            folder, step = self.run_folder.state, self.progress.step
            self.world.decided(lambda: withdraw_state(folder, step))
            raise NonFiniteError(
                f"the validation loss is {validation['loss']} after epoch {epoch}; "
                f"{last_good(self.run_folder)}; try a lower --lr"
            )
        return validation

    def evaluate(self, split: str) -> Metrics:
        """Metrics of the model as it stands on a split of the data."""
        return self.measure(split, self.model_to_save())

    def measure(self, split: str, model: ViT) -> Metrics:
        """Metrics of any model on a split of the data, in eval mode."""
        made = self.outputs(split, model)
        return count_predictions(made, self.plan.spec.num_classes).counts(self.world).scores()

    def outputs(self, split: str, model: ViT) -> Iterator[Output]:
        """What any model makes of this process's images of a split; see `judged`.

        Raises:
            Interrupted: a signal came to any of the processes; nothing that is saved is lost by it.
        """
        return judged(
            self.plan, split, model, self.world, self._leave_if_asked, self.reporter.tell_failed
        )

    def model_to_save(self) -> ViT:
        """What is evaluated and shared: the average of the weights where there is one."""
        return self.model if self.ema is None else cast(ViT, self.ema.model)

    def save_weights(
        self, path: Path, metrics: dict[str, Metrics], gathered: ViT | None = None
    ) -> None:
        """Write the model as it stands, with everything needed to use it. Raises `OutputError`.

        Args:
            path: of the file.
            metrics: of each split.
            gathered: the model in one piece, where somebody has it already.
        """
        model = gathered or unsharded_model(self.model_to_save(), self.world)
        step, average = self.progress.step, self.ema is not None
        self.world.decided(
            lambda: write_weights(path, model, self.plan, metrics, step=step, average=average)
        )

    def interrupt(self, signum: int) -> NoReturn:
        """Leave; everything is saved. Raises `Interrupted`."""
        where = f"step {self.progress.step} of {self.plan.total_steps}"
        raise Interrupted(signum, f"stopped at {where}; all is saved, {self.how_to_go_on()}")

    def how_to_go_on(self) -> str:
        """Say by which command."""
        return f"go on with: vitkit train --resume {shlex.quote(str(self.run_folder.root))}"

    def _signal(self) -> int:
        """The signal to act on, or 0; of several processes, one that all of them know of."""
        return (self.stop.signum or 0) if self.world.size == 1 else self._agreed

    def save_between_steps(self) -> bool:
        """Save what is not saved yet; whether all is saved, which one of several cannot do."""
        if self.world.size > 1:
            return False
        if self.progress.step != self._saved_step:
            self.save_weights(self.run_folder.last, {})
            self._save_state()
        return True

    def _save_state(self) -> None:
        self._count_time()
        self.log.flush()
        save_state(
            self.run_folder.state, self.registry, self.progress.step, self.world, self.settings
        )
        self._saved, self._saved_step = time.monotonic(), self.progress.step

    def _count_time(self) -> None:
        now = time.monotonic()
        self.progress.seconds += now - self._started
        self._started = now

    def _out_of_patience(self) -> bool:
        """See whether patience ends the run before its last step, and say so in `stopped`."""
        patience, progress = self.plan.config.patience, self.progress
        if patience is None or progress.stale < patience or progress.step >= self.plan.total_steps:
            return False
        self.stopped = f"no higher validation top-1 for {plural(progress.stale, 'epoch')}"
        return True
