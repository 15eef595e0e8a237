"""The parts of a predictor: from a caller's function, or from an exported model alone."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from os import PathLike, fspath

import numpy as np
import torch
from jaxtyping import UInt8
from torch import Tensor

from vitkit.data.images.preprocess import fit, normalise
from vitkit.errors import SettingError, check_type
from vitkit.exporting.files.endings import is_artefact
from vitkit.exporting.files.open_artefact import open_artefact
from vitkit.exporting.files.session import Session
from vitkit.spec import Preprocess


@dataclass(frozen=True)
class ModelParts:
    """A function from images to logits, and how images are prepared for it.

    Attributes:
        forward: batches as `batches` makes them -> logits (B, K).
        preprocess: the evaluation transform.
        classes: the K names; empty means numbers.
        temperature: divides the logits before the softmax.
        takes_pixels: True for an exported model that resizes images itself.
    """

    forward: Callable[[Tensor], Tensor]
    preprocess: Preprocess
    classes: tuple[str, ...]
    temperature: float
    takes_pixels: bool = False

    def prepare(self, image: UInt8[np.ndarray, "H W channels"]) -> UInt8[np.ndarray, "h w C"]:
        """Return a decoded image in the model's size, or as it is for a model that resizes it."""
        return image if self.takes_pixels else fit(image, self.preprocess)

    def batches(self, images: Sequence[UInt8[np.ndarray, "_ _ _"]]) -> list[Tensor]:
        """Return prepared images as the batches that `forward` takes: one, or one for each."""
        if self.takes_pixels:  # images of different sizes make no batch
            return [pixel_batch(image) for image in images]
        return [normalise(torch.from_numpy(np.stack(images)), self.preprocess)]

    def blank(self) -> Tensor:
        """Return a batch of one empty image."""
        size = self.preprocess.image_size
        if self.takes_pixels:
            return torch.zeros(1, *size, 3, dtype=torch.uint8)
        return torch.zeros(1, self.preprocess.channels, *size)


@dataclass(frozen=True)
class SessionForward:
    """An exported model as a function from images to logits."""

    session: Session

    def __call__(self, images: Tensor) -> Tensor:
        """Return logits (B, K) of images (B, C, h, w) float32, or of pixels (B, H, W, 3) uint8."""
        return torch.from_numpy(self.session.logits(np.ascontiguousarray(images.cpu().numpy())))


def pixel_batch(image: UInt8[np.ndarray, "H W channels"]) -> UInt8[Tensor, "1 H W 3"]:
    """Return a decoded image as a batch for a graph that takes pixels of any size."""
    if image.shape[2] == 1:
        image = np.repeat(image, 3, axis=2)
    return torch.from_numpy(np.array(image[None]))  # a copy: the caller's may be read-only


def model_parts(
    forward: Callable[[Tensor], Tensor] | str | PathLike[str],
    preprocess: Preprocess | None,
    classes: Sequence[str],
    temperature: float | None,
    *,
    trust_code: bool,
) -> ModelParts:
    """Return the parts of a predictor from its arguments, as `Predictor` explains them.

    Raises:
        CheckpointError: a file that is not an exported model, or that is not trusted.
        SettingError: no function, no preprocessing, or a temperature that is not positive.
    """
    given: object = forward
    if isinstance(given, str | PathLike) and is_artefact(given):
        return _of_artefact(given, preprocess, classes, temperature, trust_code=trust_code)
    if not callable(given):
        shown = repr(fspath(given)) if isinstance(given, str | PathLike) else "checkpoint"
        raise SettingError(
            "Predictor takes a function from images to logits; write "
            f"vitkit.Predictor.from_checkpoint({shown})"
        )
    expected = "its preprocessing as the second argument, such as checkpoint.preprocess"
    check_type(preprocess, Preprocess, "Predictor", expected)
    assert preprocess is not None, "checked above"
    if temperature is None:
        temperature = 1.0
    if not 0 < temperature < math.inf:
        raise SettingError(f"temperature {temperature:g} must be a positive number")
    return ModelParts(given, preprocess, tuple(classes), temperature)


def _of_artefact(
    path: str | PathLike[str],
    preprocess: Preprocess | None,
    classes: Sequence[str],
    temperature: float | None,
    *,
    trust_code: bool,
) -> ModelParts:
    if preprocess is not None or classes or temperature is not None:
        raise SettingError(
            f"Predictor({fspath(path)!r}): an exported model has its preprocessing, classes and "
            "temperature inside; pass its path alone"
        )
    artefact = open_artefact(path, trust_code=trust_code)
    found = artefact.description
    return ModelParts(
        SessionForward(artefact.session),
        found.preprocess,
        found.classes,
        found.temperature,
        found.with_preprocessing,
    )
