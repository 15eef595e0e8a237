"""What a run says when it cannot go on: no memory, numbers that are not finite, divergence."""

from __future__ import annotations

import math

from vitkit.data.loading.loader import Batch
from vitkit.distributed import World
from vitkit.errors import NonFiniteError, SettingError
from vitkit.training.run_folder import RunFolder
from vitkit.training.setup import Plan
from vitkit.training.state.save import states
from vitkit.training.step import Outcome, TrainingStep


def out_of_memory(step: TrainingStep, batch: Batch, plan: Plan, world: World) -> SettingError:
    """Try what fits into memory, and build the error that says what to pass."""
    fits, config = step.largest_that_fits(batch), plan.config
    mine = config.batch_size // world.size
    parts = next((n for n in range(2, mine + 1) if mine % n == 0 and mine // n <= fits),
                 None) if fits else None  # fmt: skip
    mend = "" if fits is None else f"{fits} fitted; "
    mend += f"pass --grad-accum-steps {parts}, or " if parts else ""
    return SettingError(
        f"{plan.device} is out of memory at {mine // config.grad_accum_steps}"
        f" images at once; {mend}lower --batch-size, --img-size or the model"
    )


def not_finite(made: Outcome, step: int, rate: float, plan: Plan, world: World) -> str:
    """Say what was not finite in a step, counted from 0, with the images of its batch."""
    split, indices = plan.dataset.splits["train"], plan.steps.indices(step)
    where = ""
    if world.size > 1 and made.rank is not None:
        indices, where = indices[made.rank :: world.size], f" on rank {made.rank}"
    names = ", ".join(split.name(int(i)) for i in indices[:3])
    value = made.loss if made.bad == "loss" else made.norm
    return (
        f"the {made.bad} is {value}{where} at step {step} (lr {rate:.3g}, "
        f"loss {made.loss:.3g}, gradient norm {made.norm:.3g}, images {names} ...)"
    )


def last_good(run: RunFolder) -> str:
    """Say where to go on from: the newest state, where there is one yet."""
    kept = states(run.state)
    return f"the state before it is kept in {kept[-1]}" if kept else "no state is kept yet"


def refuse_divergence(plan: Plan, run: RunFolder, epoch: int, train_loss: float) -> None:
    """Raise `NonFiniteError` far above ln K, the cross-entropy of knowing nothing."""
    config, blind = plan.config, math.log(plan.spec.num_classes)
    labels_alone = config.loss == "cross-entropy" and config.teacher is None
    if labels_alone and train_loss > max(2 * blind, blind + 2):
        raise NonFiniteError(
            f"epoch {epoch} has a training loss of {train_loss:.3g}, a guess {blind:.3g}; "
            f"{last_good(run)}; try a --lr below {config.lr:g} (--find-lr looks for one)"
        )
