"""`Predictor`: images in, predictions out. Any callable from images to logits serves alike."""

from __future__ import annotations

import math
import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
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

from vitkit.data.datasets.memory_limit import PIXELS_AT_ONCE, Room
from vitkit.data.images.decode import as_rgb, examine
from vitkit.data.images.preprocess import fit, normalise
from vitkit.devices import on_device, resolve_device
from vitkit.errors import CheckpointError, ImageError, SettingError
from vitkit.spec import Preprocess
from vitkit.weights.checkpoint import Checkpoint
from vitkit.weights.load import load

ImageSource: TypeAlias = str | PathLike[str] | bytes | Image.Image | np.ndarray
"""A path, an encoded file's bytes, a PIL image, or (H, W, 3) or (H, W) uint8."""

Pixels: TypeAlias = UInt8[np.ndarray, "h w C"]
"""An image in the model's size."""

ENGINES = ("auto", "torch")
PRECISIONS = ("float32", "bfloat16")
MOST_THREADS = 8
"""Threads that decode."""


@dataclass(frozen=True)
class Prediction:
    """What a model says of one image.

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
    """Images -> predictions, by the preprocessing the checkpoint declares.

    Args:
        forward: preprocessed images (B, C, H, W) float32 -> logits (B, K), on `device`.
        preprocess: what images become.
        classes: the K names; empty means numbers.
        device: where `forward` wants its images.
        batch_size: images run at once.
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
            raise SettingError.about("batch_size", batch_size, "must be 1 or more")
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
            batch_size: images run at once.

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
        checkpoint = as_checkpoint(checkpoint)
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

    def __call__(self, images: Iterable[ImageSource], top_k: int = 5) -> list[Prediction]:
        """Predict a list of images, in order.

        Args:
            images: paths, bytes, PIL images or uint8 arrays, mixed as you like.
            top_k: how many classes `top` holds; at most K.

        Raises:
            ImageError: an image that cannot be used, by name or number.
            SettingError: top_k below 1, or one image where a list is expected.
        """
        predictions = []
        for said in self.stream(images, top_k):
            if isinstance(said, ImageError):
                raise said
            predictions.append(said)
        return predictions

    def stream(
        self, images: Iterable[ImageSource], top_k: int = 5
    ) -> Iterator[Prediction | ImageError]:
        """Yield the prediction of each image as soon as its batch is done, in order.

        Memory does not grow with the number of images. Paths and bytes are decoded in threads while
        the model runs.

        Args:
            images: as for a call; an iterator is read two batches ahead.
            top_k: how many classes `top` holds; at most K.

        Yields:
            A `Prediction`, or the `ImageError` of an image that cannot be used; the others go on.

        Raises:
            SettingError: top_k below 1, or one image where a list is expected.
        """
        if top_k < 1:
            raise SettingError.about("top_k", top_k, "must be 1 or more")
        for logits, places in self._batches(images):
            chances = (logits / self.temperature).softmax(-1)
            values, classes = chances.topk(min(top_k, chances.shape[-1]))
            rows = zip(values.tolist(), classes.tolist(), strict=True)
            said = [self._prediction(*row) for row in rows]
            yield from (place if isinstance(place, ImageError) else said[place] for place in places)

    def outputs(self, images: Iterable[ImageSource]) -> Iterator[Float[Tensor, " K"] | ImageError]:
        """Yield what `forward` gives for each image (K,), float32 on the CPU; else as `stream`."""
        for rows, places in self._batches(images):
            yield from (place if isinstance(place, ImageError) else rows[place] for place in places)

    def logits(self, images: Iterable[ImageSource]) -> Float[Tensor, "N K"]:
        """Logits of every image, in order: (N, K) float32 on the CPU. Errors as for a call."""
        batches = []
        for rows, places in self._batches(images):
            for place in places:
                if isinstance(place, ImageError):
                    raise place
            batches.append(rows)
        return torch.cat(batches) if batches else torch.empty(0, len(self.classes))

    def _prediction(self, values: list[float], classes: list[int]) -> Prediction:
        names = [self.classes[c] if self.classes else str(c) for c in classes]
        top = tuple(zip(names, values, strict=True))
        return Prediction(*top[0], top)

    def _batches(
        self, images: Iterable[ImageSource]
    ) -> Iterator[tuple[Float[Tensor, "B K"], list[int | ImageError]]]:
        """The outputs of each batch, and for each of its images its row there, or its error."""
        if isinstance(images, str | PathLike | bytes | Image.Image | np.ndarray):
            raise SettingError("one image was given where a list is expected; write [image]")
        pool = ThreadPoolExecutor(min(MOST_THREADS, os.cpu_count() or 1))
        room = Room(PIXELS_AT_ONCE)
        waiting: deque[list[Future[Pixels | ImageError]]] = deque()
        try:
            for chunk in _chunks(images, self.batch_size):
                waiting.append([self._begin(pool, room, *each) for each in chunk])
                if len(waiting) > 1:
                    yield self._run([each.result() for each in waiting.popleft()])
            while waiting:
                yield self._run([each.result() for each in waiting.popleft()])
        finally:
            pool.shutdown(cancel_futures=True)

    def _begin(
        self, pool: ThreadPoolExecutor, room: Room, number: int, image: ImageSource
    ) -> Future[Pixels | ImageError]:
        """Decode and scale an image; here if it is the caller's object, else in a thread."""
        if not isinstance(image, Image.Image | np.ndarray):
            return pool.submit(self._prepared, room, number, image)
        done: Future[Pixels | ImageError] = Future()
        done.set_result(self._prepared(room, number, image))
        return done

    def _prepared(self, room: Room, number: int, image: ImageSource) -> Pixels | ImageError:
        with room.admission() as admit:  # until the pixels are in the model's size
            try:
                return fit(read_image(image, f"image {number}", admit), self.preprocess)
            except ImageError as error:
                return error

    def _run(
        self, prepared: Sequence[Pixels | ImageError]
    ) -> tuple[Float[Tensor, "B K"], list[int | ImageError]]:
        pixels: list[Pixels] = []
        places: list[int | ImageError] = []
        for each in prepared:
            if isinstance(each, ImageError):
                places.append(each)
            else:
                places.append(len(pixels))
                pixels.append(each)
        if not pixels:
            return torch.empty(0, max(len(self.classes), 1)), places
        images = normalise(torch.from_numpy(np.stack(pixels)), self.preprocess)
        with torch.inference_mode():
            return self.forward(images.to(self.device)).float().cpu(), places


def feature_predictor(
    checkpoint: Checkpoint, *, device: str = "auto", batch_size: int = 64
) -> Predictor:
    """Make a predictor whose outputs are the pooled features, what the head reads: (D,) each."""
    where = resolve_device(device)
    model = on_device(checkpoint.model, where)
    return Predictor(
        lambda images: model.pooled(model.forward_features(images)),
        checkpoint.preprocess,
        device=where,
        batch_size=batch_size,
    )


def as_checkpoint(given: Checkpoint | str | PathLike[str]) -> Checkpoint:
    """A checkpoint, read from its path if need be.

    Raises:
        CheckpointError: neither of them, or a file that is no checkpoint.
    """
    if isinstance(given, Checkpoint):
        return given
    if not isinstance(given, str | PathLike):
        raise CheckpointError(
            f"a {type(given).__name__} is no checkpoint; give what vitkit.load returns, which has "
            f"the model's preprocessing and class names too, or the path of a file"
        )
    return load(Path(given) if isinstance(given, PathLike) else given)


def read_image(
    image: ImageSource,
    name: str = "image",
    admit: Callable[[int], object] = lambda pixels: None,
) -> UInt8[np.ndarray, "H W 3"]:
    """Any image as (H, W, 3) uint8 RGB.

    Args:
        image: the image.
        name: what to call it in a message; a path is called by itself.
        admit: as in `images.examine`; not asked where the pixels are in memory already.

    Raises:
        ImageError: one that cannot be used.
        SettingError: what is no image at all, such as a list of them.
    """
    if not isinstance(image, str | PathLike | bytes | Image.Image | np.ndarray):
        raise SettingError(
            f"{name} is a {type(image).__name__}; give one image: a path, bytes, a PIL image "
            f"or a uint8 array"
        )
    if isinstance(image, Image.Image | np.ndarray):
        return as_rgb(image, name)
    return examine(image, name=name if isinstance(image, bytes) else None, admit=admit)[0]


def _chunks(images: Iterable[ImageSource], size: int) -> Iterable[list[tuple[int, ImageSource]]]:
    numbered = enumerate(images)
    while chunk := list(islice(numbered, size)):
        yield chunk
