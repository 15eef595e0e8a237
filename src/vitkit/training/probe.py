"""Linear and k-NN probes on the features of a frozen model."""

from __future__ import annotations

from jaxtyping import Float, Int64
from torch import Tensor

from vitkit.evaluation.evaluation_loop import count_predictions
from vitkit.evaluation.features.extract import extract_features
from vitkit.evaluation.features.knn import NEIGHBOURS, knn
from vitkit.evaluation.features.linear_classifier import fit_linear
from vitkit.evaluation.metrics import Metrics
from vitkit.training.run import Run

NO_VOTES = 1e-9
"""The probability of a class without neighbours."""
OF_VOTES = ("top1", "balanced_accuracy", "images")
"""Scores of votes, which are not calibrated probabilities."""


def fit_linear_probe(run: Run) -> dict[str, Metrics]:
    """Fit the head on features of train that are computed once; returns its validation scores.

    Raises:
        DataError: images that cannot be read.
    """
    plan = run.plan
    train, labels = _features(run, "train")
    val, val_labels = _features(run, "val")

    def keep(logits: Tensor) -> None:
        assert run.held_out is not None, "a probe needs a validation split"
        # `watched` records the outputs as they are read
        list(run.held_out.watched([(logits, val_labels)], run.world))
        run.held_out.add()

    fitted = fit_linear(
        train, labels, val, val_labels, plan.spec.num_classes, device=plan.device, watch=keep
    )
    run.log.info(
        f"linear head: L2 strength {fitted.strength:g}, chosen on validation: top1 "
        f"{fitted.top1:.4f}  loss {fitted.loss:.4f}"
    )
    # a distilled model averages the logits of two heads: both become the fitted one
    for name, parameter in run.model.named_parameters():
        if name in ("head.weight", "head_dist.weight"):
            parameter.data.copy_(fitted.weight)
        elif name in ("head.bias", "head_dist.bias"):
            parameter.data.copy_(fitted.bias)
    return {"val": _scores(run, fitted(val), val_labels)}


def evaluate_neighbours(run: Run) -> dict[str, Metrics]:
    """Score the votes of the nearest neighbours on each split except train; write metrics.jsonl.

    Raises:
        DataError: images that cannot be read.
    """
    train, labels = _features(run, "train")
    # the test split is read only where the run may read it
    unseen = {"train"} if run.plan.config.test else {"train", "test"}
    metrics = {}
    for split in run.plan.dataset.splits:
        if split in unseen:
            continue
        queries, truth = _features(run, split)
        votes = knn(train, labels, queries, run.plan.spec.num_classes)
        # Scores are counted from logits; a class without a vote has the lowest.
        scores = _scores(run, votes.clamp_min(NO_VOTES).log(), truth)
        # votes are not probabilities: they have neither loss nor calibration error
        scores = {name: value for name, value in scores.items() if name.startswith(OF_VOTES)}
        scores |= among_voted(votes, truth)
        metrics[split] = scores
        shown = "  ".join(f"{name} {value:.4f}" for name, value in [*scores.items()][:2])
        run.log.info(f"{NEIGHBOURS} nearest neighbours, {split}: {shown}")
        run.log.scored(split, run.progress.step, scores)
    return metrics


def _features(run: Run, split: str) -> tuple[Tensor, Tensor]:
    plan = run.plan
    return extract_features(
        run.model.eval(),
        plan.dataset,
        split,
        plan.preprocess,
        device=plan.device,
        workers=plan.workers,
        log=run.log.info,
    )


def _scores(run: Run, logits: Tensor, labels: Tensor) -> Metrics:
    return count_predictions([(logits, labels)], run.plan.spec.num_classes).counts().scores()


def among_voted(votes: Float[Tensor, "N K"], labels: Int64[Tensor, "N"]) -> Metrics:
    """Return top-k, k = min(5, K), among the classes with a vote, as most have none."""
    k = min(5, votes.shape[1])
    shares, classes = votes.topk(k)  # (N, k) each
    hits = (classes == labels[:, None]) & (shares > 0)
    return {f"top{k}": float(hits.any(1).double().mean())}
