"""The predictions of a run and their images, for the report."""

from __future__ import annotations

import csv
import warnings
from base64 import b64encode
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from io import BytesIO
from pathlib import Path

import numpy as np
import torch
from jaxtyping import Bool, Float, Float64, Int64, UInt8
from PIL import Image
from safetensors import SafetensorError, safe_open
from torch import Tensor

from vitkit.data.datasets.dataset import Dataset
from vitkit.data.datasets.split import Split
from vitkit.errors import ImageError, VitkitError
from vitkit.evaluation.evaluate import open_as_in_training, with_labels_of
from vitkit.evaluation.prediction_table import PREDICTIONS_HEADER
from vitkit.evaluation.temperature import HeldOutLogits
from vitkit.training.config.meaning import Settings
from vitkit.weights.checkpoint import Checkpoint


@dataclass(frozen=True, eq=False)
class Predictions:
    """The predictions of N images.

    Attributes:
        split: `test` or `val`.
        origin: where they come from, a sentence.
        classes: the K names.
        names: names of the images (N); empty where they are not stored.
        places: number of each image in its split (N,).
        labels: true classes (N,).
        predicted: most probable classes (N,).
        probability: probability of the predicted classes (N,), in [0, 1].
        label_probability: probability of the true classes (N,), in [0, 1].
    """

    split: str
    origin: str
    classes: tuple[str, ...]
    names: Sequence[str]
    places: Int64[np.ndarray, " N"]
    labels: Int64[np.ndarray, " N"]
    predicted: Int64[np.ndarray, " N"]
    probability: Float64[np.ndarray, " N"]
    label_probability: Float64[np.ndarray, " N"]

    @property
    def right(self) -> Bool[np.ndarray, " N"]:
        """True for each image (N,) whose class is the predicted one."""
        return self.labels == self.predicted

    def confident_mistakes(self) -> list[int]:
        """Return the numbers of the wrong images, the most confident one first."""
        # Stable: equally confident images keep the order of the split.
        wrong = np.flatnonzero(~self.right)
        found: list[int] = wrong[np.argsort(-self.probability[wrong], kind="stable")].tolist()
        return found


@dataclass(frozen=True, eq=False)
class HeldOut:
    """The validation logits that the temperature of a run was fitted on.

    Each fold of the images has those of the model that the other folds choose, so a few may come
    from other epochs than that of the best weights.

    Attributes:
        logits: (N, K), without the temperature.
        labels: class numbers (N,).
    """

    logits: Float[Tensor, "N K"]
    labels: Int64[Tensor, "N"]

    def probabilities(self, temperature: float) -> Float[Tensor, "N K"]:
        """Return the softmax of the logits divided by a temperature: (N, K), in [0, 1]."""
        return (self.logits.double() / temperature).softmax(1)


def read_held_out(path: Path) -> HeldOut | None:
    """Read the validation logits of a run; None if there are none that can be read."""
    try:
        with safe_open(path, "pt") as file:
            logits, labels = file.get_tensor("logits"), file.get_tensor("labels")
    except (OSError, SafetensorError):
        return None
    if logits.ndim != 2 or labels.shape != logits.shape[:1] or not len(labels):
        return None
    labels = labels.long()
    if labels.min() < 0 or labels.max() >= logits.shape[1]:
        return None
    return HeldOut(logits.float(), labels)


def read_predictions(path: Path, classes: Sequence[str]) -> Predictions:
    """Read a table of predictions, as a run or `vitkit eval --predictions` writes it.

    Args:
        path: the CSV file.
        classes: the K names; those that the table has and they lack come after them.

    Raises:
        Missing: no such file, or one of another kind.
    """
    try:
        # Not `splitlines`, which also splits at characters such as U+2028, which a name may have.
        with path.open(encoding="utf-8", errors="replace", newline="") as file:
            header, *rows = list(csv.reader(file)) or [[]]
    except OSError as error:
        raise Missing(f"{path.name} cannot be read: {error.strerror}.") from None
    except csv.Error as error:
        raise Missing(f"{path.name} is not a CSV file: {error}.") from None
    if tuple(header) != PREDICTIONS_HEADER or not rows:
        raise Missing(f"{path.name} is not a table of predictions of vitkit.")
    numbers = {name: number for number, name in enumerate(classes)}
    try:
        # a class that the weights do not name gets the next number
        found = {
            name: [numbers.setdefault(row[column], len(numbers)) for row in rows]
            for name, column in (("labels", 1), ("predicted", 2))
        }
        probability = np.array([[float(row[3]), float(row[4])] for row in rows])
        if not ((probability >= 0) & (probability <= 1)).all():  # NaN is neither
            raise ValueError
    except (ValueError, IndexError):
        raise Missing(f"{path.name} has a line that is not complete, or no probability.") from None
    return Predictions(
        split="test",
        origin=f"{path.name}: the weights of the run, with their temperature if they have one",
        classes=tuple(numbers),
        names=[row[0] for row in rows],
        places=np.arange(len(rows)),
        labels=np.array(found["labels"]),
        predicted=np.array(found["predicted"]),
        probability=probability[:, 0],
        label_probability=probability[:, 1],
    )


def validation_predictions(
    held_out: HeldOut, classes: Sequence[str], temperature: float, images: int
) -> Predictions:
    """Return the predictions that the kept validation logits give.

    Args:
        held_out: the logits.
        classes: the K names; numbers where they do not fit.
        temperature: divides the logits.
        images: number of validation images; of very many not all logits are kept.
    """
    probabilities = held_out.probabilities(temperature)
    count, num_classes = probabilities.shape
    # logits i are those of image i * n of the split
    every = HeldOutLogits.step(images, num_classes)
    confidence, predicted = probabilities.max(1)
    own = probabilities.gather(1, held_out.labels[:, None])[:, 0]
    names = tuple(classes)
    if len(names) != num_classes:
        names = tuple(map(str, range(num_classes)))
    return Predictions(
        split="val",
        origin="the validation logits of the run, with the temperature if there is one; each fifth "
        "of the images by the epoch that the other four choose",
        classes=names,
        names=(),
        places=np.arange(count) * every,
        labels=held_out.labels.numpy(),
        predicted=predicted.numpy(),
        probability=confidence.numpy(),
        label_probability=own.numpy(),
    )


def as_confidence(
    held_out: HeldOut, temperature: float
) -> tuple[Float64[np.ndarray, " N"], Bool[np.ndarray, " N"]]:
    """Return the confidence of each validation image, and whether its prediction is correct.

    Args:
        held_out: the logits of N images.
        temperature: divides them.

    Returns:
        The probability of the most probable class (N,), in [0, 1], and True where that is right.
    """
    confidence, predicted = held_out.probabilities(temperature).max(1)
    right: Tensor = torch.eq(predicted, held_out.labels)
    return confidence.numpy(), right.numpy()


# The images of a report: read from the data of the run, reduced, and put into the page.

THUMBNAIL = 96
"""Pixels of the longer side of an image in the page at most."""
SHARP = 48
"""Images with no side longer than this are kept bit by bit, and enlarged without blur."""
QUALITY = 78
"""Of JPEG files, up to 95."""


class RunImages:
    """The images that a run was trained and tested with, where they can still be read.

    Args:
        checkpoint: checkpoint of the run; None if it has none.
        settings: settings of the run.
        relabel_file: the corrected labels that it was trained with, if any.
    """

    def __init__(
        self, checkpoint: Checkpoint | None, settings: Settings, relabel_file: Path | None = None
    ) -> None:
        self._checkpoint, self._settings = checkpoint, settings
        self._relabel_file = relabel_file
        self._encoded: dict[str, str | None] = {}
        self.problem = ""
        """Why there are no images, a sentence; empty where there are."""

    @cached_property
    def dataset(self) -> Dataset | None:
        """The data, split as in the training; None if they cannot be opened."""
        checkpoint, settings = self._checkpoint, self._settings
        if checkpoint is None or not settings.get("data"):
            self.problem = "The run has no weights or no settings, so its data are not known."
            return None
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # the training has shown them
                return open_as_in_training(
                    checkpoint,
                    str(settings["data"]),
                    settings.get("data_root"),
                    None,
                    self._relabel_file,
                )
        except (VitkitError, OSError) as error:
            self.problem = f"The images are not shown: {error}."
            return None

    def split(self, name: str) -> Split | None:
        """Return a split whose images can be read; None, and a `problem`, without one."""
        if self.dataset is None or self._checkpoint is None:
            return None
        split = self.dataset.splits.get(name)
        if split is None:
            self.problem = f"The images are not shown: the data have no {name} split."
            return None
        return split

    def of(self, predictions: Predictions) -> Split | None:
        """Return the split that predictions are of; None if the data have changed since."""
        split = self.split(predictions.split)
        if split is None:
            return None
        if not self._is_same(split, predictions):
            self.problem = "The images are not shown: the data have changed since the run."
            return None
        return split

    def _is_same(self, split: Split, predictions: Predictions) -> bool:
        """Return whether predictions are of this split: by names, or by labels without them."""
        if predictions.places[-1] >= len(split):
            return False
        if predictions.names:
            places = (0, len(predictions.names) - 1)
            same_size = len(split) == len(predictions.names)
            return same_size and all(split.name(n) == predictions.names[n] for n in places)
        assert self._checkpoint is not None, "the dataset is open"
        assert self.dataset is not None
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            labels = with_labels_of(self._checkpoint, self.dataset, predictions.split).labels
        return bool(np.array_equal(labels[predictions.places], predictions.labels))

    def thumbnail(self, split: Split, place: int) -> str | None:
        """Return the address of a small copy of an image, `data:...`; None if it is unreadable.

        Args:
            split: the images.
            place: number of the image in it.
        """
        path = split.path(place)  # another split has another image in this place
        if path not in self._encoded:
            try:
                self._encoded[path] = _encode_thumbnail(split.read(place))
            except (ImageError, OSError):
                self._encoded[path] = None
        return self._encoded[path]


def _encode_thumbnail(pixels: UInt8[np.ndarray, "H W C"]) -> str:
    """Return an image as an address that contains it."""
    image = Image.fromarray(pixels[..., 0] if pixels.shape[2] == 1 else pixels)
    if max(image.size) <= SHARP:
        return data_address(image, "png")
    image.thumbnail((THUMBNAIL, THUMBNAIL), Image.Resampling.LANCZOS)
    return data_address(image, "jpeg")


def data_address(image: Image.Image, kind: str) -> str:
    """Return an image as `data:image/KIND;base64,...`.

    Args:
        image: RGB or grey.
        kind: `png` or `jpeg`.
    """
    content = BytesIO()
    image.save(content, format=kind, optimize=True, quality=QUALITY)
    return f"data:image/{kind};base64,{b64encode(content.getvalue()).decode('ascii')}"


def is_small(address: str) -> bool:
    """Return whether an address holds an image that is enlarged without blur."""
    return address.startswith("data:image/png")


# `Missing`: the data that a section of the report needs and the run folder lacks.


class Missing(Exception):
    """A section cannot be shown; the report says why, and how to change that.

    Args:
        reason: what is missing, a sentence.
        command: the command that makes it; empty where there is none.
    """

    def __init__(self, reason: str, command: str = "") -> None:
        super().__init__(reason)
        self.reason, self.command = reason, command
