"""Validation after each epoch, with the scores that `vitkit eval` gives of the same weights."""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import islice

from vitkit.errors import Interrupted, NonFiniteError
from vitkit.evaluation.metrics import Metrics
from vitkit.evaluation.predict import LabelledLogits, count_predictions, predict_batches
from vitkit.models.vit import ViT
from vitkit.training.build import EpochResult, Run
from vitkit.training.callbacks.save import Save
from vitkit.training.callbacks.stop import interrupted, last_good
from vitkit.training.parallel.fsdp import has_shards, unsharded_model
from vitkit.training.state.save import withdraw_state
from vitkit.training.trainer import Callback, Trainer

EVALUATED = 256
"""Images of one evaluation batch of a process, as in `vitkit eval`."""


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
        train_loss = progress.close_epoch()
        better = progress.count_best(trainer.epoch, validation)
        run.count_time()
        whole = unsharded_model(run.model_to_save, run.world).eval()
        run.epoch_result = EpochResult(
            trainer.epoch, trainer.learning_rate, train_loss, validation, better, whole
        )

    def _validate(self, epoch: int) -> Metrics:
        run = self.run
        outputs = evaluate_split(run, "val", run.model_to_save)
        try:
            counts = count_predictions(outputs, run.plan.spec.num_classes)
            validation = counts.counts(run.world).scores()
        except Interrupted:
            self.save.save_state()
            self.save.save_weights(run.folder.last)
            raise
        if not math.isfinite(validation["loss"]):
            run.world.decided(lambda: withdraw_state(run.folder.state, run.progress.step))
            raise NonFiniteError(
                f"the validation loss is {validation['loss']} after epoch {epoch}; "
                f"{last_good(run.folder)}; try a lower --lr"
            )
        return validation


def evaluate_split(run: Run, split: str, model: ViT) -> Iterator[LabelledLogits]:
    """Yield the outputs of a model for this process's images of a split, in float32.

    The run may train in bfloat16: its scores are those that the file of weights has elsewhere.

    Args:
        run: its data, device and processes.
        split: of the data.
        model: whole or sharded; it is set to eval mode.

    Raises:
        Interrupted: a signal came to any of the processes; nothing that is saved is lost.
    """
    plan, world = run.plan, run.world
    images, sharded = plan.dataset.splits[split], has_shards(model)
    # Starting loader processes takes longer than one batch.
    workers = plan.workers if len(images) > EVALUATED else 0
    batches = predict_batches(
        model.eval(),
        images,
        plan.preprocess,
        batch_size=EVALUATED,
        device=plan.device,
        workers=workers,
        world=world,
        collective=sharded,
        tell_failed=run.failed_images,
    )
    most = -(-len(images) // (EVALUATED * world.size))  # some processes have one batch less
    for _ in range(most):
        yield from islice(batches, 1)
        for callback in run.further:
            callback.after_evaluation_batch(split)
        if signum := world.most(run.stop.signum or 0):
            raise interrupted(run, signum)
    yield from batches  # nothing is left; what follows the last batch is done
    if sharded:
        model.reshard()  # type: ignore[operator]
