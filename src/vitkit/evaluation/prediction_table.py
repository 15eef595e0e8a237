"""The columns of `predictions.csv`, and the images with the highest losses of an evaluation."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import PurePath
from typing import TYPE_CHECKING

from vitkit.data.datasets.split import Split
from vitkit.messages import percent
from vitkit.plots.html import html_table

if TYPE_CHECKING:
    from vitkit.plots.figure import NotebookFigure


@dataclass(frozen=True)
class ImageLoss:
    """The loss of one image, and the prediction that it comes from.

    Attributes:
        path: name of the image, as in `predictions.csv`; of a file relative to the data's folder.
        label: its true class.
        predicted: the most probable class.
        probability: probability of the predicted class, in [0, 1].
        label_probability: probability of the true class, in [0, 1].
        loss: negative log-likelihood of the true class, in nats.
    """

    path: str
    label: str
    predicted: str
    probability: float
    label_probability: float
    loss: float


class TopLosses(list[ImageLoss]):
    """The images with the highest losses, highest first: a list of `ImageLoss`.

    Args:
        losses: losses of each image.
        split: the same images, in the same order.
    """

    def __init__(self, losses: Iterable[ImageLoss], split: Split) -> None:
        super().__init__(losses)
        self._split = split
        # the list may be sorted or shortened before it is drawn
        self._indices = {one: index for index, one in enumerate(self)}

    def plot(self) -> NotebookFigure:
        """Draw the images with file name, label, wrong prediction and loss, as a Figure.

        Raises:
            ImageError: an image that can no longer be read.
        """
        # imported here: matplotlib takes half a second
        from vitkit.plots.figure import grid_of_images

        captions = []
        for one in self:
            caption = [
                PurePath(one.path).name,
                f"label {one.label}: {percent(one.label_probability)}",
            ]
            if one.predicted != one.label:
                caption.append(f"predicted {one.predicted}: {percent(one.probability)}")
            captions.append([*caption, f"loss {one.loss:.2f}"])
        images = (self._split.read(self._indices[one]) for one in self)
        return grid_of_images(images, captions, "highest losses")

    def _repr_html_(self) -> str:
        """Return a table, for a notebook."""
        rows = []
        for one in self:
            label, predicted = f"{one.label_probability:.4f}", f"{one.probability:.4f}"
            rows.append([one.path, one.label, label, one.predicted, predicted, f"{one.loss:.3f}"])
        header = ["image", "label", "its probability", "predicted", "its probability", "loss"]
        return html_table(header, rows)


PREDICTIONS_HEADER = (
    "image",
    "label",
    "predicted",
    "probability",
    "label_probability",
    "loss",
    "loss_rank",
)
"""Columns: the name of the image, its class, the predicted class and its probability; then the
probability of its own class, the loss -ln of that in nats, and the place by loss, highest first."""
