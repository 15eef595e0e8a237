"""Exported models: opened, run, and evaluated as checkpoints are."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from os import PathLike, fspath
from pathlib import Path

import numpy as np
import torch
from jaxtyping import UInt8
from torch import Tensor

from vitkit.data.datasets.split import Split
from vitkit.data.images.preprocess import fit, normalise
from vitkit.data.sources.open import DataSource
from vitkit.engines.choose import EngineOptions
from vitkit.errors import CheckpointError, SettingError, check_type
from vitkit.evaluation.evaluate import EvaluationChoice, evaluate_checkpoint, evaluate_predictions
from vitkit.evaluation.loop import LabelledLogits, Metric, predict_batches
from vitkit.evaluation.result import Evaluation
from vitkit.exporting.artefact import (
    ENDINGS,
    ArtefactDescription,
    Session,
    engine_refused,
    is_artefact,
    open_torch,
    read_torch_description,
    refuse_needless_trust,
    refuse_untrusted,
)
from vitkit.exporting.onnx_file import open_onnx, read_onnx_description
from vitkit.exporting.openvino_file import open_openvino, read_openvino_description
from vitkit.spec import Preprocess
from vitkit.weights.checkpoint import Checkpoint

# Open an exported model of any format: checked first, then by its runtime.


@dataclass(frozen=True)
class Artefact:
    """An exported model that is open.

    Attributes:
        path: path of the file.
        description: its preprocessing, class names and temperature.
        session: runs it.
    """

    path: Path
    description: ArtefactDescription
    session: Session


def read_artefact_description(path: Path) -> ArtefactDescription:
    """Read the description of an exported model; nothing of it is run.

    Raises:
        CheckpointError: missing, damaged, hostile, of a newer version, or without a description.
        MissingExtraError: a library that reads the format is not installed.
    """
    readers = {
        ".onnx": read_onnx_description,
        ".xml": read_openvino_description,
        ".pt2": read_torch_description,
    }
    ending = path.suffix.lower()
    if ending not in readers:
        raise CheckpointError(f"{path}: expected a name that ends in {', '.join(readers)}")
    if not path.is_file():
        raise CheckpointError(f"{path}: there is no such file")
    description = ArtefactDescription.from_text(readers[ending](path), path)
    if ENDINGS[description.format] != ending:
        raise CheckpointError(
            f"{path}: its description is of the format {description.format}, whose names end in "
            f"{ENDINGS[description.format]}"
        )
    return description


def open_artefact(path: str | PathLike[str], *, trust_code: bool = False) -> Artefact:
    """Open an exported model on the CPU.

    Args:
        path: as `vitkit export` has written it.
        trust_code: open a `.pt2` file, which can run code that is in it.

    Raises:
        CheckpointError: as for `read_artefact_description`; a `.pt2` file without `trust_code`; a
            runtime that cannot open it.
        DeviceError: the CPU lacks the instructions of its precision.
        MissingExtraError: the runtime is not installed.
    """
    path = Path(fspath(path))
    description = read_artefact_description(path)
    if description.format == "onnx":
        session = open_onnx(path)
    elif description.format == "openvino":
        session = open_openvino(path, description.precision)
    else:
        refuse_untrusted(path, trust_code=trust_code)
        session = open_torch(path, description.format)
    return Artefact(path, description, session)


# The parts of a predictor: from a caller's function, or from an exported model alone.


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
            return [_pixel_batch(image) for image in images]
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


def _pixel_batch(image: UInt8[np.ndarray, "H W channels"]) -> UInt8[Tensor, "1 H W 3"]:
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


def evaluate(
    checkpoint: Checkpoint | str | Path,
    data: DataSource,
    *,
    split: str | None = None,
    data_root: str | Path | None = None,
    cache: str | Path | None = None,
    device: str = "auto",
    batch_size: int = 256,
    workers: int = 0,
    metrics: Sequence[str | Metric] = (),
    relabel: str | Path | None = None,
    engine: str | EngineOptions = "torch",
    precision: str = "float32",
    calibrate: DataSource | None = None,
    trust_code: bool = False,
    **moved: object,
) -> Evaluation:
    """Evaluate a checkpoint, or an exported model, on a split of a dataset.

    Args:
        checkpoint: a checkpoint or its path, or the path of an exported model.
        data: as for `train`, split as for the checkpoint's training; classes are matched by name.
            Of an object without splits all images are evaluated, unless it is the training data.
        split: `train`, `val` or `test`; default `test`, else `val`.
        data_root: the folder of named datasets.
        cache: folder of decoded images, made if missing, as for `train`; `auto`: the user's own.
        device: `cpu`, `cuda`, `mps`; auto picks the fastest available.
        batch_size: images per batch.
        workers: loader processes.
        metrics: functions of logits (N, K) float32 and class numbers (N,) that return a number,
            or their names as `package.module:function`.
        relabel: a CSV file of corrected labels, as for `train`.
        engine: as for `Predictor.from_checkpoint`; default the model's own forward pass.
        precision: `float32`, `bfloat16`, `int8` or `auto`.
        calibrate: images for int8.
        trust_code: open an exported `.pt2` model, which can run code that is in it.
        **moved: none; a keyword that has left the package is answered with its place.

    Returns:
        The scores, which `evaluate_outputs` explains. Beside them `.split_name`, `.per_class`,
        `.without_images`, `.confusion` (K, K) and `.rows()`, a row per image.

    Raises:
        CheckpointError, DataError, DeviceError, ImageError, MissingExtraError, SettingError,
            UserCodeError: the message names the wrong value, image or metric.
    """
    own = {"precision": precision, "calibrate": calibrate, "data_root": data_root}
    options = EngineOptions.of(engine, **own, **moved)
    choice = EvaluationChoice(split, data_root, cache, batch_size, workers, metrics, relabel)
    refuse_needless_trust(checkpoint, trust_code=trust_code)
    if not isinstance(checkpoint, str | PathLike) or not is_artefact(checkpoint):
        return evaluate_checkpoint(checkpoint, data, choice, device, options)
    chosen = (options.engine, options.precision, options.calibrate)
    if chosen != ("torch", "float32", None) or device not in ("auto", "cpu"):
        raise engine_refused(checkpoint)
    artefact = open_artefact(checkpoint, trust_code=trust_code)
    predict = _ArtefactPredictions(artefact, choice)
    return evaluate_predictions(artefact.description, data, choice, predict)


class _ArtefactPredictions:
    """A function from labelled images to an exported model's logits, batch by batch."""

    def __init__(self, artefact: Artefact, choice: EvaluationChoice) -> None:
        self._artefact = artefact
        self._choice = choice
        self._run = SessionForward(artefact.session)

    def __call__(self, images: Split) -> Iterator[LabelledLogits]:
        """Yield logits (B, K) float32 and class numbers (B,).

        Raises:
            CheckpointError: the model fails, or gives another number of logits.
        """
        description = self._artefact.description
        if description.with_preprocessing:
            for index, label in enumerate(images.labels):  # images of other sizes make no batch
                logits = self._logits(_pixel_batch(images.read(index)))
                yield logits, torch.from_numpy(np.array([label]))
            return
        yield from predict_batches(
            self._logits,
            images,
            description.preprocess,
            batch_size=self._choice.batch_size,
            workers=self._choice.workers,
        )

    def _logits(self, images: Tensor) -> Tensor:
        logits = self._run(images)
        count = self._artefact.description.num_classes
        if logits.shape != (len(images), count):
            raise CheckpointError(
                f"{self._artefact.path}: returns {tuple(logits.shape)} for {len(images)} images; "
                f"expected {count} logits per image; export the checkpoint again"
            )
        return logits
