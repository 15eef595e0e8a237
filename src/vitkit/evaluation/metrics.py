"""What is counted of a model's predictions, and the scores that follow from the counts.

Everything is a count or a sum of images. So several processes add theirs up, and a score is the
same for any number of them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Float, Float64, Int64
from torch import Tensor
from torch.nn import functional as F

from vitkit.distributed import World

Metrics = dict[str, float]
"""Scores by name."""
BINS = 15
"""Of confidence, for the calibration error; what Guo et al. report with."""
Z = 1.959963984540054
"""The 97.5 % quantile of the normal distribution, for intervals of 95 %."""
RESAMPLES = 2000


class PredictionCounts:
    """Adds up what a model says of images, one batch after another.

    Args:
        num_classes: K.
    """

    def __init__(self, num_classes: int) -> None:
        self.num_classes, self.k = num_classes, min(5, num_classes)
        self._sums: list[Tensor] = []
        self._seen: list[tuple[Tensor, Tensor, Tensor]] = []

    def add(self, logits: Float[Tensor, "B K"], labels: Int64[Tensor, "B"]) -> None:
        """Take in a batch. Nothing is read back from the device here."""
        labels = labels.to(logits.device)
        predicted, probabilities = logits.argmax(1), logits.softmax(1)
        hits = predicted == labels
        among = hits | (places(logits, labels) < self.k)
        loss = F.cross_entropy(logits, labels, reduction="sum")
        of_truth = probabilities.gather(1, labels[:, None])[:, 0]
        brier = (probabilities.square().sum(1) - 2 * of_truth + 1).sum()
        count = loss.new_full((), len(labels))
        self._sums.append(torch.stack([hits.sum(), among.sum(), loss, count, brier]))
        self._seen.append((labels, predicted, probabilities.gather(1, predicted[:, None])[:, 0]))

    @property
    def labels(self) -> Int64[np.ndarray, " N"]:
        """The true class of every image, in the order they came."""
        return self._column(0).astype(np.int64)

    @property
    def predicted(self) -> Int64[np.ndarray, " N"]:
        """The most probable class of each."""
        return self._column(1).astype(np.int64)

    @property
    def confidence(self) -> Float64[np.ndarray, " N"]:
        """Its probability, in [0, 1]."""
        return self._column(2).astype(np.float64)

    def _column(self, number: int) -> np.ndarray:
        seen = [row[number] for row in self._seen]
        return torch.cat(seen).cpu().numpy() if seen else np.zeros(0)

    def counts(self, world: World | None = None) -> Counts:
        """All counts, over the images of all processes; each of them must call."""
        classes = self.num_classes
        batches = torch.stack(self._sums).cpu() if self._sums else torch.zeros(1, 5)
        sums = batches.double().sum(0).numpy()
        labels, right = self.labels, self.labels == self.predicted
        # Guo et al., Sec. 2: bin m of M holds the confidences in ((m - 1) / M, m / M].
        confidence = np.nan_to_num(self.confidence)
        bins = np.clip(np.ceil(confidence * BINS).astype(np.int64) - 1, 0, BINS - 1)
        mine = [
            sums, np.bincount(labels, minlength=classes), np.bincount(labels[right], None, classes),
            *(np.bincount(bins, weights, BINS) for weights in (None, confidence, right)),
        ]  # fmt: skip
        ends = np.cumsum([len(part) for part in mine])[:-1]
        whole = (world or World()).summed(torch.from_numpy(np.concatenate(mine).astype(float)))
        sums, images, right, *bins = np.split(whole.numpy(), ends)
        return Counts(self.k, sums, images, right, np.stack(bins))

    def confusion(self, world: World | None = None) -> Int64[np.ndarray, "K K"]:
        """Images of class i taken for class j, at [i, j], of all processes; each must call."""
        pairs = self.labels * self.num_classes + self.predicted
        table = np.bincount(pairs, minlength=self.num_classes**2)
        return (world or World()).summed(torch.from_numpy(table)).numpy().reshape(
            self.num_classes, self.num_classes
        )  # fmt: skip


def places(logits: Float[Tensor, "B K"], labels: Int64[Tensor, "B"]) -> Int64[Tensor, "B"]:
    """Count the classes that come before the true one, in [0, K - 1]; 0 means it is first.

    Of equal logits the class with the lowest number comes first, as in `argmax`. (`topk` takes any
    of them, so that top-5 could be lower than top-1.)
    """
    truth = logits.gather(1, labels[:, None])
    numbers = torch.arange(logits.shape[1], device=logits.device)
    tied_before = (logits == truth) & (numbers < labels[:, None])
    return (~(logits <= truth) | tied_before).sum(1)


@dataclass(frozen=True)
class Counts:
    """What scores follow from.

    Attributes:
        k: of top-k.
        sums: images that are right; right among the first k; losses in nats; images; squared
            distances between probabilities and truth.
        images: of each class.
        right: those of each class that are right.
        bins: of each bin of confidence: images, sum of confidences, images that are right.
    """

    k: int
    sums: Float64[np.ndarray, "5"]
    images: Float64[np.ndarray, " K"]
    right: Float64[np.ndarray, " K"]
    bins: Float64[np.ndarray, "3 M"]

    def scores(self) -> Metrics:
        """Every score of the model.

        `top1` and `top{k}`, the share of images whose class is first, or among the first k;
        `loss`, the mean negative log-likelihood in nats; `balanced_accuracy`, the mean over the
        classes that have images of each one's share that is right; `brier`, the mean of
        sum_j (p_j - y_j)^2, in [0, 2] (Brier 1950); `ece`, the expected calibration error, in
        [0, 1] (Guo et al., arXiv 1706.04599, Eq. 3): sum_m |B_m| / n |acc(B_m) - conf(B_m)|;
        `images`, how many there were.
        """
        hits, among, loss, images, brier = self.sums.tolist()
        _, confidence, right = self.bins
        there = self.images > 0
        return {
            "top1": hits / images,
            f"top{self.k}": among / images,
            "loss": loss / images,
            "balanced_accuracy": float((self.right[there] / self.images[there]).mean()),
            "brier": brier / images,
            "ece": float(np.abs(right - confidence).sum() / images),
            "images": images,
        }

    def intervals(self) -> Metrics:
        """Bounds of 95 %: `top1_low`, `top1_high` and the same of the balanced accuracy."""
        top1 = wilson(int(self.sums[0]), int(self.sums[3]))
        balanced = balanced_interval(self.right, self.images)
        return {
            "top1_low": top1[0], "top1_high": top1[1],
            "balanced_accuracy_low": balanced[0], "balanced_accuracy_high": balanced[1],
        }  # fmt: skip


def headline(scores: Metrics) -> list[str]:
    """The three scores that fit in a line: top-1, top-k and the loss."""
    return [f"{name} {value:.4f}" for name, value in [*scores.items()][:3]]


def wilson(hits: int, images: int) -> tuple[float, float]:
    """The 95 % score interval of a share (Wilson 1927; Newcombe 1998, method 3)."""
    return _wilson(hits / images, float(images))


def _wilson(share: float, images: float) -> tuple[float, float]:
    square = Z * Z / images
    middle = (share + square / 2) / (1 + square)
    half = Z * math.sqrt((share * (1 - share) + square / 4) / images) / (1 + square)
    return max(0.0, middle - half), min(1.0, middle + half)


def balanced_interval(
    right: Float64[np.ndarray, " K"], images: Float64[np.ndarray, " K"]
) -> tuple[float, float]:
    """The 95 % interval of the balanced accuracy, for few images and scores near 1, too.

    The bootstrap draws classes that are all right only as all right, so where that is too narrow it
    is widened to Wilson's interval for as many images as a plain share of this variance would
    have, K^2 / sum_k 1 / n_k; for classes of one size those are all images.
    """
    there = images > 0
    share = float((right[there] / images[there]).mean())
    count = int(there.sum()) ** 2 / float((1 / images[there]).sum())
    low, high = zip(bootstrap_balanced(right, images), _wilson(share, count), strict=True)
    return min(low), max(high)


def bootstrap_balanced(
    right: Float64[np.ndarray, " K"], images: Float64[np.ndarray, " K"], seed: int = 0
) -> tuple[float, float]:
    """The 95 % percentile interval of the balanced accuracy, images drawn anew in each class.

    Of n images drawn from a class in which h of n are right, Binomial(n, h / n) are right: so the
    images themselves are not needed (Efron 1979; stratified by class).
    """
    there = images > 0
    n, share = images[there].astype(np.int64), right[there] / images[there]
    drawn = np.random.default_rng(seed).binomial(n, share, (RESAMPLES, len(n))) / n
    low, high = np.quantile(drawn.mean(1), [0.025, 0.975])
    return float(low), float(high)
