"""Validation after each epoch, with the same scores as `vitkit eval`."""

from __future__ import annotations

import math

from vitkit.errors import Interrupted, NonFiniteError
from vitkit.evaluation.evaluation_loop import count_predictions
from vitkit.evaluation.metrics import Metrics
from vitkit.evaluation.user_metrics import KeptOutputs, load_metrics
from vitkit.training.callbacks.save import Save
from vitkit.training.parallel.fsdp import unsharded_model
from vitkit.training.run import EpochResult, Run
from vitkit.training.run_evaluation import evaluate_split
from vitkit.training.state.state_folder import withdraw_state
from vitkit.training.trainer import Callback, Trainer


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
