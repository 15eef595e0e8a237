"""The images of a report: read from the data of the run, reduced, and put into the page."""

from __future__ import annotations

import warnings
from base64 import b64encode
from functools import cached_property
from io import BytesIO
from pathlib import Path

import numpy as np
from jaxtyping import UInt8
from PIL import Image

from vitkit.data.datasets.dataset import Dataset
from vitkit.data.datasets.split import Split
from vitkit.errors import ImageError, VitkitError
from vitkit.evaluation.open_data import open_as_in_training, with_labels_of
from vitkit.reporting.prediction_source import Predictions
from vitkit.training.config.field_types import Settings
from vitkit.weights.checkpoint import Checkpoint

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
        if split.is_remote:
            self.problem = "The images are not shown: they are not on this computer."
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
                self._encoded[path] = encode_thumbnail(split.read(place))
            except (ImageError, OSError):
                self._encoded[path] = None
        return self._encoded[path]


def encode_thumbnail(pixels: UInt8[np.ndarray, "H W C"]) -> str:
    """Return an image as an address that contains it.

    Args:
        pixels: (H, W, 3) RGB or (H, W, 1) grey; a small image stays as it is, a larger one is
            reduced to 96 pixels.
    """
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
