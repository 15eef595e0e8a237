"""The parts of a predictor from an exported model alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from os import PathLike

import numpy as np
import torch
from torch import Tensor

from vitkit.exporting.files.description import ArtefactDescription
from vitkit.exporting.files.open_artefact import open_artefact


@dataclass(frozen=True)
class ArtefactForward:
    """An exported model as a function from images to logits.

    Attributes:
        description: of the model.
        run: the batch that the graph takes -> logits (B, K).
    """

    description: ArtefactDescription
    run: Callable[[np.ndarray], np.ndarray]

    def __call__(self, images: Tensor) -> Tensor:
        """Return the logits (B, K) of images (B, C, h, w) float32, or of pixels (B, H, W, 3)."""
        array = np.ascontiguousarray(images.cpu().numpy())
        return torch.from_numpy(self.run(array))


def load_forward(path: str | PathLike[str], *, trust_code: bool = False) -> ArtefactForward:
    """Open an exported model on the CPU; errors as for `open_artefact`.

    Args:
        path: as `vitkit export` has written it.
        trust_code: open a `.pt2` file, which can run code that is in it.
    """
    artefact = open_artefact(path, trust_code=trust_code)
    return ArtefactForward(artefact.description, artefact.session.logits)


def pixel_batches(images: Sequence[np.ndarray]) -> list[Tensor]:
    """Return decoded images as batches (1, H, W, 3) of a graph that takes pixels of any size."""
    batches = []
    for image in images:
        if image.shape[2] == 1:
            image = np.repeat(image, 3, axis=2)
        batches.append(torch.from_numpy(np.ascontiguousarray(image[None])))
    return batches
