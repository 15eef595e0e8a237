"""Explain images of any kind, and what a model has learned: `vitkit.explain`, `explain_model`."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vitkit import devices, errors, messages
from vitkit.explaining import files, measure, methods
from vitkit.explaining.explain import ImageExplainer
from vitkit.explaining.explanation import Explanation
from vitkit.explaining.faithfulness import FaithfulnessReport, check_measurable
from vitkit.explaining.model import ModelExplanation
from vitkit.prediction.find import Images, as_list
from vitkit.prediction.images import AnyImage, name_in_messages, read_any_image
from vitkit.prediction.predictor import Predictor
from vitkit.weights.checkpoint import Checkpoint
from vitkit.weights.load import as_checkpoint

if TYPE_CHECKING:
    from jaxtyping import Float
    from matplotlib.figure import Figure
    from torch import Tensor


def explain(
    checkpoint: Checkpoint | str | Path,
    image: AnyImage,
    *,
    method: str | None = None,
    class_name: str | int | None = None,
    layer: int | None = None,
    head: int | None = None,
    faithfulness: bool | None = None,
    device: str = "auto",
    **options: Any,
) -> Explanation:
    """Compute a heat map of what the model looks at in one image.

    Args:
        checkpoint: a checkpoint or its path.
        image: a path, an http(s) address, an encoded file's bytes, a PIL image, (H, W, 3) or (H, W)
            uint8 [0, 255], or an image of `find_images`.
        method: `libragrad`, `attention` or another of those that the guide to `vitkit explain`
            lists. Default: libragrad, the share of each patch in the class's logit; attention where
            a layer, a head or a query is chosen; rollout where the model has no head, with a note
            in the caption.
        class_name: the class to explain, by its name or its number from 0; default the predicted
            class. The map depends on it only where the method explains a class.
        layer: encoder block, from 0; negative ones count from the end. Default the method's own.
        head: one head; default their mean.
        faithfulness: measure that of the map, in hundreds of passes with some of the patches;
            default: only of models for which that takes about a second.
        device: `cpu`, `cuda`, `mps`; auto picks the fastest available.
        **options: further options of the method; None leaves one to the method.

    Returns:
        `.heatmap` (H, W) in [0, 1], `.grid` the method's own values, `.overlay()` a PIL image,
        `.plot()` a figure, `.save(path)`, `.faithfulness` of the map or None, and the class with
        its probability; no class where the model has no head.

    Raises:
        SettingError: a method, an option, a layer, a head or a class that does not exist.
        ImageError, CheckpointError, DeviceError: the message names the wrong value.
    """
    # before the weights are loaded
    options = {"layer": layer, "head": head, **options}
    options = methods.method_options(methods.choose_method(method, options)[0], options)
    return _explainer(checkpoint, image, device, class_name, faithfulness).explain(
        method, **options
    )


def faithfulness_report(
    checkpoint: Checkpoint | str | Path,
    images: Images,
    *,
    method: str | None = None,
    device: str = "auto",
    **options: Any,
) -> FaithfulnessReport:
    """Measure the faithfulness of a method's maps, as `vitkit explain --faithfulness` does.

    The maps are those of the predicted classes.

    Args:
        checkpoint: a checkpoint or its path.
        images: as for a call of `Predictor`; some tens, not trained on.
        method: as for `explain`; not one whose maps are colours.
        device: `cpu`, `cuda`, `mps`; auto picks the fastest available.
        **options: of the method; None leaves one to the method.

    Returns:
        `.lines` in words, `.as_json()` plain values, `.deletion` and `.insertion` the medians with
        their 95 % intervals, `.p`, `.verdict`, and `.scores`, a `Faithfulness` for each image.

    Raises:
        SettingError: a method or an option that does not exist, a model without a head, no images,
            or maps that are not finite.
        ImageError, DataError, CheckpointError, DeviceError: the message names the wrong value.
    """
    # before the weights are loaded
    chosen, _ = methods.choose_method(method, options)
    options = methods.method_options(chosen, options)
    checkpoint = as_checkpoint(checkpoint)
    check_measurable(checkpoint.model, chosen)
    checkpoint = replace(
        checkpoint, model=devices.on_device(checkpoint.model, devices.resolve_device(device))
    )
    scores = []
    for number, image in enumerate(as_list(images)):
        pixels = read_any_image(image, name_in_messages(image, number))
        explainer = ImageExplainer(checkpoint, pixels, faithfulness=True)
        found = explainer.explain(chosen.name, **options).faithfulness
        if found is None:
            raise errors.SettingError(
                f"maps of {chosen.name} are not finite (NaN or infinity); use the model in float32"
            )
        scores.append(found)
    if not scores:
        raise errors.SettingError(
            "faithfulness cannot be measured without images; expected 1 or more"
        )
    return FaithfulnessReport(chosen.name, options, tuple(scores))


def plot_attention_sheet(
    checkpoint: Checkpoint | str | Path, image: AnyImage, *, device: str = "auto"
) -> Figure:
    """Draw the attention map of every layer and head for one image, as rows and columns.

    Each map is that of `explain(method="attention", layer=..., head=...)`, over what the model sees
    of the image; it has its own colours, and its largest value stands below it.

    Args:
        checkpoint: as for `explain`.
        image: as for `explain`.
        device: `cpu`, `cuda`, `mps`; auto picks the fastest available.

    Returns:
        A matplotlib figure; `.savefig("heads.pdf")` writes it.

    Raises:
        ImageError, CheckpointError, DeviceError: the message names the wrong value.
    """
    return files.draw_attention_sheet(_explainer(checkpoint, image, device))


def _explainer(
    checkpoint: Checkpoint | str | Path,
    image: AnyImage,
    device: str,
    class_name: str | int | None = None,
    faithfulness: bool | None = None,
) -> ImageExplainer:
    """Return the explainer of an image, with the model on its device."""
    checkpoint = as_checkpoint(checkpoint)
    pixels = read_any_image(image)
    model = devices.on_device(checkpoint.model, devices.resolve_device(device))
    return ImageExplainer(replace(checkpoint, model=model), pixels, class_name, faithfulness)


# What a model has learned, by its weights and on images.

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
        if isinstance(measured, errors.ImageError):
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
        model_device = devices.resolve_device(device)
        self._measurement = measure.ModelMeasurement(
            devices.on_device(self.checkpoint.model, model_device)
        )
        preprocess = self.checkpoint.preprocess
        # A predictor reads, skips and batches the images; its "logits" are the largest norms.
        self._predictor = Predictor(
            self._measurement.add,
            preprocess,
            device=model_device,
            batch_size=self._measurement.batch_size(preprocess.image_size),
        )

    def add(self, images: Images) -> Iterator[Float[Tensor, " 1"] | errors.ImageError]:
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
        f"ViT with {messages.plural(spec.depth, 'block')} of width {spec.width}, "
        f"{messages.plural(spec.num_heads, 'head')}, patches of "
        f"{height} x {width} pixels"
    )
    path = checkpoint.path
    if path is None:
        return size
    # runs/NAME/weights/best.safetensors: every run has a file of this name.
    run = path.resolve().parents[1].name if path.parent.name == WEIGHTS else path.stem
    return f"{run}: {size}"
