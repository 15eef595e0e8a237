"""Classification metrics from counts and sums over images, with 95 % confidence intervals.

Every process counts its own images; the counts are summed over processes, so a metric is the same
for any number of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Bool, Float, Float64, Int64
from torch import Tensor
from torch.nn import functional as F

from vitkit import distributed, errors
from vitkit.evaluation.intervals import balanced_interval, wilson_interval
from vitkit.messages import plural

Metrics = dict[str, float]
"""Scores by name; the number of images is an integer."""
CONFIDENCE_BINS = 15
"""Bins of the calibration error; as many as Guo et al. report with."""


class PredictionCounts:
    """The counts of a model's predictions, added up batch by batch.

    Args:
        num_classes: K.
    """

    def __init__(self, num_classes: int) -> None:
        self.num_classes = num_classes
        self.k = min(5, num_classes)
        self._sums: list[Tensor] = []
        self._predictions: list[tuple[Tensor, Tensor, Tensor, Tensor]] = []

    def add(self, logits: Float[Tensor, "B K"], labels: Int64[Tensor, "B"]) -> None:
        """Count a batch. Nothing is read back from the device here.

        Args:
            logits: (B, K) float32.
            labels: class numbers (B,), on any device.
        """
        labels = labels.to(logits.device)
        predicted = logits.argmax(1)
        probabilities = logits.softmax(1)
        # tensors stay on the device: reading one back would wait for all of its work
        # `argmax` of all-NaN logits is class 0, which might be right by chance
        finite = finite_rows(logits)
        hits = finite & (predicted == labels)
        top_k_hits = hits | (finite & (_true_class_ranks(logits, labels) < self.k))
        loss = F.cross_entropy(logits, labels, reduction="sum")
        true_probability = probabilities.gather(1, labels[:, None])[:, 0]
        # |p - y|^2 = sum_j p_j^2 - 2 p_label + 1
        brier = (probabilities.square().sum(1) - 2 * true_probability + 1).sum()
        count = loss.new_full((), len(labels))
        confidence = probabilities.gather(1, predicted[:, None])[:, 0]
        sums = [hits.sum(), top_k_hits.sum(), loss, count, brier, (~finite).sum()]
        self._sums.append(torch.stack(sums))
        # not from the probability, which is 0 where the loss is large
        losses = F.cross_entropy(logits, labels, reduction="none")
        self._predictions.append((labels, predicted, confidence, losses))

    @property
    def labels(self) -> Int64[np.ndarray, " N"]:
        """The true class of every image, in the order of the batches."""
        return self._column(0).astype(np.int64)

    @property
    def predicted(self) -> Int64[np.ndarray, " N"]:
        """The most probable class of every image."""
        return self._column(1).astype(np.int64)

    @property
    def confidence(self) -> Float64[np.ndarray, " N"]:
        """The probability of the most probable class, in [0, 1]."""
        return self._column(2).astype(np.float64)

    @property
    def losses(self) -> Float64[np.ndarray, " N"]:
        """The negative log-likelihood of the true class, in nats."""
        return self._column(3).astype(np.float64)

    def _column(self, number: int) -> np.ndarray:
        if not self._predictions:
            return np.zeros(0)
        return torch.cat([batch[number] for batch in self._predictions]).cpu().numpy()

    def gathered(self, world: distributed.ProcessGroup) -> PredictionCounts:
        """Return the predictions of all processes in the order of the split; each must call.

        Args:
            world: process r of n has the images r, r + n, r + 2n ...

        Returns:
            The predictions alone: `counts` and the scores need the sums of every process.
        """
        if world.size == 1:
            return self
        # class numbers and float32 are exact in float64
        own = [torch.stack(batch, 1).double() for batch in self._predictions]
        table = gather_rows(own, torch.float64, world)
        labels, predicted, confidence, losses = table.unbind(1)
        whole = PredictionCounts(self.num_classes)
        whole._predictions.append((labels.long(), predicted.long(), confidence, losses))
        return whole

    def counts(self, world: distributed.ProcessGroup | None = None) -> Counts:
        """Sum the counts over the images of all processes; each of them must call."""
        classes = self.num_classes
        batches = torch.stack(self._sums).cpu() if self._sums else torch.zeros(1, 6)
        labels = self.labels
        right = labels == self.predicted
        confidence = np.nan_to_num(self.confidence)  # NaN cannot be put into a bin
        # Guo et al., Sec. 2: bin m of M holds the confidences in ((m - 1) / M, m / M].
        bins = np.ceil(confidence * CONFIDENCE_BINS).astype(np.int64) - 1
        bins = np.clip(bins, 0, CONFIDENCE_BINS - 1)
        own = [
            batches.double().sum(0).numpy(),
            np.bincount(labels, minlength=classes),
            np.bincount(labels[right], minlength=classes),
            np.bincount(bins, minlength=CONFIDENCE_BINS),
            np.bincount(bins, confidence, CONFIDENCE_BINS),
            np.bincount(bins, right, CONFIDENCE_BINS),
        ]
        # one row for one message between the processes, then taken apart again
        ends = np.cumsum([len(part) for part in own])[:-1]
        row = torch.from_numpy(np.concatenate(own).astype(float))
        total = (world or distributed.ProcessGroup()).all_reduce_sum(row).numpy()
        sums, images, right_images, *bin_sums = np.split(total, ends)
        return Counts(self.k, sums, images, right_images, np.stack(bin_sums))

    def confusion(self, world: distributed.ProcessGroup | None = None) -> Int64[np.ndarray, "K K"]:
        """Return the images of class i predicted as class j, at [i, j], of all processes.

        Each process must call.
        """
        # one number for each pair of classes, so that one `bincount` fills the table
        pairs = self.labels * self.num_classes + self.predicted
        table = torch.from_numpy(np.bincount(pairs, minlength=self.num_classes**2))
        total = (world or distributed.ProcessGroup()).all_reduce_sum(table).numpy()
        return total.reshape(self.num_classes, self.num_classes)


def _true_class_ranks(
    logits: Float[Tensor, "B K"], labels: Int64[Tensor, "B"]
) -> Int64[Tensor, "B"]:
    """Count the classes that come before the true one, in [0, K - 1]; 0 means it is first."""
    true_logits = logits.gather(1, labels[:, None])
    numbers = torch.arange(logits.shape[1], device=logits.device)
    tied_before = (logits == true_logits) & (numbers < labels[:, None])
    # "not (<=)" instead of ">": a NaN ranks before the true class, so it is never a hit
    return (~(logits <= true_logits) | tied_before).sum(1)


@dataclass(frozen=True)
class Counts:
    """The counts from which all scores are computed.

    Attributes:
        k: the k of top-k.
        sums: correctly classified images; images with the true class among the first k; sum of
            losses in nats; images; sum of squared distances between probabilities and truth; images
            whose logits are not finite.
        images: images of each class.
        right: correctly classified images of each class.
        bins: of each bin of confidence: images, sum of confidences, correctly classified images.
    """

    k: int
    sums: Float64[np.ndarray, "6"]
    images: Float64[np.ndarray, " K"]
    right: Float64[np.ndarray, " K"]
    bins: Float64[np.ndarray, "3 M"]

    @property
    def not_finite(self) -> int:
        """The number of images whose logits are NaN or infinite."""
        return int(self.sums[5])

    def scores(self) -> Metrics:
        """Return every score of the model.

        `top1` and, of more than five classes, `top5`, the share of images whose class is first, or
        among the first five;
        `loss`, the mean negative log-likelihood in nats; `balanced_accuracy`, the mean over the
        classes that have images of each one's share that is right; `brier`, the mean of
        sum_j (p_j - y_j)^2, in [0, 2] (Brier 1950); `ece`, the expected calibration error, in
        [0, 1] (Guo et al., arXiv 1706.04599, Eq. 3): sum_m |B_m| / n |acc(B_m) - conf(B_m)|;
        `images`, their number.
        """
        hits, top_k_hits, loss, images, brier, _ = self.sums.tolist()
        _, confidence, right = self.bins
        present = self.images > 0
        scores: Metrics = {"top1": hits / images}
        # top-K of K classes is always right
        if self.k < len(self.images):
            scores[f"top{self.k}"] = top_k_hits / images
        return scores | {
            "loss": loss / images,
            "balanced_accuracy": float((self.right[present] / self.images[present]).mean()),
            "brier": brier / images,
            "ece": float(np.abs(right - confidence).sum() / images),
            "images": int(images),
        }

    def intervals(self) -> Metrics:
        """Return bounds of 95 %: `top1_low`, `top1_high` and the same of the balanced accuracy."""
        low, high = wilson_interval(int(self.sums[0]), int(self.sums[3]))
        balanced_low, balanced_high = balanced_interval(self.right, self.images)
        return {
            "top1_low": low,
            "top1_high": high,
            "balanced_accuracy_low": balanced_low,
            "balanced_accuracy_high": balanced_high,
        }


def headline(scores: Metrics) -> list[str]:
    """Format the main scores in a line: top-1, top-5 if there is one, and the loss.

    >>> headline({"top1": 0.5, "loss": 1.25, "ece": 0.1})
    ['top1 0.5000', 'loss 1.2500']
    """
    shown = [name for name in ("top1", "top5", "loss") if name in scores]
    return [f"{name} {scores[name]:.4f}" for name in shown]


# Outputs of a model that are not finite (NaN, infinity): counted, never as a predicted class.


def finite_rows(outputs: Float[Tensor, "B K"]) -> Bool[Tensor, " B"]:
    """Return True for each image whose logits give probabilities.

    NaN and +infinity do not; -infinity, a class that is ruled out, does unless all K are.
    """
    return outputs.logsumexp(1).isfinite()


def refuse_not_finite(count: int, images: int, first: str = "") -> None:
    """Raise `CheckpointError` where a model gives numbers that are not finite.

    Args:
        count: count of images with such outputs; 0 is fine.
        images: their number in all.
        first: the name of the first of them, where it is known.
    """
    if count:
        named = f" (first: {first})" if first else ""
        raise errors.CheckpointError(
            f"the model gives NaN or infinity for {count:,} of {plural(images, 'image')}{named}, "
            "so they have no class; its weights or numbers overflow: use an earlier checkpoint, or "
            "float32 where it runs in half precision"
        )


# Rows of an evaluation, such as logits, gathered from all processes in the split's order.


def gather_rows(
    own: Sequence[Tensor], dtype: torch.dtype, world: distributed.ProcessGroup
) -> Tensor:
    """Return the rows of all processes (N, C) on the CPU, in the order of the split.

    Args:
        own: this process's rows (B, C), batch by batch; empty where it has no images.
        dtype: dtype of all rows.
        world: the processes; each must call. Process r of n has the images r, r + n, r + 2n ...
    """
    # a process without images does not know the number of columns
    shapes = torch.zeros(world.size, 2, dtype=torch.int64)
    if own:
        rows = torch.cat([*own]).cpu()
        shapes[world.rank] = torch.tensor(rows.shape)
    images, columns = world.all_reduce_sum(shapes).unbind(1)
    table = torch.zeros(int(images.sum()), int(columns.max()), dtype=dtype)
    if own:
        table[world.rank :: world.size] = rows
    # adding zeros changes no bit
    return world.all_reduce_sum(table)
