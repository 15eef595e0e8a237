"""The result of an evaluation: scores, and the predictions that they were counted from."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from jaxtyping import Bool, Float64, Int64

from vitkit.data.datasets.split import Split
from vitkit.evaluation.intervals import wilson_interval
from vitkit.evaluation.metrics import Metrics, PredictionCounts


@dataclass(frozen=True)
class ClassScore:
    """The accuracy on the images of one class.

    Attributes:
        name: of the class.
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

    Attributes:
        classes: the K names; numbers where the checkpoint and the data have none.
        without_images: those of them that the split has no images of. They can only be wrong
            answers: `balanced_accuracy` and `per_class` leave them out.
        split: the images, N of them.
        labels: their true classes (N,), numbered as the checkpoint numbers them.
        predicted: the most probable class of each (N,).
        probability: its probability (N,), with the stored temperature.
        confusion: (K, K), at [i, j] the images of class i that were predicted as class j.
    """

    def __init__(
        self, scores: Metrics, counts: PredictionCounts, split: Split, classes: tuple[str, ...]
    ) -> None:
        super().__init__(scores)
        self.split = split
        self.classes = classes or tuple(map(str, range(counts.num_classes)))
        self.labels: Int64[np.ndarray, " N"] = counts.labels
        self.predicted: Int64[np.ndarray, " N"] = counts.predicted
        self.probability: Float64[np.ndarray, " N"] = counts.confidence
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
                scores.append(ClassScore(name, count, hits, *wilson_interval(hits, count)))
        return scores

    @property
    def right(self) -> Bool[np.ndarray, " N"]:
        """True for each image (N,) whose class is the predicted one."""
        return self.labels == self.predicted

    def rows(self) -> Iterator[tuple[str, str, str, float]]:
        """Yield for each image its name, its class, the predicted class and its probability."""
        for index, probability in enumerate(self.probability.tolist()):
            label = self.classes[self.labels[index]]
            predicted = self.classes[self.predicted[index]]
            yield self.split.name(index), label, predicted, probability
