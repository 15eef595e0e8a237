"""`Predictor`: pictures in, predictions out. Any callable from images to logits serves alike."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import islice
from os import PathLike
from pathlib import Path
from typing import TypeAlias

import numpy as np
import torch
from jaxtyping import Float, UInt8
from PIL import Image
from torch import Tensor

from vitkit.data.images import as_rgb, decode
from vitkit.data.preprocess import preprocess_pictures
from vitkit.devices import on_device, resolve_device
from vitkit.errors import CheckpointError, SettingError
from vitkit.spec import Preprocess
from vitkit.weights.checkpoint import Checkpoint
from vitkit.weights.load import load

Picture: TypeAlias = str | PathLike[str] | bytes | Image.Image | np.ndarray
"""A path, an encoded file's bytes, a PIL image, or (H, W, 3) or (H, W) uint8."""

ENGINES = ("auto", "torch")
PRECISIONS = ("float32", "bfloat16")


@dataclass(frozen=True)
class Prediction:
    """What a model says of one picture.

    Attributes:
        label: the most probable class.
        probability: its softmax probability, in [0, 1]; with the temperature that the checkpoint
            stores.
        top: (label, probability) of the most probable classes, best first.
    """

    label: str
    probability: float
    top: tuple[tuple[str, float], ...]


class Predictor:
    """Pictures -> predictions, by the preprocessing the checkpoint declares.

    Args:
        forward: preprocessed images (B, C, H, W) float32 -> logits (B, K), on `device`.
        preprocess: what pictures become.
        classes: the K names; empty means numbers.
        device: where `forward` wants its images.
        batch_size: pictures run at once.
        temperature: what logits are divided by before they become probabilities.

    Attributes:
        forward: the engine itself, as given.

    Raises:
        SettingError: a batch size below 1, or a temperature that is not positive.
    """

    def __init__(
        self,
        forward: Callable[[Tensor], Tensor],
        preprocess: Preprocess,
        classes: Sequence[str] = (),
        *,
        device: torch.device | str = "cpu",
        batch_size: int = 64,
        temperature: float = 1.0,
    ) -> None:
        if batch_size < 1:
            raise SettingError(f"batch_size {batch_size} must be 1 or more")
        if not 0 < temperature < math.inf:
            raise SettingError(f"temperature {temperature:g} must be a positive number")
        self.forward = forward
        self.preprocess, self.classes = preprocess, tuple(classes)
        self.device, self.batch_size = torch.device(device), batch_size
        self.temperature = temperature

    @classmethod
    def from_checkpoint(
        cls,
        checkpoint: Checkpoint | str | Path,
        *,
        engine: str = "auto",
        precision: str = "float32",
        device: str = "auto",
        batch_size: int = 64,
    ) -> Predictor:
        """A predictor for a checkpoint or its path.

        Args:
            checkpoint: a checkpoint or its path; its model stays where it is.
            engine: `torch`, or `auto`, which is the same while there is no other.
            precision: `bfloat16` runs the products under autocast.
            device: `cpu`, `cuda`, `mps`; auto takes the best there is.
            batch_size: pictures run at once.

        Raises:
            CheckpointError: a file that is no checkpoint, or a model without a head.
            DeviceError: a device that is not there.
            SettingError: an engine or a precision that does not exist.
        """
        if engine not in ENGINES:
            raise SettingError(
                f"engine {engine!r} does not exist; engines are {', '.join(ENGINES)}"
            )
        if precision not in PRECISIONS:
            raise SettingError(
                f"precision {precision!r} does not exist; there are {', '.join(PRECISIONS)}"
            )
        if not isinstance(checkpoint, Checkpoint):
            checkpoint = load(checkpoint)
        if checkpoint.model.spec.num_classes == 0:
            raise CheckpointError(
                f"{checkpoint.path or 'this model'} has no head, so no classes to predict; vitkit "
                f"embed gives its features, vitkit train --pretrained a head"
            )
        where = resolve_device(device)
        model = on_device(checkpoint.model, where)

        def forward(images: Tensor) -> Tensor:
            with torch.autocast(where.type, torch.bfloat16, enabled=precision == "bfloat16"):
                logits: Tensor = model(images)
            return logits

        return cls(
            forward, checkpoint.preprocess, checkpoint.classes, device=where,
            batch_size=batch_size, temperature=checkpoint.temperature,
        )  # fmt: skip

    def __call__(self, pictures: Iterable[Picture], top_k: int = 5) -> list[Prediction]:
        """Predict a list of pictures, in order.

        Args:
            pictures: paths, bytes, PIL images or uint8 arrays, mixed as you like.
            top_k: how many classes `top` holds; at most K.

        Raises:
            ImageError: a picture that cannot be used, by name or number.
            SettingError: top_k below 1, or one picture where a list is expected.
        """
        if top_k < 1:
            raise SettingError(f"top_k {top_k} must be 1 or more")
        predictions: list[Prediction] = []
        for logits in self.logits(pictures):
            values, classes = (logits / self.temperature).softmax(-1).topk(min(top_k, len(logits)))
            names = [self.classes[c] if self.classes else str(c) for c in classes.tolist()]
            top = tuple(zip(names, values.tolist(), strict=True))
            predictions.append(Prediction(*top[0], top))
        return predictions

    def logits(self, pictures: Iterable[Picture]) -> Float[Tensor, "N K"]:
        """Logits of every picture, in order: (N, K) float32 on the CPU. Errors as for a call."""
        if isinstance(pictures, str | PathLike | bytes | Image.Image | np.ndarray):
            raise SettingError("one picture was given where a list is expected; write [picture]")
        outputs = [self._run(batch) for batch in _chunks(pictures, self.batch_size)]
        return torch.cat(outputs) if outputs else torch.empty(0, len(self.classes))

    def _run(self, batch: Sequence[tuple[int, Picture]]) -> Float[Tensor, "B K"]:
        decoded = [read_picture(picture, name=f"picture {number}") for number, picture in batch]
        images = preprocess_pictures(decoded, self.preprocess)
        with torch.inference_mode():
            return self.forward(images.to(self.device)).float().cpu()


def read_picture(picture: Picture, name: str = "picture") -> UInt8[np.ndarray, "H W 3"]:
    """Any picture as (H, W, 3) uint8 RGB. Raises `ImageError`."""
    if isinstance(picture, Image.Image | np.ndarray):
        return as_rgb(picture, name)
    return decode(picture, name=name if isinstance(picture, bytes) else None)


def _chunks(pictures: Iterable[Picture], size: int) -> Iterable[list[tuple[int, Picture]]]:
    numbered = enumerate(pictures)
    while chunk := list(islice(numbered, size)):
        yield chunk
