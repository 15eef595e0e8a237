"""Evaluation of the winner of a search on the test split, the only one there."""

from __future__ import annotations

from vitkit.devices import on_device
from vitkit.evaluation.evaluation_loop import evaluate_outputs, predict_batches
from vitkit.evaluation.metrics import Metrics
from vitkit.training.auto.results import CandidateResult
from vitkit.training.auto.search import CandidateSearch, top1_with_interval
from vitkit.training.run_plan import Plan
from vitkit.weights.formats.vitkit import DESCRIBED, save
from vitkit.weights.load import load


def evaluate_winner(
    search: CandidateSearch, winner: CandidateResult, plan: Plan, *, test: bool
) -> dict[str, Metrics]:
    """Evaluate the winner on the test split, and store the metrics with its weights.

    Args:
        search: the search, which is over; it gets the test metrics.
        winner: the winner, for the log.
        plan: has the data and the device.
        test: False leaves the test split unread.

    Returns:
        Split -> metrics, of validation and test.

    Raises:
        OutputError: the weights cannot be written.
    """
    # The only evaluation on test, after all choices are made.
    best = load(search.folder.best)
    metrics: dict[str, Metrics] = dict(best.metadata["metrics"])
    if not test or "test" not in plan.dataset.splits:
        return metrics
    batches = predict_batches(
        on_device(best.model, plan.device),
        plan.dataset.splits["test"],
        best.preprocess,
        device=plan.device,
        workers=plan.workers,
    )
    metrics["test"], _ = evaluate_outputs(batches, len(plan.dataset.classes), best.temperature)
    search.test = metrics["test"]
    search.log(
        f"test split, {search.test['images']:.0f} images, evaluated once, with {winner.name}: "
        f"top-1 {top1_with_interval(search.test)}"
    )
    # `save` writes the metadata that it describes itself.
    metadata = {key: value for key, value in best.metadata.items() if key not in DESCRIBED}
    metadata["metrics"] = metrics
    save(
        search.folder.best,
        best.model,
        preprocess=best.preprocess,
        classes=best.classes,
        **metadata,
    )
    return metrics
