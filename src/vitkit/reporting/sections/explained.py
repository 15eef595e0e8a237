"""Explanations of single images in a report: a small heat map over each."""

from __future__ import annotations

import time

from PIL import Image

from vitkit.data.datasets.split import Split
from vitkit.data.images.decode import as_rgb
from vitkit.errors import ImageError, VitkitError
from vitkit.explaining.methods import DEFAULTS
from vitkit.plots.overlay import ColourScale
from vitkit.reporting.images import THUMBNAIL, data_address
from vitkit.weights.checkpoint import Checkpoint

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
