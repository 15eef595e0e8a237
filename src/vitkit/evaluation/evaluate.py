"""How good a model is on a split: the loop over its batches, every image counted once."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from ignite.engine import Engine
from jaxtyping import Float64, Int64
from torch import Tensor

from vitkit.data.loading.loader import Batch, EvaluationBatches, batches
from vitkit.data.sources.open import Split
from vitkit.distributed import World
from vitkit.errors import DataError
from vitkit.evaluation.metrics import Metrics, PredictionCounts, wilson
from vitkit.spec import Preprocess

Forward = Callable[[Tensor], Tensor]
Output = tuple[Tensor, Tensor]
"""Of a batch: logits (B, K) float32 on the device, class numbers (B,)."""


def outputs(
    forward: Forward,
    split: Split,
    preprocess: Preprocess,
    *,
    batch_size: int = 256,
    device: torch.device | None = None,
    workers: int = 0,
    world: World | None = None,
    collective: bool = False,
    tell_failed: Callable[[Sequence[str]], object] = len,
) -> Iterator[Output]:
    """What a callable from images (B, C, H, W) to logits (B, K) makes of a split, in its order.

    Several processes take every n-th image each, and nobody takes one twice to have as many as
    the others: whoever adds up must add up counts and sums, not means. `tell_failed` is told of
    images that could not be read and had others in their places, a line each.

    With `collective`, as a model that lies in parts on the processes needs it, each of them calls
    equally often: one that has no more images calls with zeros, and drops what comes of it.

    Raises:
        DataError: an empty split.
    """
    if len(split) == 0:
        raise DataError("the split is empty; there is nothing to evaluate")
    device, world = device or torch.device("cpu"), world or World()
    source = EvaluationBatches(
        split, preprocess, batch_size=batch_size, rank=world.rank, world_size=world.size
    )
    # What FSDP2 gathers in inference mode could not be trained with afterwards.
    no_gradients = torch.no_grad if collective else torch.inference_mode
    for batch in batches(source, range(len(source)), workers=workers):
        tell_failed(batch.failed)
        with no_gradients():
            logits = forward(batch.images(preprocess, device)).float()
        yield logits, batch.labels
    if collective:
        most = -(-len(split) // world.size)  # images of the first process
        zeros = torch.zeros(1, len(preprocess.mean), *preprocess.image_size, device=device)
        for _ in range(len(source), -(-most // batch_size)):
            with no_gradients():
                forward(zeros)


def evaluate(
    forward: Forward,
    split: Split,
    preprocess: Preprocess,
    *,
    num_classes: int,
    batch_size: int = 256,
    device: torch.device | None = None,
    workers: int = 0,
    world: World | None = None,
) -> Metrics:
    """The scores of a callable from images (B, C, H, W) to logits (B, K): `Counts.scores`.

    Raises:
        DataError: an empty split.
    """
    made = outputs(forward, split, preprocess, batch_size=batch_size, device=device,
                   workers=workers, world=world)  # fmt: skip
    return count_predictions(made, num_classes).counts(world).scores()


def count_predictions(made: Iterable[Output], num_classes: int) -> PredictionCounts:
    """What this process counts of its batches."""
    tally = PredictionCounts(num_classes)
    for logits, labels in made:
        tally.add(logits, labels)
    return tally


def examine(
    made: Iterable[Output], num_classes: int, temperature: float = 1.0, world: World | None = None
) -> tuple[Metrics, PredictionCounts]:
    """Scores with their intervals, and what was counted at the temperature.

    Where the temperature is not 1, the scores have it, and the `calibrated_loss`,
    `calibrated_brier` and `calibrated_ece` that it gives.
    """
    plain, calibrated = PredictionCounts(num_classes), PredictionCounts(num_classes)
    for logits, labels in made:
        plain.add(logits, labels)
        calibrated.add(logits / temperature, labels)
    counts, after = plain.counts(world), calibrated.counts(world).scores()
    scores = counts.scores() | counts.intervals()
    if temperature != 1.0:
        scores |= {f"calibrated_{name}": after[name] for name in ("loss", "brier", "ece")}
        scores["temperature"] = temperature
    return scores, calibrated


@dataclass(frozen=True)
class ClassScore:
    """How a model does on the images of one class.

    Attributes:
        name: of the class.
        images: how many there were; a class without any is not scored.
        right: how many of them are right.
        low: of the 95 % interval (Wilson) of their share.
        high: of the same.
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
    """The scores of a checkpoint on a split, a dict of floats, with what they were counted from.

    Attributes:
        classes: the K names; numbers where the checkpoint and the data have none.
        without_images: those of them that the split has no images of. They can only be wrong
            answers: `balanced_accuracy` and `per_class` leave them out.
        split: the images, N of them.
        labels: their true classes (N,), numbered as the checkpoint numbers them.
        predicted: the most probable class of each (N,).
        probability: its probability (N,), with the stored temperature.
        confusion: (K, K), at [i, j] the images of class i that were taken for class j.
    """

    def __init__(
        self, scores: Metrics, tally: PredictionCounts, split: Split, classes: tuple[str, ...]
    ) -> None:
        super().__init__(scores)
        self.split = split
        self.classes = classes or tuple(map(str, range(tally.num_classes)))
        self.labels: Int64[np.ndarray, " N"] = tally.labels
        self.predicted: Int64[np.ndarray, " N"] = tally.predicted
        self.probability: Float64[np.ndarray, " N"] = tally.confidence
        self._tally = tally

    @property
    def without_images(self) -> list[str]:
        """In the classes' order."""
        there = set(self.labels.tolist())
        return [name for number, name in enumerate(self.classes) if number not in there]

    @property
    def confusion(self) -> Int64[np.ndarray, "K K"]:
        """Made when asked for: with many classes it is large."""
        return self._tally.confusion()

    @property
    def per_class(self) -> list[ClassScore]:
        """One for each class that has images, in the classes' order."""
        images = np.bincount(self.labels, minlength=len(self.classes)).tolist()
        right = np.bincount(self.labels[self.right], minlength=len(self.classes)).tolist()
        return [
            ClassScore(name, n, hits, *wilson(hits, n))
            for name, n, hits in zip(self.classes, images, right, strict=True)
            if n
        ]

    @property
    def right(self) -> np.ndarray:
        """Whether each image's class is the predicted one (N,)."""
        return self.labels == self.predicted

    def rows(self) -> Iterator[tuple[str, str, str, float]]:
        """Of each image: its name, its class, the predicted class, the probability of that."""
        for place, (label, said, probability) in enumerate(
            zip(self.labels, self.predicted, self.probability.tolist(), strict=True)
        ):
            yield self.split.name(place), self.classes[label], self.classes[said], probability


def quiet_engine(process: Callable[[Engine, Batch], object]) -> Engine:
    """An Ignite engine that leaves error messages to whoever catches the error."""
    engine = Engine(process)
    engine.logger = logging.Logger("vitkit", level=logging.CRITICAL + 1)
    return engine
