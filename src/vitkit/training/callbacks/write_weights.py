"""The weights of a run as a file that describes itself."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from vitkit.evaluation.metrics import Metrics
from vitkit.models.vit import ViT
from vitkit.training.initial_weights import started_from
from vitkit.training.setup import Plan
from vitkit.weights.formats.vitkit import save


def write_weights(
    path: Path,
    model: ViT,
    plan: Plan,
    metrics: Mapping[str, Metrics],
    *,
    step: int,
    average: bool,
) -> str:
    """Write the model with all that is needed to use it.

    Args:
        path: of the file.
        model: in one piece.
        plan: of the run.
        metrics: of each split.
        step: of the run, after which these are the weights.
        average: whether they are the average over the steps.

    Returns:
        The path.

    Raises:
        OutputError: the file cannot be written.
    """
    return str(save(
        path,
        model,
        preprocess=plan.preprocess,
        classes=plan.dataset.classes,
        recipe=plan.config.to_json(),
        metrics=metrics,
        epoch=step / plan.steps.steps_per_epoch,
        weights="average" if average else "as trained",
        data={
            "name": plan.dataset.name,
            "fingerprint": plan.dataset.fingerprint,
            "images": {name: len(part) for name, part in plan.dataset.splits.items()},
        },
        **started_from(plan.config),
    ))  # fmt: skip
