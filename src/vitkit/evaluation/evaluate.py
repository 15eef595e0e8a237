"""Evaluate a model on data that are opened, cleaned and split as for its training."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from vitkit.data.datasets.split import Split
from vitkit.data.sources.open import DataSource, kept_data
from vitkit.engines.choosing.checkpoint_engine import engine_of
from vitkit.engines.choosing.options import EngineOptions
from vitkit.errors import SettingError
from vitkit.evaluation.evaluation_loop import LabelledLogits, evaluate_outputs, predict_batches
from vitkit.evaluation.open_data import choose_split, open_as_in_training, with_labels_of
from vitkit.evaluation.result import Evaluation
from vitkit.evaluation.user_metrics import KeptOutputs, Metric, load_metrics
from vitkit.weights.checkpoint import Checkpoint, LabelledModel, names_for_data
from vitkit.weights.load import as_checkpoint

TORCH = EngineOptions(engine="torch")
"""The model's own forward pass in float32."""
Predict = Callable[[Split], Iterator[LabelledLogits]]
"""Labelled images -> their logits, batch by batch, as `predict_batches` yields them."""


@dataclass(frozen=True)
class EvaluationChoice:
    """The settings of `vitkit.evaluate` that do not concern the engine.

    Raises:
        SettingError: a number of images or of processes that cannot be.
    """

    split: str | None = None
    data_root: str | Path | None = None
    cache: str | Path | None = None
    batch_size: int = 256
    workers: int = 0
    metrics: Sequence[str | Metric] = ()
    relabel: str | Path | None = None

    def __post_init__(self) -> None:
        if self.batch_size < 1:
            raise SettingError.about("batch_size", self.batch_size, "must be 1 or more")
        if self.workers < 0:
            raise SettingError.about("workers", self.workers, "must be 0 or more")


def evaluate_checkpoint(
    checkpoint: Checkpoint | str | Path,
    data: DataSource,
    settings: EvaluationChoice,
    device: str = "auto",
    options: EngineOptions = TORCH,
) -> Evaluation:
    """Evaluate a checkpoint; arguments, result and errors as for `vitkit.evaluate`."""
    checkpoint = as_checkpoint(checkpoint)

    def predict(images: Split) -> Iterator[LabelledLogits]:
        engine = engine_of(
            checkpoint, replace(options, images=options.images or len(images)), device=device
        )
        return predict_batches(
            engine,
            images,
            checkpoint.preprocess,
            batch_size=settings.batch_size,
            device=engine.device,
            workers=settings.workers,
        )

    return evaluate_predictions(checkpoint, data, settings, predict)


def evaluate_predictions(
    model: LabelledModel, data: DataSource, settings: EvaluationChoice, predict: Predict
) -> Evaluation:
    """Evaluate the predictions of any model on a split of a dataset.

    Args:
        model: the facts about it.
        data: as for `vitkit.evaluate`.
        settings: split, folders, metrics, corrected labels.
        predict: runs the model.

    Returns:
        The scores; errors as for `vitkit.evaluate`.
    """
    own = load_metrics(settings.metrics)  # before the data are opened, which may take minutes
    with kept_data(data) as address:
        dataset = open_as_in_training(
            model, address or "", settings.data_root, settings.cache, settings.relabel
        )
    split = choose_split(dataset, settings.split)
    images = with_labels_of(model, dataset, split)
    outputs = KeptOutputs(predict(images), keep=bool(own))
    scores, counts = evaluate_outputs(outputs, model.num_classes, model.temperature)
    names = names_for_data(model, dataset.classes) or dataset.classes  # else the data's own
    return Evaluation(scores | outputs.scores(own), counts, images, names, split)
