"""The best weights of a run, read back from their file, with the scores that it has."""

from __future__ import annotations

from pathlib import Path

from vitkit.errors import CheckpointError
from vitkit.evaluation.metrics import Metrics
from vitkit.messages import plural
from vitkit.weights.checkpoint import Checkpoint
from vitkit.weights.load import load


def load_best(path: Path, num_classes: int) -> Checkpoint:
    """Return the best weights of a run.

    Args:
        path: path of their file.
        num_classes: K of the run.

    Raises:
        CheckpointError: a damaged file, or one that was replaced by another model's.
    """
    best = load(path)
    found = best.model.spec.num_classes
    if found != num_classes:
        raise CheckpointError(
            f"{path}: a model of {plural(found, 'class')}, and this run has {num_classes}; "
            "delete the file and resume, or put the weights of this run back"
        )
    return best


def stored_scores(best: Checkpoint) -> dict[str, Metrics]:
    """Return the scores stored in a file of weights, by split."""
    stored = best.metadata.get("metrics")
    if not isinstance(stored, dict):  # the user has replaced the file
        return {}
    return {split: scores for split, scores in stored.items() if isinstance(scores, dict)}
