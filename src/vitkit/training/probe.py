"""Runs that train no backbone: a linear head on features, or a look at the nearest neighbours."""

from __future__ import annotations

from jaxtyping import Float, Int64
from torch import Tensor

from vitkit.evaluation.evaluate import count_predictions
from vitkit.evaluation.features import NEIGHBOURS, features, fit_linear, knn
from vitkit.evaluation.metrics import Metrics
from vitkit.training.build import Run
from vitkit.training.config.train_config import TrainConfig

NO_VOTES = 1e-9
"""The probability of a class that no neighbour is of."""
OF_STEPS = (
    "epochs", "lr", "min_lr", "sched", "warmup_epochs", "batch_size", "grad_accum_steps", "opt",
    "momentum", "beta1", "beta2", "weight_decay", "clip_grad", "loss", "bce_threshold",
    "label_smoothing", "flip", "shift", "crop_scale",
)  # fmt: skip
"""Settings that mean nothing to a probe, which takes no steps and changes no image."""
OF_VOTES = ("top1", "balanced_accuracy", "images")
"""Scores that votes have; they are no calibrated probabilities."""


def without_effect(config: TrainConfig) -> str | None:
    """A line that names the settings somebody made of steps that a probe does not take."""
    given, usual = config.to_json(), TrainConfig(data=config.data).to_json()
    idle = [name for name in OF_STEPS if given[name] != usual[name]]
    idle += ["amp"] * (config.amp not in ("auto", "off"))
    return f"a probe takes no steps: {', '.join(idle)} without effect" if idle else None


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
    return features(
        run.model.eval(),
        plan.dataset,
        split,
        plan.preprocess,
        device=plan.device,
        workers=plan.workers,
        say=run.log.say,
    )


def _scores(run: Run, logits: Tensor, labels: Tensor) -> Metrics:
    return count_predictions([(logits, labels)], run.plan.spec.num_classes).counts().scores()


def among_voted(votes: Float[Tensor, "N K"], labels: Int64[Tensor, "N"]) -> Metrics:
    """Top-k, k = min(5, K), of classes that some neighbour voted for: most have no vote at all."""
    k = min(5, votes.shape[1])
    said, first = votes.topk(k)
    hits = (first == labels[:, None]) & (said > 0)
    return {f"top{k}": float(hits.any(1).double().mean())}
