"""The classifier of images: a checkpoint, or any function from images to logits."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterator, Sequence, Sized
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from itertools import islice
from os import PathLike, fspath
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import torch
from jaxtyping import Float, Int64, UInt8
from PIL import Image
from torch import Tensor

from vitkit import messages, process, spec
from vitkit.data.images.preprocess import fit, normalise
from vitkit.engines.choose import EngineOptions, engine_of
from vitkit.errors import CheckpointError, ImageError, SettingError, UserCodeError, check_type
from vitkit.evaluation.metrics import finite_rows, refuse_not_finite
from vitkit.exporting import artefact, exported_model, files
from vitkit.plots.html import html_bars
from vitkit.prediction.find import Images, as_list
from vitkit.prediction.images import AnyImage, name_in_messages, read_any_image
from vitkit.weights.checkpoint import Checkpoint
from vitkit.weights.load import as_checkpoint

if TYPE_CHECKING:
    from vitkit.data.sources.open import DataSource

ResizedImage: TypeAlias = UInt8[np.ndarray, "_ _ C"]
"""An image in the model's size."""

MAX_DECODER_THREADS = 8


@dataclass(frozen=True)
class Prediction:
    """The predicted class of one image, and the next ones.

    Attributes:
        label: the most probable class.
        probability: its softmax probability, in [0, 1]; with the temperature that the checkpoint
            stores.
        top: (label, probability) of the most probable classes, best first.
        image: the image's path or address, or its number in the list.
    """

    label: str
    probability: float
    top: tuple[tuple[str, float], ...]
    image: str = ""

    def _repr_html_(self) -> str:
        """Return the most probable classes with a bar each, for a notebook."""
        return html_bars(self.top)


class Predictor:
    """A classifier of images, with the preprocessing of its checkpoint.

    Args:
        forward: preprocessed images (B, C, H, W) float32 -> logits (B, K), on `device`; or the path
            of an exported model (`vitkit.export`), which has all but the batch size inside and
            runs on the CPU.
        preprocess: the evaluation transform, such as `checkpoint.preprocess`; required for a
            function.
        classes: the K names; empty means numbers.
        device: the device of the images that `forward` receives.
        batch_size: images per batch.
        temperature: divides the logits before the softmax; default 1.
        trust_code: open an exported model of torch (`.pt2`), which can run code that is in it.

    Attributes:
        forward: the engine itself, as given; one that returns something else than (B, K) raises
            `UserCodeError` in a call.

    Raises:
        CheckpointError: a path of a file that is not an exported model.
        SettingError: no function, no preprocessing, a batch size below 1, or a temperature that is
            not positive.
    """

    def __init__(
        self,
        forward: Callable[[Tensor], Tensor] | str | PathLike[str],
        preprocess: spec.Preprocess | None = None,
        classes: Sequence[str] = (),
        *,
        device: torch.device | str = "cpu",
        batch_size: int = 64,
        temperature: float | None = None,
        trust_code: bool = False,
    ) -> None:
        given: Any = forward
        self._takes_pixels = False
        if isinstance(given, str | PathLike) and artefact.is_artefact(given):
            if preprocess is not None or classes or temperature is not None:
                raise SettingError(
                    f"Predictor({fspath(given)!r}): an exported model has its preprocessing, "
                    "classes and temperature inside; pass its path alone"
                )
            given = files.open_artefact(given, trust_code=trust_code)
            found = given.description
            preprocess, classes, temperature = found.preprocess, found.classes, found.temperature
            self._takes_pixels = found.with_preprocessing
        elif not callable(given):
            shown = "checkpoint"
            if isinstance(given, str | PathLike):
                shown = repr(fspath(given))
            raise SettingError(
                "Predictor takes a function from images to logits; write "
                f"vitkit.Predictor.from_checkpoint({shown})"
            )
        expected = "its preprocessing as the second argument, such as checkpoint.preprocess"
        check_type(preprocess, spec.Preprocess, "Predictor", expected)
        assert preprocess is not None, "checked above"
        if temperature is None:
            temperature = 1.0
        if not 0 < temperature < math.inf:
            raise SettingError(f"temperature {temperature:g} must be a positive number")
        if batch_size < 1:
            raise SettingError.about("batch_size", batch_size, "must be 1 or more")
        self.forward: Callable[[Tensor], Tensor] = given
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
        engine: str | EngineOptions = "auto",
        precision: str = "float32",
        device: str = "auto",
        batch_size: int = 64,
        calibrate: DataSource | None = None,
        **moved: object,
    ) -> Predictor:
        """Create a predictor for a checkpoint or its path.

        Args:
            checkpoint: a checkpoint or its path; its model stays where it is.
            engine: a name, as `vitkit predict --help` lists them; `auto` takes the fastest one
                here, by trials that are made once for a model and a machine, where the work is
                worth them: 1,000 images are expected. Or `EngineOptions`, which have these and
                further settings, such as `images=50_000`.
            precision: `float32`, `bfloat16` or `int8`; `auto` takes the fastest whose logits agree
                with those of float32.
            device: `cpu`, `cuda`, `mps`; auto picks the fastest available.
            batch_size: images per batch.
            calibrate: images with classes for int8, as for `train`; never those of its test split.
            **moved: none; a keyword that has left the package is answered with its place.

        Raises:
            CheckpointError: a file that is not a checkpoint, or a model without a head.
            DeviceError: a device that does not exist here.
            SettingError: an engine or a precision that does not exist, not together or not here; a
                batch size below 1; int8 without images to calibrate with.
            MissingExtraError: an engine that is not installed.
            DataError: images to calibrate with that cannot be opened, or too few of them.
        """
        options = EngineOptions.of(engine, precision=precision, calibrate=calibrate, **moved)
        checkpoint = as_checkpoint(checkpoint)
        if checkpoint.model.spec.num_classes == 0:
            raise CheckpointError(
                f"{checkpoint.path or 'this model'} has no head and predicts no classes; vitkit "
                "embed writes its features, and vitkit train --pretrained trains a head"
            )
        forward = engine_of(checkpoint, options, device=device)
        return cls(
            forward,
            checkpoint.preprocess,
            checkpoint.classes,
            device=forward.device,
            batch_size=batch_size,
            temperature=checkpoint.temperature,
        )

    def __call__(self, images: Images, top_k: int = 5) -> list[Prediction]:
        """Predict images, in order.

        Args:
            images: paths, http(s) addresses, bytes, PIL images or uint8 arrays, in any mixture; or
                the result of `vitkit.find_images`; or one path of a file or a folder, a pattern
                such as `photos/**/*.png`, or an address.
            top_k: number of classes in `top`; at most K.

        Raises:
            ImageError: an image that cannot be used, by name or number.
            CheckpointError: outputs that are NaN or infinite, with the first image of a batch.
            DataError: a path, a folder or a pattern with no images.
            SettingError: top_k below 1; one array, PIL image or file's bytes instead of a list; or
                another number of classes than of logits.
        """
        predictions = []
        for prediction in self.stream(images, top_k):
            if isinstance(prediction, ImageError):
                raise prediction
            predictions.append(prediction)
        return predictions

    def stream(self, images: Images, top_k: int = 5) -> Iterator[Prediction | ImageError]:
        """Yield the prediction of each image as soon as its batch is done, in order.

        Memory does not grow with the number of images. Files, addresses and bytes are read in
        threads while the model runs.

        Args:
            images: as for a call; an iterator is read two batches ahead.
            top_k: number of classes in `top`; at most K.

        Yields:
            A `Prediction`, or the `ImageError` of an image that cannot be used.

        Raises:
            CheckpointError: outputs that are NaN or infinite, with the first image of a batch.
            SettingError: top_k below 1, one image where a list is expected, or another number of
                classes than of logits.
        """
        if top_k < 1:
            raise SettingError.about("top_k", top_k, "must be 1 or more")
        for logits, results in self._batches(images):
            if self.classes and len(self.classes) != logits.shape[1]:
                raise SettingError(
                    f"{messages.plural(len(self.classes), 'class')} given, but the model returns "
                    f"{logits.shape[1]} logits; name one class for each"
                )
            # by the logits, as several probabilities may be rounded to 0
            classes = _largest(logits, top_k)
            probabilities = (logits / self.temperature).softmax(1).gather(1, classes)
            top = zip(probabilities.tolist(), classes.tolist(), strict=True)
            for result in results:
                if isinstance(result, ImageError):
                    yield result
                else:
                    yield self._prediction(result, *next(top))

    def outputs(self, images: Images) -> Iterator[Float[Tensor, " K"] | ImageError]:
        """Yield the output of `forward` for each image (K,), float32 on the CPU.

        Order and memory as for `stream`.

        Args:
            images: as for a call.

        Yields:
            The output, or the `ImageError` of an image that cannot be used.
        """
        for batch, results in self._batches(images):
            rows = iter(batch)
            for result in results:
                yield result if isinstance(result, ImageError) else next(rows)

    def logits(self, images: Images) -> Float[Tensor, "N K"]:
        """Return the logits of every image, in order: (N, K) float32 on the CPU.

        Args:
            images: as for a call.

        Raises:
            ImageError, DataError, SettingError: as for a call.
        """
        batches = []
        for rows, results in self._batches(images):
            for result in results:
                if isinstance(result, ImageError):
                    raise result
            # without failures, the rows of a batch correspond to its images
            batches.append(rows)
        if not batches:  # the engine knows the number of columns
            shape = (*self.preprocess.image_size, self.preprocess.channels)
            return self._outputs([np.zeros(shape, np.uint8)])[:0]
        return torch.cat(batches)

    def _prediction(self, image: str, values: list[float], classes: list[int]) -> Prediction:
        names = [self.classes[c] if self.classes else str(c) for c in classes]
        top = tuple(zip(names, values, strict=True))
        return Prediction(*top[0], top, image)

    def _batches(
        self, images: Images
    ) -> Iterator[tuple[Float[Tensor, "B K"], list[str | ImageError]]]:
        """Yield the outputs of each batch, and the name or the error of each of its images."""
        images = as_list(images)
        # decoders and resizing release the interpreter lock, so threads are enough
        pool = ThreadPoolExecutor(min(MAX_DECODER_THREADS, process.available_cores()))
        waiting: deque[list[tuple[str, Future[ResizedImage | ImageError]]]] = deque()
        try:
            numbered = enumerate(images)
            for chunk in iter(lambda: [*islice(numbered, self.batch_size)], []):
                waiting.append([self._submit(pool, *image) for image in chunk])
                if len(waiting) > 1:  # the next batch is decoded while the model runs
                    yield self._run(waiting.popleft())
            while waiting:
                yield self._run(waiting.popleft())
        finally:
            # also if the caller stops iterating; does not wait for a hanging server
            pool.shutdown(wait=False, cancel_futures=True)

    def _submit(
        self, pool: ThreadPoolExecutor, number: int, image: AnyImage
    ) -> tuple[str, Future[ResizedImage | ImageError]]:
        """Decode and resize an image: the caller's objects at once, files in a thread."""
        name = name_in_messages(image, number)
        if not isinstance(image, Image.Image | np.ndarray):
            return name, pool.submit(self._prepare, name, image)
        # a PIL image or an array may be changed by the caller before a thread reads it
        future: Future[ResizedImage | ImageError] = Future()
        future.set_result(self._prepare(name, image))
        return name, future

    def _prepare(self, name: str, image: AnyImage) -> ResizedImage | ImageError:
        try:
            pixels = read_any_image(image, name)
            if self._takes_pixels:
                return pixels
            return fit(pixels, self.preprocess)
        except ImageError as error:
            return error

    def _run(
        self, futures: Sequence[tuple[str, Future[ResizedImage | ImageError]]]
    ) -> tuple[Float[Tensor, "B K"], list[str | ImageError]]:
        """Run the images of a batch that could be decoded."""
        pixels: list[ResizedImage] = []
        results: list[str | ImageError] = []
        for name, future in futures:
            image = future.result()
            if isinstance(image, ImageError):
                results.append(image)
            else:
                results.append(name)
                pixels.append(image)
        # every image of the batch failed, so the model has nothing to run
        if not pixels:
            return torch.empty(0, max(len(self.classes), 1)), results
        outputs = self._outputs(pixels)
        _refuse_not_finite(outputs, [name for name in results if isinstance(name, str)])
        return outputs, results

    def _outputs(self, pixels: Sequence[ResizedImage]) -> Float[Tensor, "B K"]:
        """Return the outputs of prepared images: of one batch, or one by one in their own sizes."""
        if self._takes_pixels:
            batches = [exported_model.pixel_batch(image) for image in pixels]
        else:
            batches = [normalise(torch.from_numpy(np.stack(pixels)), self.preprocess)]
        found = []
        for images in batches:
            with torch.inference_mode():
                outputs = self.forward(images.to(self.device))
            shape = tuple(getattr(outputs, "shape", ()))
            if not isinstance(outputs, Tensor) or len(shape) != 2 or shape[0] != len(images):
                raise UserCodeError(
                    f"forward returned a {type(outputs).__name__} of shape {shape}; expected a "
                    f"tensor with a row for each of the {messages.plural(len(images), 'image')}, "
                    f"({len(images)}, K)"
                )
            found.append(outputs.float().cpu())
        return torch.cat(found)


def _refuse_not_finite(outputs: Float[Tensor, "B K"], names: Sequence[str]) -> None:
    """Raise `CheckpointError` for outputs that are NaN or infinite, with the first image's name."""
    wrong = (~finite_rows(outputs)).nonzero()[:, 0].tolist()
    if wrong:
        refuse_not_finite(len(wrong), len(names), names[wrong[0]])


def _largest(logits: Float[Tensor, "B K"], count: int) -> Int64[Tensor, "B k"]:
    """Return the indices of the largest logits; among equal ones the first, as `argmax` does."""
    values, classes = logits.topk(min(count + 1, logits.shape[1]))
    # `topk` breaks ties arbitrarily; sorting many classes takes far longer
    if (values[:, 1:] == values[:, :-1]).any():
        classes = logits.sort(dim=1, descending=True, stable=True).indices
    return classes[:, :count]


# Pooled features of images, the inputs of a classifier's head.


def feature_predictor(
    checkpoint: Checkpoint,
    *,
    device: str = "auto",
    batch_size: int = 64,
    options: EngineOptions | None = None,
) -> Predictor:
    """Create a predictor whose outputs are the pooled features, the inputs of the head: (D,).

    Args:
        checkpoint: a checkpoint; its head is not used.
        device: `cpu`, `cuda`, `mps`; auto picks the fastest available.
        batch_size: images per batch.
        options: the engine that runs the model; default `auto` in float32.

    Raises:
        DeviceError: a device that does not exist here.
        SettingError: a batch size below 1, or an engine that cannot be used.
        MissingExtraError: an engine that is not installed.
    """
    engine = engine_of(checkpoint, options or EngineOptions(), device=device, features=True)
    return Predictor(engine, checkpoint.preprocess, device=engine.device, batch_size=batch_size)


def embed(
    checkpoint: Checkpoint | str | Path,
    images: Images,
    *,
    device: str = "auto",
    batch_size: int = 64,
    engine: str | EngineOptions = "auto",
    precision: str = "float32",
    calibrate: DataSource | None = None,
    **moved: object,
) -> Float[np.ndarray, "N D"]:
    """Return the pooled features of images, the inputs of the head: (N, D) float32.

    Args:
        checkpoint: a checkpoint or its path.
        images: as for a call of `Predictor`.
        device: `cpu`, `cuda`, `mps`; auto picks the fastest available.
        batch_size: images per batch.
        engine: as for `Predictor.from_checkpoint`, and so are `precision` and `calibrate`.
        precision: precision of the computation.
        calibrate: images for int8.
        **moved: none; a keyword that has left the package is answered with its place.

    Raises:
        ImageError, DataError, CheckpointError, DeviceError, SettingError: the message names the
            wrong value.
    """
    options = EngineOptions.of(engine, precision=precision, calibrate=calibrate, **moved)
    images = as_list(images)
    if options.images is None and isinstance(images, Sized):
        options = replace(options, images=len(images))
    predictor = feature_predictor(
        as_checkpoint(checkpoint), device=device, batch_size=batch_size, options=options
    )
    return predictor.logits(images).numpy()
