"""`Run`: the parts of a run, which its callbacks share."""

from __future__ import annotations

import shlex
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from torch import optim

from vitkit.distributed import ProcessGroup
from vitkit.errors import Interrupted
from vitkit.evaluation.metrics import Metrics
from vitkit.evaluation.temperature import HeldOutLogits
from vitkit.models.vit import ViT
from vitkit.training.interrupts import StopFlag
from vitkit.training.monitoring.run_log import RunLog
from vitkit.training.optimization.ema import EMA
from vitkit.training.run_folder import RunFolder
from vitkit.training.run_plan import Plan
from vitkit.training.state.progress import Progress
from vitkit.training.state.registry import Registry
from vitkit.training.step import TrainingStep
from vitkit.training.trainer import Callback


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
    world: ProcessGroup
    stop: StopFlag
    model: ViT
    optimizer: optim.Optimizer
    progress: Progress
    registry: Registry
    training_step: TrainingStep
    ema: EMA[ViT] | None = None
    epoch_result: EpochResult | None = None
    further: Sequence[Callback] = ()
    held_out: HeldOutLogits | None = field(init=False)
    _started: float = field(default_factory=time.monotonic)

    def __post_init__(self) -> None:
        val = self.plan.dataset.splits.get("val")
        classes = self.plan.spec.num_classes
        # filled by each validation; a resumed run reads those of its earlier part first
        self.held_out = None if val is None else HeldOutLogits(len(val), classes)

    @property
    def model_to_save(self) -> ViT:
        """The model that is validated and saved: the average of the weights, where there is one."""
        return self.model if self.ema is None else self.ema.model

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
        call = self.plan.python_call_to_resume(self.folder.root)
        if call is not None:
            return f"resume with the same objects: {call}"
        return f"resume with: vitkit train --resume {shlex.quote(str(self.folder.root))}"

    def interrupted(self, signum: int) -> Interrupted:
        """Return the error for a run that a signal ended, after saving."""
        step = f"step {self.progress.step} of {self.plan.total_steps}"
        return Interrupted(
            signum, f"stopped at {step}; everything is saved, {self.how_to_resume()}"
        )
