"""Predict images by a checkpoint, or by any function from images to logits."""

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

from vitkit.data.datasets.memory_limit import PIXELS_AT_ONCE, MemoryLimit
from vitkit.data.images.decode import as_rgb, decode_with_properties
from vitkit.data.images.preprocess import fit, normalise
from vitkit.devices import on_device, resolve_device
from vitkit.errors import CheckpointError, ImageError, SettingError
from vitkit.spec import Preprocess
from vitkit.weights.checkpoint import Checkpoint
from vitkit.weights.load import as_checkpoint

ImageSource: TypeAlias = str | PathLike[str] | bytes | Image.Image | np.ndarray
"""A path, an encoded file's bytes, a PIL image, or (H, W, 3) or (H, W) uint8."""

ResizedImage: TypeAlias = UInt8[np.ndarray, "h w C"]
"""An image in the model's size."""

ENGINES = ("auto", "torch")
PRECISIONS = ("float32", "bfloat16")
MAX_DECODER_THREADS = 8


@dataclass(frozen=True)
class Prediction:
    """The predicted class of one image, and the next ones.

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
    """A classifier of images, with the preprocessing of its checkpoint.

    Args:
        forward: preprocessed images (B, C, H, W) float32 -> logits (B, K), on `device`.
        preprocess: the evaluation transform.
        classes: the K names; empty means numbers.
        device: the device of the images that `forward` receives.
        batch_size: images per batch.
        temperature: divides the logits before the softmax.

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
        self.preprocess = preprocess
        self.classes = tuple(classes)
        self.device = torch.device(device)
        self.batch_size = batch_size
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
        """Create a predictor for a checkpoint or its path.

        Args:
            checkpoint: a checkpoint or its path; its model stays where it is.
            engine: `torch`, or `auto`, which is the same.
            precision: `bfloat16` runs matrix products under autocast.
            device: `cpu`, `cuda`, `mps`; auto picks the fastest available.
            batch_size: images per batch.

        Raises:
            CheckpointError: a file that is not a checkpoint, or a model without a head.
            DeviceError: a device that does not exist here.
            SettingError: an engine or a precision that does not exist.
        """
        if engine not in ENGINES:
            raise SettingError(
                f"engine {engine!r} does not exist; engines are {', '.join(ENGINES)}"
            )
        if precision not in PRECISIONS:
            raise SettingError(
                f"precision {precision!r} does not exist; precisions are {', '.join(PRECISIONS)}"
            )
        checkpoint = as_checkpoint(checkpoint)
        if checkpoint.model.spec.num_classes == 0:
            raise CheckpointError(
                f"{checkpoint.path or 'this model'} has no head and predicts no classes; vitkit "
                "embed writes its features, and vitkit train --pretrained trains a head"
            )
        model_device = resolve_device(device)
        model = on_device(checkpoint.model, model_device)

        def forward(images: Tensor) -> Tensor:
            with torch.autocast(model_device.type, torch.bfloat16, enabled=precision == "bfloat16"):
                logits: Tensor = model(images)
            return logits

        return cls(
            forward,
            checkpoint.preprocess,
            checkpoint.classes,
            device=model_device,
            batch_size=batch_size,
            temperature=checkpoint.temperature,
        )

    def __call__(self, images: Iterable[ImageSource], top_k: int = 5) -> list[Prediction]:
        """Predict a list of images, in order.

        Args:
            images: paths, bytes, PIL images or uint8 arrays, in any mixture.
            top_k: number of classes in `top`; at most K.

        Raises:
            ImageError: an image that cannot be used, by name or number.
            SettingError: top_k below 1, or one image where a list is expected.
        """
        predictions = []
        for prediction in self.stream(images, top_k):
            if isinstance(prediction, ImageError):
                raise prediction
            predictions.append(prediction)
        return predictions

    def stream(
        self, images: Iterable[ImageSource], top_k: int = 5
    ) -> Iterator[Prediction | ImageError]:
        """Yield the prediction of each image as soon as its batch is done, in order.

        Memory does not grow with the number of images. Paths and bytes are decoded in threads while
        the model runs.

        Args:
            images: as for a call; an iterator is read two batches ahead.
            top_k: number of classes in `top`; at most K.

        Yields:
            A `Prediction`, or the `ImageError` of an image that cannot be used; the others go on.

        Raises:
            SettingError: top_k below 1, or one image where a list is expected.
        """
        if top_k < 1:
            raise SettingError.about("top_k", top_k, "must be 1 or more")
        for logits, results in self._batches(images):
            # (B, K); dividing by a temperature leaves the order of the classes unchanged
            probabilities = (logits / self.temperature).softmax(-1)
            values, classes = probabilities.topk(min(top_k, probabilities.shape[-1]))
            top = [*zip(values.tolist(), classes.tolist(), strict=True)]
            for result in results:
                if isinstance(result, ImageError):
                    yield result
                else:
                    yield self._prediction(*top[result])

    def outputs(self, images: Iterable[ImageSource]) -> Iterator[Float[Tensor, " K"] | ImageError]:
        """Yield the output of `forward` for each image (K,), float32 on the CPU.

        Order, errors and memory as for `stream`.
        """
        for rows, results in self._batches(images):
            for result in results:
                yield result if isinstance(result, ImageError) else rows[result]

    def logits(self, images: Iterable[ImageSource]) -> Float[Tensor, "N K"]:
        """Return the logits of every image, in order: (N, K) float32 on the CPU.

        Errors as for a call.
        """
        batches = []
        for rows, results in self._batches(images):
            for result in results:
                if isinstance(result, ImageError):
                    raise result
            # without failures, the rows of a batch are its images in order
            batches.append(rows)
        return torch.cat(batches) if batches else torch.empty(0, len(self.classes))

    def _prediction(self, values: list[float], classes: list[int]) -> Prediction:
        names = [self.classes[c] if self.classes else str(c) for c in classes]
        top = tuple(zip(names, values, strict=True))
        return Prediction(*top[0], top)

    def _batches(
        self, images: Iterable[ImageSource]
    ) -> Iterator[tuple[Float[Tensor, "B K"], list[int | ImageError]]]:
        """Yield the outputs of each batch, and for each of its images its row or its error."""
        if isinstance(images, str | PathLike | bytes | Image.Image | np.ndarray):
            raise SettingError("expected a list of images, got one image; write [image]")
        # decoders and resizing release the interpreter lock, so threads are enough
        pool = ThreadPoolExecutor(min(MAX_DECODER_THREADS, os.cpu_count() or 1))
        memory = MemoryLimit(PIXELS_AT_ONCE)
        waiting: deque[list[Future[ResizedImage | ImageError]]] = deque()
        try:
            for chunk in _chunks(images, self.batch_size):
                waiting.append([self._submit(pool, memory, *numbered) for numbered in chunk])
                # the next batch is decoded while the model runs
                if len(waiting) > 1:
                    yield self._run(waiting.popleft())
            while waiting:
                yield self._run(waiting.popleft())
        finally:
            # also when the caller stops to iterate
            pool.shutdown(cancel_futures=True)

    def _submit(
        self, pool: ThreadPoolExecutor, memory: MemoryLimit, number: int, image: ImageSource
    ) -> Future[ResizedImage | ImageError]:
        """Decode and scale an image: the caller's objects at once, files in a thread."""
        if not isinstance(image, Image.Image | np.ndarray):
            return pool.submit(self._prepare, memory, number, image)
        # a PIL image or an array may be changed by the caller before a thread reads it
        future: Future[ResizedImage | ImageError] = Future()
        future.set_result(self._prepare(memory, number, image))
        return future

    def _prepare(
        self, memory: MemoryLimit, number: int, image: ImageSource
    ) -> ResizedImage | ImageError:
        with memory.admission() as admit:  # until the pixels are in the model's size
            try:
                return fit(read_image(image, f"image {number}", admit), self.preprocess)
            except ImageError as error:
                return error

    def _run(
        self, futures: Sequence[Future[ResizedImage | ImageError]]
    ) -> tuple[Float[Tensor, "B K"], list[int | ImageError]]:
        """Run the images of a batch that could be decoded."""
        pixels: list[ResizedImage] = []
        results: list[int | ImageError] = []
        for future in futures:
            image = future.result()
            if isinstance(image, ImageError):
                results.append(image)
            else:
                results.append(len(pixels))
                pixels.append(image)
        # every image of the batch failed, so the model has nothing to run
        if not pixels:
            return torch.empty(0, max(len(self.classes), 1)), results
        images = normalise(torch.from_numpy(np.stack(pixels)), self.preprocess)
        with torch.inference_mode():
            return self.forward(images.to(self.device)).float().cpu(), results


def feature_predictor(
    checkpoint: Checkpoint, *, device: str = "auto", batch_size: int = 64
) -> Predictor:
    """Create a predictor whose outputs are the pooled features, the inputs of the head: (D,)."""
    model_device = resolve_device(device)
    model = on_device(checkpoint.model, model_device)
    return Predictor(
        # (B, C, H, W) -> (B, D), before the head
        lambda images: model.pooled(model.forward_features(images)),
        checkpoint.preprocess,
        device=model_device,
        batch_size=batch_size,
    )


def embed(
    checkpoint: Checkpoint | str | Path,
    images: Iterable[ImageSource],
    *,
    device: str = "auto",
    batch_size: int = 64,
) -> Float[np.ndarray, "N D"]:
    """Return the pooled features of images, the inputs of the head: (N, D) float32.

    Args:
        checkpoint: a checkpoint or its path.
        images: paths, bytes, PIL images or uint8 arrays, in any mixture.
        device: `cpu`, `cuda`, `mps`; auto picks the fastest available.
        batch_size: images per batch.

    Raises:
        ImageError, CheckpointError, DeviceError: the message names the wrong value.
    """
    predictor = feature_predictor(as_checkpoint(checkpoint), device=device, batch_size=batch_size)
    return predictor.logits(images).numpy()


def read_image(
    image: ImageSource,
    name: str = "image",
    admit: Callable[[int], object] = lambda pixels: None,
) -> UInt8[np.ndarray, "H W 3"]:
    """Read an image as (H, W, 3) uint8 RGB.

    Args:
        image: a path, an encoded file's bytes, a PIL image or an array.
        name: its name in messages; a path names itself.
        admit: receives the number of pixels before a file is decoded, and may wait; not called
            where the pixels are in memory already.

    Raises:
        ImageError: an image that cannot be used.
        SettingError: not an image, such as a list of images.
    """
    if not isinstance(image, str | PathLike | bytes | Image.Image | np.ndarray):
        raise SettingError(
            f"{name} is a {type(image).__name__}; pass an image: a path, bytes, a PIL image or a "
            "uint8 array"
        )
    if isinstance(image, Image.Image | np.ndarray):
        return as_rgb(image, name)
    pixels, _ = decode_with_properties(
        image, name=name if isinstance(image, bytes) else None, admit=admit
    )
    return pixels


def _chunks(images: Iterable[ImageSource], size: int) -> Iterable[list[tuple[int, ImageSource]]]:
    numbered = enumerate(images)
    while chunk := list(islice(numbered, size)):
        yield chunk
