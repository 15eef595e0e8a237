"""Measurement of a model: what it has learned, by its weights and on images."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from jaxtyping import Float
from torch import Tensor

from vitkit.devices import on_device, resolve_device
from vitkit.errors import ImageError
from vitkit.explaining.model import ModelExplanation, ModelMeasurement
from vitkit.messages import plural
from vitkit.prediction.find import Images
from vitkit.prediction.predictor import Predictor
from vitkit.weights.checkpoint import Checkpoint
from vitkit.weights.load import as_checkpoint

WEIGHTS = "weights"
"""The folder of a run that has its weights; the run's own name says more."""


def explain_model(
    checkpoint: Checkpoint | str | Path,
    images: Images = (),
    *,
    name: str = "",
    device: str = "auto",
) -> ModelExplanation:
    """Measure what a model has learned: filters, positions, and attention over depth.

    The figures of "An Image is Worth 16x16 Words" (arXiv 2010.11929), Fig. 7, with attention
    entropy and the similarity of tokens over depth, and the patch tokens of high norm.

    Args:
        checkpoint: a checkpoint or its path.
        images: as for a call of `Predictor`; some tens are enough. Without any, filters and
            positions alone are measured.
        name: name of the model in captions; default that of the run or the file, and its size.
        device: `cpu`, `cuda`, `mps`; auto picks the fastest available.

    Returns:
        `.filters`, `.positions`, `.depth` and `.artefacts` with the numbers; `.plot()` the sheet of
        all figures, `.plot("distance")` one of them; `.save(folder)` writes them.

    Raises:
        ImageError: an image that cannot be used.
        DataError, CheckpointError, DeviceError, SettingError: the message names the wrong value.
    """
    measurement = CheckpointMeasurement(checkpoint, device=device)
    for measured in measurement.add(images):
        if isinstance(measured, ImageError):
            raise measured
    return measurement.result(name)


class CheckpointMeasurement:
    """Measurement of a checkpoint on images that come one after the other.

    Args:
        checkpoint: a checkpoint or its path.
        device: `cpu`, `cuda`, `mps`; auto picks the fastest available.

    Raises:
        CheckpointError, DeviceError: the message names the wrong value.
    """

    def __init__(self, checkpoint: Checkpoint | str | Path, *, device: str = "auto") -> None:
        self.checkpoint = as_checkpoint(checkpoint)
        model_device = resolve_device(device)
        self._measurement = ModelMeasurement(on_device(self.checkpoint.model, model_device))
        preprocess = self.checkpoint.preprocess
        # A predictor reads, skips and batches the images; its "logits" are the largest norms.
        self._predictor = Predictor(
            self._measurement.add,
            preprocess,
            device=model_device,
            batch_size=self._measurement.batch_size(preprocess.image_size),
        )

    def add(self, images: Images) -> Iterator[Float[Tensor, " 1"] | ImageError]:
        """Measure images, a batch at a time; memory does not grow with their pixels.

        Args:
            images: as for a call of `Predictor`.

        Yields:
            The largest norm of a patch token (1,) of each image, or the `ImageError` of an image
            that cannot be used.
        """
        return self._predictor.outputs(images)

    def result(self, name: str = "") -> ModelExplanation:
        """Return the numbers, of the weights and of the images so far.

        Args:
            name: name of the model in captions; default that of the run or the file, and its size.
        """
        return self._measurement.result(name or _name_of(self.checkpoint))


def _name_of(checkpoint: Checkpoint) -> str:
    """Return the name of the run or file, and the size of the model."""
    spec = checkpoint.model.spec
    height, width = spec.patch_size
    size = (
        f"ViT with {plural(spec.depth, 'block')} of width {spec.width}, "
        f"{plural(spec.num_heads, 'head')}, patches of "
        f"{height} x {width} pixels"
    )
    path = checkpoint.path
    if path is None:
        return size
    # runs/NAME/weights/best.safetensors: every run has a file of this name.
    run = path.resolve().parents[1].name if path.parent.name == WEIGHTS else path.stem
    return f"{run}: {size}"
