"""Runs that train no backbone: a linear head on features, or a look at the nearest neighbours."""

from __future__ import annotations

from jaxtyping import Float, Int64
from torch import Tensor

from vitkit.evaluation.evaluate import count_predictions
from vitkit.evaluation.features import NEIGHBOURS, features, fit_linear, knn
from vitkit.evaluation.metrics import Metrics
from vitkit.training.config.train_config import TrainConfig
from vitkit.training.trainer import Trainer

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


class LinearProbe(Trainer):
    """Fits the head on features of train that are computed once; the rest stays as it was.

    What it leaves is a checkpoint like any other.
    """

    def train(self) -> None:
        """Fit, validate, and write both files of weights. Raises `OutputError`, `DataError`."""
        (train, labels), (held, held_labels) = self._features("train"), self._features("val")
        fitted = fit_linear(train, labels, held, held_labels, self.plan.spec.num_classes,
                            device=self.plan.device)  # fmt: skip
        self.log.say(
            f"linear head: L2 strength {fitted.strength:g}, chosen on validation: top1 "
            f"{fitted.top1:.4f}  loss {fitted.loss:.4f}"
        )
        for name, parameter in self.model.named_parameters():
            if name in ("head.weight", "head_dist.weight"):
                parameter.data.copy_(fitted.weight)
            elif name in ("head.bias", "head_dist.bias"):
                parameter.data.copy_(fitted.bias)
        scores = {"val": self._scores(fitted(held), held_labels)}
        self.save_weights(self.run_folder.best, scores)
        self.save_weights(self.run_folder.last, scores)
        self.stopped = "a linear probe"

    def _features(self, split: str) -> tuple[Tensor, Tensor]:
        plan, model = self.plan, self.model.eval()
        return features(model, plan.dataset, split, plan.preprocess, device=plan.device,
                        workers=plan.workers, say=self.log.say)  # fmt: skip

    def _scores(self, logits: Tensor, labels: Tensor) -> Metrics:
        made = [(logits, labels)]
        return count_predictions(made, self.plan.spec.num_classes).counts().scores()


class NeighbourProbe(LinearProbe):
    """Says how good the nearest neighbours are, in metrics.jsonl too, and leaves no weights.

    Attributes:
        scores: of each split but train.
    """

    scores: dict[str, Metrics]

    def train(self) -> None:
        """Look at every split once. Raises `DataError`."""
        train, labels = self._features("train")
        self.scores = {}
        unseen = {"train"} if self.plan.config.test else {"train", "test"}
        for split in [name for name in self.plan.dataset.splits if name not in unseen]:
            queries, truth = self._features(split)
            votes = knn(train, labels, queries, self.plan.spec.num_classes)
            counted = self._scores(votes.clamp_min(NO_VOTES).log(), truth)
            kept = {name: v for name, v in counted.items() if name.startswith(OF_VOTES)}
            kept |= among_voted(votes, truth)
            self.scores[split] = kept
            said = "  ".join(f"{name} {value:.4f}" for name, value in [*kept.items()][:2])
            self.log.say(f"{NEIGHBOURS} nearest neighbours, {split}: {said}")
            self.log.scored(split, self.progress.step, kept)
        self.stopped = "a look at the nearest neighbours"


def among_voted(votes: Float[Tensor, "N K"], labels: Int64[Tensor, "N"]) -> Metrics:
    """Top-k, k = min(5, K), of classes that some neighbour voted for: most have no vote at all."""
    k = min(5, votes.shape[1])
    said, first = votes.topk(k)
    hits = (first == labels[:, None]) & (said > 0)
    return {f"top{k}": float(hits.any(1).double().mean())}


PROBES: dict[str, type[Trainer]] = {"linear": LinearProbe, "knn": NeighbourProbe}
