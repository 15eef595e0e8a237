"""Sections of the report on mistakes, and the maps that explain them."""

from __future__ import annotations

import time
from collections import defaultdict
from dataclasses import dataclass, replace

from PIL import Image

from vitkit.data.datasets.split import Split
from vitkit.data.images.decode import as_rgb
from vitkit.errors import ImageError, VitkitError
from vitkit.explaining.methods import DEFAULTS
from vitkit.plots.overlay import ColourScale
from vitkit.reporting.predictions import THUMBNAIL, Predictions, RunImages, data_address, is_small
from vitkit.weights.checkpoint import Checkpoint

# Explanations of single images in a report: a small heat map over each.

SECONDS = 10.0
"""After this time, the other images are shown without an explanation."""


class Explanations:
    """Heat maps of the predicted class, by the weights of a run.

    Args:
        checkpoint: checkpoint of the run; None if it has none.

    Attributes:
        method: method that draws them, the default one of `vitkit explain`.
        count: maps drawn so far.
        problem: why there are none, a sentence; empty where there are.
    """

    def __init__(self, checkpoint: Checkpoint | None) -> None:
        self._checkpoint = checkpoint
        self._end: float | None = None
        self.method, self.count, self.problem = DEFAULTS[0], 0, ""
        if checkpoint is None:
            self.problem = "The run has no weights, so its mistakes are not explained."

    def of(self, split: Split, place: int) -> str:
        """Return the address of a small overlay of an image; empty where there is none.

        Args:
            split: the images.
            place: place of the image in it.
        """
        now = time.monotonic()
        self._end = self._end or now + SECONDS
        if self._checkpoint is None or self.problem or now > self._end:
            return ""
        # imported here: a report without mistakes explains nothing
        from vitkit.explaining.explain import ImageExplainer

        try:
            pixels = as_rgb(split.read(place))
        except (ImageError, OSError):
            return ""
        try:
            explainer = ImageExplainer(self._checkpoint, pixels, faithfulness=False)
            explanation = explainer.explain(self.method)
            # one colour scale for all maps, also if no patch speaks against the class
            scale = ColourScale.of(explanation.values, -explanation.values)
            image = Image.fromarray(explanation.panel(scale=scale).pixels)
        except VitkitError as error:
            self.problem = f"The mistakes are not explained: {error}."
            return ""
        self.count += 1
        # two pixels for each one of the page, since the map has fine lines
        image.thumbnail((2 * THUMBNAIL, 2 * THUMBNAIL), Image.Resampling.LANCZOS)
        return data_address(image.convert("RGB"), "jpeg")


SHOWN = 24
"""The most confident mistakes."""
MOST_OF_A_PAIR = 6
"""Mistakes that are listed of a pair of classes."""
PAIR_IMAGES = 120
"""Images of all pairs together, which keep the page small."""
MOST_PAIRS = 60
"""Pairs of classes that are listed where there is no table with a cell for each."""
MOST_IN_A_TABLE = 30
"""Classes of the largest confusion matrix that is a table with links."""


@dataclass(frozen=True)
class Mistake:
    """An image with a wrong prediction.

    Attributes:
        name: name of the image.
        label: its class.
        predicted: the class that was predicted.
        probability: probability of that class, in [0, 1].
        label_probability: probability of its own class, in [0, 1].
        image: a small copy as an address that contains it; empty where there is none.
        is_small: whether the copy is enlarged without blur.
        explanation: an overlay of what speaks for the predicted class, as an address; empty where
            there is none.
    """

    name: str
    label: str
    predicted: str
    probability: float
    label_probability: float
    image: str = ""
    is_small: bool = False
    explanation: str = ""


@dataclass(frozen=True)
class ClassPair:
    """The mistakes between a true and a predicted class.

    Attributes:
        key: name of its place in the page.
        label: the true class.
        predicted: the predicted one.
        count: how many there are.
        images: how many images the true class has.
        mistakes: the most confident ones.
    """

    key: str
    label: str
    predicted: str
    count: int
    images: int
    mistakes: list[Mistake]


class MistakeList:
    """The mistakes among predictions, with their images where the data can still be read.

    Args:
        predictions: predictions of the images of a split.
        images: images of the run.
    """

    def __init__(self, predictions: Predictions, images: RunImages) -> None:
        self._predictions, self._images = predictions, images
        self._numbers = predictions.confident_mistakes()
        self._split = images.of(predictions) if self._numbers else None

    @property
    def count(self) -> int:
        """The number of mistakes."""
        return len(self._numbers)

    def most_confident(self, explanations: Explanations) -> list[Mistake]:
        """Return the mistakes with the highest probability of the wrong class.

        Args:
            explanations: draws the maps beside the images.
        """
        found = []
        for number in self._numbers[:SHOWN]:
            mistake = self._mistake(number, with_image=True)
            if mistake.image and self._split is not None:
                place = int(self._predictions.places[number])
                mistake = replace(mistake, explanation=explanations.of(self._split, place))
            found.append(mistake)
        return found

    def pairs(self) -> list[ClassPair]:
        """Return the pairs of classes with mistakes, the most frequent first.

        Every pair of up to 30 classes is there, and the 60 most frequent ones of more.
        """
        predictions = self._predictions
        by_pair: dict[tuple[int, int], list[int]] = defaultdict(list)
        for number in self._numbers:
            pair = (int(predictions.labels[number]), int(predictions.predicted[number]))
            by_pair[pair].append(number)
        pairs = sorted(by_pair, key=lambda pair: (-len(by_pair[pair]), pair))
        if len(predictions.classes) > MOST_IN_A_TABLE:
            pairs = pairs[:MOST_PAIRS]
        # each pair gets an image before any gets more
        each = max(1, min(MOST_OF_A_PAIR, PAIR_IMAGES // max(1, len(pairs))))
        spare = PAIR_IMAGES - each * len(pairs)
        found = []
        for place, (label, predicted) in enumerate(pairs):
            numbers = by_pair[label, predicted]
            # beyond that number, only the names are shown
            with_images = place * each < PAIR_IMAGES
            more = max(0, min(spare, MOST_OF_A_PAIR - each, len(numbers) - each))
            spare -= more
            shown = numbers[: each + more]
            mistakes = [self._mistake(number, with_image=with_images) for number in shown]
            found.append(
                ClassPair(
                    key=pair_key(label, predicted),
                    label=predictions.classes[label],
                    predicted=predictions.classes[predicted],
                    count=len(numbers),
                    images=int((predictions.labels == label).sum()),
                    mistakes=mistakes,
                )
            )
        return found

    def _mistake(self, number: int, *, with_image: bool) -> Mistake:
        predictions = self._predictions
        place = int(predictions.places[number])
        image = None
        if with_image and self._split is not None:
            image = self._images.thumbnail(self._split, place)
        return Mistake(
            name=self._name(number, place),
            label=predictions.classes[predictions.labels[number]],
            predicted=predictions.classes[predictions.predicted[number]],
            probability=float(predictions.probability[number]),
            label_probability=float(predictions.label_probability[number]),
            image=image or "",
            is_small=image is not None and is_small(image),
        )

    def _name(self, number: int, place: int) -> str:
        if self._predictions.names:
            return self._predictions.names[number]
        if self._split is not None:
            return self._split.name(place)
        return f"{self._predictions.split}[{place}]"


def pair_key(label: int, predicted: int) -> str:
    """Return the name of a pair's place in the page."""
    return f"pair-{label}-{predicted}"
