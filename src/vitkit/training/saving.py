"""Save states and weights: when they are written, and in which order.

`state.state_folder` writes a state, and deletes all but the newest two.
"""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from vitkit import errors
from vitkit.evaluation.loop import finite_scores
from vitkit.evaluation.metrics import Metrics
from vitkit.messages import plural
from vitkit.models.vit import ViT
from vitkit.training.initial_weights import started_from
from vitkit.training.run import Run
from vitkit.training.state.state_folder import save_state
from vitkit.training.step import StepResult, unsharded_model
from vitkit.training.trainer import Callback, Trainer
from vitkit.weights.formats.vitkit import save

SAVED_EVERY = 5.0
"""Seconds since the last state after which the end of an epoch saves one: the epochs of small data
take less time than writing a state."""


class Save(Callback):
    """Writes states, the best and the last weights.

    A step within an epoch saves where `--save-every` asks for it and where the run ends there. The
    end of an epoch saves, too, if it is the first of the process, or the last state is old.

    Args:
        run: the run.
    """

    def __init__(self, run: Run) -> None:
        self.run = run
        self.saved_step = -1
        self.is_due = True
        self._saved_at = time.monotonic()

    def after_step(self, trainer: Trainer, result: StepResult) -> None:
        """Save within an epoch; its end saves after validation."""
        step, every = trainer.progress.step, self.run.plan.config.save_every
        if step % trainer.steps_per_epoch == 0:
            return
        if trainer.is_ending:  # before the state: a run killed in between repeats both
            self.save_weights(self.run.folder.last)
        if trainer.is_ending or (every and step % every == 0):
            self.save_state()

    def after_epoch(self, trainer: Trainer) -> None:
        """Save the best weights; and the last weights with the state, if they are due."""
        run, epoch = self.run, self.run.epoch_result
        assert epoch is not None, "after `Evaluate`"
        # the best weights before the state: a run killed in between repeats both
        metrics = {"val": epoch.validation}
        if epoch.is_best:
            self.save_weights(run.folder.best, metrics, epoch.model)
        if self.is_due or trainer.is_ending:
            self.save_weights(run.folder.last, metrics, epoch.model)
            self.save_state()  # replaces the values of the state before validation
        run.epoch_result = None  # the gathered weights of a sharded model are large

    def on_end(self, trainer: Trainer) -> None:
        """Save the steps since the last state, if a callback ended the run before a step."""
        self._save_rest()
        if not self.run.world.broadcast_from_main(self.run.folder.last.exists):
            self.save_weights(self.run.folder.last)

    def before_validation(self, last_step: int) -> None:
        """Save the state if it is due: validation may be long, and be killed."""
        step, every = self.run.progress.step, self.run.plan.config.save_every
        if self.saved_step == step:  # resumed at this step
            self.is_due = True
            return
        late = self.saved_step < 0 or time.monotonic() - self._saved_at >= SAVED_EVERY
        due = late or step == last_step or (every is not None and step % every == 0)
        # all processes decide alike
        self.is_due = self.run.world.broadcast_from_main(lambda: due)
        if self.is_due:
            self.save_state()

    def save_state(self) -> None:
        """Write the state of all processes. Raises `OutputError`."""
        run = self.run
        run.count_time()
        run.log.flush()
        # the validation logits of the epochs so far, before the state that counts them
        held_out = run.held_out
        if held_out is not None:
            run.world.broadcast_from_main(lambda: held_out.save(run.folder.held_out))
        # config.yaml may be edited by hand; the settings in the state count
        settings = run.plan.config.to_json()
        save_state(run.folder.state, run.registry, run.progress.step, run.world, settings)
        self._saved_at, self.saved_step = time.monotonic(), run.progress.step

    def save_weights(
        self, path: Path, metrics: dict[str, Metrics] | None = None, whole: ViT | None = None
    ) -> None:
        """Write the model with all that is needed to use it. Raises `OutputError`.

        Args:
            path: path of the file.
            metrics: metrics of each split.
            whole: the model in one piece, where it is gathered already.
        """
        world = self.run.world
        # gathered by all processes, written by the first
        model = whole or unsharded_model(self.run.model_to_save, world)
        world.broadcast_from_main(lambda: _write_weights(path, model, self.run, metrics or {}))

    def save_between_steps(self) -> bool:
        """Save the steps that are not saved yet; return False if several processes cannot."""
        if self.run.world.size > 1:
            return False
        self._save_rest()
        return True

    def _save_rest(self) -> None:
        if self.run.progress.step != self.saved_step:
            self.save_weights(self.run.folder.last)
            self.save_state()


@contextmanager
def saved_on_error(run: Run, save: Save) -> Iterator[None]:
    """Save the run before an error of images or user code leaves the block; add how to resume.

    Nothing is saved where memory ran out: that may have happened in the middle of an update.

    Raises:
        ImageError, DataError, UserCodeError, LoaderError: the error, with the command to resume.
        SettingError: out of memory; it names the settings that need less.
        Interrupted: instead of a `LoaderError`, where a signal ended the wait for the images.
    """
    try:
        yield
    except (errors.ImageError, errors.DataError, errors.UserCodeError) as error:
        end = f"{_save_and_describe(run, save)}: fix it and {run.how_to_resume()}"
        if isinstance(error, errors.ImageError):
            raise errors.ImageError(error.name, error.reason, f"{error.detail}; {end}") from error
        # the cause has the traceback of the user's own code
        raise type(error)(f"{error}; {end}") from error.__cause__
    except errors.LoaderError as error:
        save.save_between_steps()
        if run.stops_alone():
            raise run.interrupted(run.stop.signum or 0) from None
        raise errors.LoaderError(f"{error}; {run.how_to_resume()}") from None
    except MemoryError:
        raise _out_of_memory(run) from None


def _save_and_describe(run: Run, save: Save) -> str:
    """Save the steps that are not saved yet; return the step at which the run stopped."""
    saved = "everything is saved"
    if not save.save_between_steps():  # one of several processes
        saved = run.folder.last_state_hint()
    return f"the run stopped at step {run.progress.step}, {saved}"


def _out_of_memory(run: Run) -> errors.SettingError:
    """Return the error that names the settings that need less memory."""
    plan = run.plan
    config = plan.config
    parts = config.grad_accum_steps
    at_once = config.batch_size // run.world.size // parts
    recompute = "pass --grad-checkpointing, or "
    if config.grad_checkpointing:
        recompute = ""
    return errors.SettingError(
        f"{plan.device} is out of memory with {plural(at_once, 'image')} at once; {recompute}"
        f"start afresh with --grad-accum-steps {2 * parts}, a lower --batch-size or --img-size, or "
        f"a smaller model; {run.resume_hint()}"
    )


def _write_weights(path: Path, model: ViT, run: Run, metrics: dict[str, Metrics]) -> str:
    """Write a model in one piece as a file that describes itself; returns the path."""
    plan, dataset = run.plan, run.plan.dataset
    described = {
        "name": dataset.name,
        "fingerprint": dataset.fingerprint,
        "images": {name: len(part) for name, part in dataset.splits.items()},
    }
    return str(
        save(
            path,
            model,
            preprocess=plan.preprocess,
            classes=dataset.classes,
            recipe=plan.config.to_json(),
            metrics={split: finite_scores(scores) for split, scores in metrics.items()},
            epoch=run.progress.step / plan.steps.steps_per_epoch,
            weights="as trained" if run.ema is None else "average",
            data=described,
            **started_from(plan.config),
        )
    )
