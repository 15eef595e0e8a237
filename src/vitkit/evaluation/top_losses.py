"""The images with the highest losses of an evaluation, as a list and as a figure."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from vitkit.data.datasets.split import Split
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
        probability: of the predicted class, in [0, 1].
        label_probability: of the true class, in [0, 1].
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
        losses: of each image.
        split: the same images, in the same order.
    """

    def __init__(self, losses: Iterable[ImageLoss], split: Split) -> None:
        super().__init__(losses)
        self._split = split
        # the list may be sorted or shortened before it is drawn
        self._indices = {one: index for index, one in enumerate(self)}

    def plot(self) -> NotebookFigure:
        """Draw the images with label, prediction and loss, as a matplotlib Figure.

        Raises:
            ImageError: an image that can no longer be read.
        """
        # imported here: matplotlib takes half a second
        from vitkit.plots.images import draw_images

        captions = []
        for one in self:
            label = f"label {one.label}: {100 * one.label_probability:.1f} %"
            predicted = f"predicted {one.predicted}: {100 * one.probability:.1f} %"
            captions.append([label, predicted, f"loss {one.loss:.2f}"])
        images = (self._split.read(self._indices[one]) for one in self)
        return draw_images(images, captions, "highest losses")

    def _repr_html_(self) -> str:
        """Return a table, for a notebook."""
        rows = [
            [one.path, one.label, f"{one.label_probability:.4f}", one.predicted,
             f"{one.probability:.4f}", f"{one.loss:.3f}"]
            for one in self
        ]  # fmt: skip
        header = ["image", "label", "its probability", "predicted", "its probability", "loss"]
        return html_table(header, rows)
