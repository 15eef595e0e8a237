"""The result of an evaluation: scores, and the predictions that they were counted from."""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from jaxtyping import Bool, Float64, Int64

from vitkit.data.datasets.split import Split
from vitkit.errors import SettingError
from vitkit.evaluation import intervals, prediction_table
from vitkit.evaluation.metrics import Metrics, PredictionCounts
from vitkit.plots import MAX_CLASSES
from vitkit.plots.html import html_table

if TYPE_CHECKING:
    from vitkit.plots.figure import NotebookFigure

BOUNDS = ("top1_low", "top1_high", "balanced_accuracy_low", "balanced_accuracy_high")
"""Scores that are the interval of another one; a notebook shows them beside it."""
WORST_SHOWN = 5
"""Classes that a notebook lists."""


@dataclass(frozen=True)
class ClassScore:
    """The accuracy on the images of one class.

    Attributes:
        name: name of the class.
        images: how many there are; a class without any has no score.
        right: how many of them are right.
        low: lower bound of the 95 % interval (Wilson) of their share.
        high: upper bound of the same.
    """

    name: str
    images: int
    right: int
    low: float
    high: float

    @property
    def accuracy(self) -> float:
        """The share that is right: the recall of the class."""
        return self.right / self.images


class Evaluation(Metrics):
    """The scores of a checkpoint on a split, a dict by name, and its predictions.

    Args:
        scores: by name.
        counts: the predictions of all images, in the order of the split.
        split: the images.
        classes: the K names; empty means numbers.
        split_name: `train`, `val` or `test`.

    Attributes:
        classes: the K names; numbers where the checkpoint and the data have none.
        without_images: those of them that the split has no images of. They can only be wrong
            answers: `balanced_accuracy` and `per_class` leave them out.
        split: the images, N of them.
        split_name: the name of that split.
        labels: their true classes (N,), numbered as the checkpoint numbers them.
        predicted: the most probable class of each (N,).
        probability: its probability (N,), with the stored temperature.
        losses: the negative log-likelihood of the true class (N,), in nats, with the stored
            temperature; the true class's probability is exp(-loss).
        confusion: (K, K), at [i, j] the images of class i that were predicted as class j.
    """

    def __init__(
        self,
        scores: Metrics,
        counts: PredictionCounts,
        split: Split,
        classes: tuple[str, ...],
        split_name: str,
    ) -> None:
        super().__init__(scores)
        self.split, self.split_name = split, split_name
        self.classes = classes or tuple(map(str, range(counts.num_classes)))
        self.labels: Int64[np.ndarray, " N"] = counts.labels
        self.predicted: Int64[np.ndarray, " N"] = counts.predicted
        self.probability: Float64[np.ndarray, " N"] = counts.confidence
        self.losses: Float64[np.ndarray, " N"] = counts.losses
        # the confusion matrix is computed from these when it is read
        self._counts = counts

    @property
    def without_images(self) -> list[str]:
        """Classes without images, in the classes' order."""
        present = set(self.labels.tolist())
        return [name for number, name in enumerate(self.classes) if number not in present]

    @property
    def confusion(self) -> Int64[np.ndarray, "K K"]:
        """The confusion matrix, computed at each access: with many classes it is large."""
        return self._counts.confusion()

    @property
    def per_class(self) -> list[ClassScore]:
        """The score of each class that has images, in the classes' order."""
        # both (K,): images of each class, and those predicted correctly
        images = np.bincount(self.labels, minlength=len(self.classes)).tolist()
        right = np.bincount(self.labels[self.right], minlength=len(self.classes)).tolist()
        scores = []
        for name, count, hits in zip(self.classes, images, right, strict=True):
            if count:
                scores.append(
                    ClassScore(name, count, hits, *intervals.wilson_interval(hits, count))
                )
        return scores

    @property
    def right(self) -> Bool[np.ndarray, " N"]:
        """True for each image (N,) whose class is the predicted one."""
        return self.labels == self.predicted

    def predictions_csv(self) -> bytes:
        """Return the content of a CSV file in UTF-8, a row for each image in the split's order."""
        text = io.StringIO()
        writer = csv.writer(text, lineterminator="\n")
        writer.writerow(prediction_table.PREDICTIONS_HEADER)
        losses = self.losses.tolist()
        ranks = self.loss_ranks.tolist()
        # every image's row has its place by loss, so that a spreadsheet can sort by it
        for row, loss, rank in zip(self.rows(), losses, ranks, strict=True):
            *names, probability = row
            numbers = [f"{probability:.6f}", f"{math.exp(-loss):.6g}", f"{loss:.6g}"]
            writer.writerow([*names, *numbers, rank])
        return text.getvalue().encode()

    def rows(self) -> Iterator[tuple[str, str, str, float]]:
        """Return for each image its name, its class, the predicted class and its probability."""
        return map(self._row, range(len(self.labels)))

    def _row(self, index: int) -> tuple[str, str, str, float]:
        label, predicted = self.classes[self.labels[index]], self.classes[self.predicted[index]]
        return self.split.name(index), label, predicted, float(self.probability[index])

    @property
    def loss_ranks(self) -> Int64[np.ndarray, " N"]:
        """The place of each image (N,) when sorted by loss; 1 has the highest loss."""
        ranks = np.empty(len(self.losses), np.int64)
        ranks[self._by_loss()] = np.arange(1, len(ranks) + 1)
        return ranks

    def _by_loss(self) -> Int64[np.ndarray, " N"]:
        """Return the numbers of the images by loss, highest first; of equal ones the first."""
        # NaN losses come first
        losses = np.where(np.isnan(self.losses), np.inf, self.losses)
        return np.argsort(-losses, kind="stable")

    def top_losses(self, count: int = 12) -> prediction_table.TopLosses:
        """Return the images with the highest losses, highest first.

        They are often wrong labels or unusual images. `.plot()` of the result draws them.

        Args:
            count: how many; all images if there are fewer.

        Raises:
            SettingError: a count below 1.
        """
        if count < 1:
            raise SettingError.about("count", count, "must be 1 or more")
        highest = self._by_loss()[:count]
        found = []
        for index, loss in zip(highest.tolist(), self.losses[highest].tolist(), strict=True):
            found.append(prediction_table.ImageLoss(*self._row(index), float(np.exp(-loss)), loss))
        # the pixels are read when they are drawn
        return prediction_table.TopLosses(found, self.split.subset(highest))

    def plot(self, title: str = "") -> NotebookFigure:
        """Draw the confusion matrix as a matplotlib Figure; `.savefig("matrix.svg")` writes it.

        Args:
            title: a name of the data, for the line above the matrix.

        Raises:
            SettingError: more than 2,000 classes.
        """
        # imported here: matplotlib takes half a second
        from vitkit.plots.confusion import draw_confusion

        if len(self.classes) > MAX_CLASSES:
            raise SettingError(
                f"a confusion matrix can be drawn of up to {MAX_CLASSES:,} classes, and there are "
                f"{len(self.classes):,}; .confusion has the numbers"
            )
        return draw_confusion(self.confusion, self.classes, title)

    def _repr_html_(self) -> str:
        """Return the scores and the worst classes as tables, for a notebook."""
        scores, classes = [], []
        for name, value in self.items():
            if name in BOUNDS:
                continue
            interval = ""
            if f"{name}_low" in BOUNDS:
                interval = f"{self[f'{name}_low']:.4f} to {self[f'{name}_high']:.4f}"
            shown = f"{value:,}" if isinstance(value, int) else f"{value:.4f}"
            scores.append([name, shown, interval])
        for one in sorted(self.per_class, key=lambda score: score.accuracy)[:WORST_SHOWN]:
            classes.append([one.name, f"{one.accuracy:.4f}", f"{one.right:,} of {one.images:,}"])
        table = html_table(["score", "value", "95 % interval"], scores)
        return table + html_table(["worst classes", "top1", "right"], classes)
