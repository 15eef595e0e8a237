"""`Run`: the parts of a run, which its callbacks share; its evaluation, result and first lines."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from torch import optim

from vitkit import distributed, errors, process
from vitkit.evaluation import loop, temperature
from vitkit.evaluation.metrics import Metrics
from vitkit.messages import plural
from vitkit.models.vit import ViT
from vitkit.plots.html import html_table
from vitkit.training.config import merging, passed_objects
from vitkit.training.config.train_config import USUAL, TrainConfig
from vitkit.training.monitoring.figures import LearningCurves
from vitkit.training.monitoring.run_log import RunLog, epochs_per_line
from vitkit.training.optimization.parameters import EMA
from vitkit.training.plan import Plan
from vitkit.training.run_folder import RunFolder
from vitkit.training.state.registry import Progress, Registry
from vitkit.training.step import TrainingStep, has_shards
from vitkit.training.trainer import Callback, call_event

if TYPE_CHECKING:
    from torch.distributed.fsdp import FSDPModule

    from vitkit.plots.figure import NotebookFigure


@dataclass(frozen=True)
class EpochResult:
    """An epoch that is validated.

    Attributes:
        epoch: counted from 1.
        learning_rate: learning rate of its last step.
        train_loss: mean of its steps.
        validation: scores; empty without a validation split.
        is_best: whether no epoch before was as good.
        model: what was validated, in one piece, in eval mode.
    """

    epoch: int
    learning_rate: float
    train_loss: float
    validation: Metrics
    is_best: bool
    model: ViT


@dataclass
class Run:
    """The parts of a run.

    Attributes:
        plan: settings, data, model spec, steps, device.
        folder: where the run is written.
        log: the terminal and the run's logs; silent in all processes but the first.
        world: the processes of the run.
        stop: set by a signal.
        model: model that trains.
        optimizer: over the model's parameters.
        progress: where the run is.
        registry: all state by name, as it is saved.
        training_step: the arithmetic of a step.
        ema: the average of the weights, where there is one.
        held_out: validation logits that the temperature is fitted on; `None` without validation.
        epoch_result: result of the epoch that was validated last, until it is saved.
        further: callbacks that are not the run's own; evaluation calls these.
    """

    plan: Plan
    folder: RunFolder
    log: RunLog
    world: distributed.ProcessGroup
    stop: process.StopFlag
    model: ViT
    optimizer: optim.Optimizer
    progress: Progress
    registry: Registry
    training_step: TrainingStep
    ema: EMA[ViT] | None = None
    epoch_result: EpochResult | None = None
    further: Sequence[Callback] = ()
    held_out: temperature.HeldOutLogits | None = field(init=False)
    _started: float = field(default_factory=time.monotonic)

    def __post_init__(self) -> None:
        val = self.plan.dataset.splits.get("val")
        classes = self.plan.spec.num_classes
        # filled by each validation; a resumed run reads those of its earlier part first
        self.held_out = None if val is None else temperature.HeldOutLogits(len(val), classes)

    @property
    def model_to_save(self) -> ViT:
        """The model that is validated and saved: the average of the weights, where there is one."""
        if self.ema is None:
            return self.model
        return self.ema.model

    def restart_clock(self) -> None:
        """Leave the time since the last count out of the seconds of training."""
        self._started = time.monotonic()

    def count_time(self) -> None:
        """Add the time since the last count to the seconds of training."""
        # monotonic: not affected by changes of the system clock
        now = time.monotonic()
        self.progress.seconds += now - self._started
        self._started = now

    def stops_alone(self) -> bool:
        """Return True if a signal has arrived and this is the only process, so it may stop now."""
        return self.world.size == 1 and self.stop.signum is not None

    def how_to_resume(self) -> str:
        """Return the command that resumes this run, or the call where objects were passed."""
        return passed_objects.how_to_resume(self.plan.config, self.folder.root)

    def resume_hint(self) -> str:
        """Return a line on the newest state of the run, and how to resume from it."""
        return self.folder.resume_hint(self.how_to_resume())

    def settings_to_store(self) -> dict[str, Any]:
        """Return the settings for config.yaml, without those of this call."""
        root = str(self.folder.root)
        return replace(self.plan.config, output=root, resume=None, overwrite=False).to_json()

    def interrupted(self, signum: int) -> errors.Interrupted:
        """Return the error for a run that a signal ended, after saving."""
        step = f"step {self.progress.step} of {self.plan.total_steps}"
        return errors.Interrupted(
            signum, f"stopped at {step}; everything is saved, {self.how_to_resume()}"
        )


# Evaluation of a model of the run on one of its splits, by all processes together.

BATCH_SIZE = 256
"""Images of one evaluation batch of a process, as in `vitkit eval`."""


def evaluate_split(run: Run, split: str, model: ViT) -> Iterator[loop.LabelledLogits]:
    """Yield the outputs of a model for this process's images of a split, in float32.

    The run may train in bfloat16: its scores are those that the file of weights has elsewhere.

    Args:
        run: its data, device and processes.
        split: split of the data.
        model: whole or sharded; it is set to eval mode.

    Raises:
        Interrupted: a signal came to any of the processes; nothing that is saved is lost.
    """
    plan, world = run.plan, run.world
    images, sharded = plan.dataset.splits[split], has_shards(model)
    # Starting loader processes takes longer than one batch.
    workers = plan.workers if len(images) > BATCH_SIZE else 0
    batches = loop.predict_batches(
        model.eval(),
        images,
        plan.preprocess,
        batch_size=BATCH_SIZE,
        device=plan.device,
        workers=workers,
        world=world,
        collective=sharded,
    )
    most = -(-len(images) // (BATCH_SIZE * world.size))  # some processes have one batch less
    for _ in range(most):
        yield from islice(batches, 1)
        for callback in run.further:
            call_event(callback, "after_evaluation_batch", split)
        if signum := world.all_reduce_max(run.stop.signum or 0):
            raise run.interrupted(signum)
    yield from batches  # exhausted: lets the code after the last batch run
    if sharded:
        cast("FSDPModule", model).reshard()


# `TrainResult`: the folder, the weights and the scores that a run leaves.

NOTEBOOK_SCORES = ("top1", "loss", "balanced_accuracy", "images")
"""Scores that a notebook shows."""


@dataclass(frozen=True)
class TrainResult:
    """The results of a run.

    Attributes:
        run: its folder.
        best: weights of the best epoch by validation top-1.
        last: weights of the last step.
        metrics: split -> metrics of the best weights, as `vitkit.evaluate` gives them: shares in
            [0, 1], losses in nats; `val`, and `test` where there is one.
        stopped: why the run ended.
    """

    run: Path
    best: Path
    last: Path
    metrics: dict[str, Metrics] = field(default_factory=dict)
    stopped: str = ""

    @property
    def curves(self) -> LearningCurves:
        """The losses, scores and learning rates of each epoch; after `--auto` those of the winner.

        Raises:
            DataError: no epoch is complete, or the run is a probe.
            OutputError: the run folder is gone.
        """
        folder = self.run
        if not RunFolder(folder).metrics.exists():
            folder = self.last.parents[1]  # a search has its winner's run inside
        return LearningCurves.read(folder)

    def plot(self) -> NotebookFigure:
        """Draw the learning curves as a matplotlib Figure; `.savefig("curves.pdf")` writes it.

        Raises:
            DataError: no epoch is complete, or the run is a probe.
        """
        return self.curves.plot()

    def _repr_html_(self) -> str:
        """Return the scores and paths as a table, for a notebook."""
        rows = []
        for split, scores in self.metrics.items():
            # the number of images is an integer, and a k-NN probe has no loss
            cells = []
            for name in NOTEBOOK_SCORES:
                value = scores.get(name, "")
                cells.append(f"{value:.4f}" if isinstance(value, float) else str(value))
            rows.append([split, *cells])
        table = ""
        if rows:
            table = html_table(["best weights", *NOTEBOOK_SCORES], rows)
        facts: list[list[object]] = [["run", self.run], ["ended after", self.stopped]]
        # a short run has no best epoch yet, and a k-NN probe no weights at all
        weights = next((path for path in (self.best, self.last) if path.exists()), None)
        if weights is not None:
            facts.insert(1, ["weights", weights])
        return table + html_table(["", ""], facts)


# The first lines of a run's log: the data, the model, the settings.

IN_OTHER_LINES = ("output", "start")
IN_LINE_ON_TRAINING = ("epochs", "batch_size", "lr")
"""Settings that are logged in lines of their own; a probe has no line on training."""
IN_LINE_ON_MODEL = (
    "spec.patch_size",
    "spec.width",
    "spec.mlp_width",
    "spec.depth",
    "spec.num_heads",
)


def log_model(plan: Plan, log: RunLog, model: ViT) -> None:
    """Log the data and the model, which tuning does not change."""
    spec = plan.spec
    parts = ", ".join(f"{len(part):,} {name}" for name, part in plan.dataset.splits.items())
    log.info(f"data: {plan.dataset.name}, {len(plan.dataset.classes)} classes, images: {parts}")
    # counted before the model is sharded
    parameters = sum(p.numel() for p in model.parameters())
    frozen = sum(p.numel() for p in model.parameters() if not p.requires_grad)
    counts = f"{parameters:,} parameters"
    if frozen:
        counts += f" ({frozen:,} of them frozen)"
    patches = "patch" if spec.num_patches == 1 else "patches"
    log.info(
        f"model: {counts}, {spec.num_patches:,} {patches} of {spec.patch_size[0]} x "
        f"{spec.patch_size[1]}, width {spec.width}, MLP width {spec.mlp_width}, "
        f"{plural(spec.depth, 'block')}, {plural(spec.num_heads, 'head')}"
    )


def log_settings(run: Run) -> None:
    """Log all settings, including the tuned ones, and the steps."""
    plan, log, world = run.plan, run.log, run.world
    config = plan.config
    log.info(f"settings: {_settings_shown(config)}")
    if config.probe is None:
        log.info(
            f"training: {plural(config.epochs, 'epoch')} of "
            f"{plural(plan.steps.steps_per_epoch, 'step')}, "
            f"batch {config.batch_size}, lr {config.lr:g}, on {plan.device}, into {run.folder.root}"
        )
        every = epochs_per_line(config.epochs)
        if every > 1:
            best = ""
            if "val" in plan.dataset.splits:
                best = " and the best ones"
            log.info(f"epochs shown below: 1 of {every}{best}; {run.folder.log.name} has all")
    if world.size > 1:
        each = config.batch_size // world.size
        parts = ""
        if config.grad_accum_steps > 1:
            parts = f" in {config.grad_accum_steps} parts"
        log.info(
            f"processes: {world.size} ({config.parallel}), {plural(each, 'image')} each{parts} "
            f"make a batch of {config.batch_size}"
        )


def _settings_shown(config: TrainConfig) -> str:
    """Return the settings that differ from the defaults and are in no other line of the log."""
    # a setting that was left open is shown where it got another value than usual
    usual = TrainConfig(data=config.data).to_json() | USUAL
    hidden: tuple[str, ...] = IN_OTHER_LINES
    if config.probe is None:
        hidden += IN_LINE_ON_TRAINING
    shown = {k: v for k, v in config.to_json().items() if v != usual[k] and k not in hidden}
    # a model of another size is not the named one
    if {"width", "depth"} <= config.spec.keys():
        shown.pop("model", None)
    if "image_size" in config.spec:
        shown.pop("img_size", None)
    changed = [
        f"{name} {value:.10g}" if isinstance(value, float) else f"{name} {value}"
        for name, value in merging.with_flat_spec(shown).items()
        if name not in IN_LINE_ON_MODEL
    ]
    return ", ".join(changed) or "all have their defaults"
