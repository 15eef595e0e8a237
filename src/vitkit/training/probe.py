"""Linear and k-NN probes on the features of a frozen model."""

from __future__ import annotations

from jaxtyping import Float, Int64
from torch import Tensor

from vitkit.evaluation.features import extract_features
from vitkit.evaluation.knn import NEIGHBOURS, knn
from vitkit.evaluation.linear_classifier import fit_linear
from vitkit.evaluation.metrics import Metrics
from vitkit.evaluation.predict import count_predictions
from vitkit.training.build import Run

NO_VOTES = 1e-9
"""The probability of a class that no neighbour is of."""
OF_VOTES = ("top1", "balanced_accuracy", "images")
"""Scores that votes have; they are no calibrated probabilities."""


def linear_probe(run: Run) -> dict[str, Metrics]:
    """Fit the head on features of train that are computed once; returns its validation scores.

    Raises:
        DataError: images that cannot be read.
    """
    plan = run.plan
    (train, labels), (held, held_labels) = _features(run, "train"), _features(run, "val")
    fitted = fit_linear(train, labels, held, held_labels, plan.spec.num_classes, device=plan.device)
    run.log.say(
        f"linear head: L2 strength {fitted.strength:g}, chosen on validation: top1 "
        f"{fitted.top1:.4f}  loss {fitted.loss:.4f}"
    )
    for name, parameter in run.model.named_parameters():
        if name in ("head.weight", "head_dist.weight"):
            parameter.data.copy_(fitted.weight)
        elif name in ("head.bias", "head_dist.bias"):
            parameter.data.copy_(fitted.bias)
    return {"val": _scores(run, fitted(held), held_labels)}


def nearest_neighbours(run: Run) -> dict[str, Metrics]:
    """Score the votes of the nearest neighbours on each split but train, in metrics.jsonl, too.

    Raises:
        DataError: images that cannot be read.
    """
    train, labels = _features(run, "train")
    unseen = {"train"} if run.plan.config.test else {"train", "test"}
    metrics = {}
    for split in run.plan.dataset.splits:
        if split in unseen:
            continue
        queries, truth = _features(run, split)
        votes = knn(train, labels, queries, run.plan.spec.num_classes)
        scores = _scores(run, votes.clamp_min(NO_VOTES).log(), truth)
        kept = {name: value for name, value in scores.items() if name.startswith(OF_VOTES)}
        kept |= among_voted(votes, truth)
        metrics[split] = kept
        shown = "  ".join(f"{name} {value:.4f}" for name, value in [*kept.items()][:2])
        run.log.say(f"{NEIGHBOURS} nearest neighbours, {split}: {shown}")
        run.log.scored(split, run.progress.step, kept)
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
        log=run.log.say,
    )


def _scores(run: Run, logits: Tensor, labels: Tensor) -> Metrics:
    return count_predictions([(logits, labels)], run.plan.spec.num_classes).counts().scores()


def among_voted(votes: Float[Tensor, "N K"], labels: Int64[Tensor, "N"]) -> Metrics:
    """Return top-k, k = min(5, K), among classes with a vote; most classes have none."""
    k = min(5, votes.shape[1])
    said, first = votes.topk(k)
    hits = (first == labels[:, None]) & (said > 0)
    return {f"top{k}": float(hits.any(1).double().mean())}
