"""The check of an export: logits, accuracy and speed compared with the checkpoint's."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from vitkit.data.images.preprocess import preprocess_images
from vitkit.errors import CheckpointError
from vitkit.evaluation.loop import evaluate_outputs
from vitkit.evaluation.metrics import finite_rows, refuse_not_finite
from vitkit.exporting.artefact import ArtefactDescription
from vitkit.exporting.check_images import GateImages
from vitkit.exporting.fresh_process import FreshProcess
from vitkit.messages import plural
from vitkit.weights.checkpoint import Checkpoint

Run = Callable[[np.ndarray], list[np.ndarray]]
"""A batch of images, as an exported model takes them -> its outputs, of which logits are last."""
NOT_WRITTEN = "nothing is written"
BATCH_SIZE = 16
CLASS_IMAGES = 50
"""Least images of a class for which its accuracy is bounded."""
CLASS_MISTAKES = 1
"""Images of a class whose loss is always tolerated: one of 50 is 2 points."""
LOGIT_BOUNDS = {"float32": 1e-3, "float16": 2e-2, "bfloat16": 1e-1}
"""Precision -> the largest relative error of logits, whose cause is rounding."""
PREPROCESSING_BOUND = 2e-2
"""The bounds with preprocessing inside: single pixels differ by 1 of 255."""
LABELLED_INT8_BOUND = 0.5
"""The bound for int8 if accuracy is checked, too: a weak model may be right by chance."""
INT8_BOUND = 0.3
"""The bound for int8 without labelled images."""
FEWEST_FOR_ONE_CLASS = 8
"""Least images for which a model that gives all of them one class is refused."""


@dataclass(frozen=True)
class GateBounds:
    """How much worse an exported model may be.

    Attributes:
        max_drop: of top-1, in points of a hundred; in a class of `CLASS_IMAGES` or more twice as
            much, and `CLASS_MISTAKES` images.
        allow_slower: True if it may be slower than the bound.
    """

    max_drop: float = 0.5
    allow_slower: bool = False

    def to_json(self) -> dict[str, Any]:
        """Return the fields and the derived numbers of a class, as in `OUT.json`."""
        return {
            **vars(self),
            "max_drop_in_class": 2 * self.max_drop,
            "images_lost_in_class": CLASS_MISTAKES,
            "images_of_class": CLASS_IMAGES,
        }


@dataclass(frozen=True)
class ClassAccuracies:
    """The accuracy on the images of one class, by torch and by the exported model.

    Attributes:
        name: name of the class.
        images: how many there are.
        torch: share that is right by torch, in [0, 1].
        exported: the same by the exported model.
    """

    name: str
    images: int
    torch: float
    exported: float

    @property
    def drop(self) -> float:
        """How much worse the exported model is, in percentage points."""
        return 100 * (self.torch - self.exported)

    @property
    def lost(self) -> int:
        """How many more images torch classifies correctly than the exported model."""
        return round(self.images * (self.torch - self.exported))


@dataclass(frozen=True)
class LogitPairs:
    """Logits of the same images by torch and by the exported model, each (N, K) float32."""

    torch: Tensor
    exported: Tensor

    @property
    def relative_error(self) -> float:
        """The error's root mean square, over that of torch's logits around each image's mean."""
        centred = self.torch
        if self.torch.shape[1] > 1:  # a single logit has no spread
            centred = self.torch - self.torch.mean(1, keepdim=True)
        scale = max(_root_mean_square(centred), 1e-6)
        return _root_mean_square(self.exported - self.torch) / scale


def _root_mean_square(values: Tensor) -> float:
    return float(values.double().square().mean().sqrt())


def paired_logits(
    checkpoint: Checkpoint,
    images: GateImages,
    process: FreshProcess,
    description: ArtefactDescription,
) -> LogitPairs:
    """Return the logits of all images, by torch as `vitkit eval` computes them, and exported.

    Args:
        checkpoint: its model runs in float32 on the CPU.
        images: N of them.
        process: the exported model in a process of its own.
        description: description of the exported model.

    Raises:
        CheckpointError: the exported model cannot be run, or gives another shape.
    """
    by_torch, exported = [], []
    for start in range(0, len(images), BATCH_SIZE):
        stop = min(start + BATCH_SIZE, len(images))
        raw = [images.read(index) for index in range(start, stop)]
        inputs = preprocess_images(raw, checkpoint.preprocess)
        by_torch.append(_torch_logits(checkpoint, inputs))
        if description.with_preprocessing:
            # images of different sizes make no batch
            rows = [_checked_run(process.run, pixels[None], description) for pixels in raw]
            exported.append(np.concatenate(rows))
        else:
            exported.append(_checked_run(process.run, inputs.numpy(), description))
    return LogitPairs(torch.cat(by_torch), torch.from_numpy(np.concatenate(exported)))


def artefact_inputs(images: list[np.ndarray], description: ArtefactDescription) -> np.ndarray:
    """Return decoded images as an exported model takes them; of one size where it takes pixels."""
    if description.with_preprocessing:
        return np.stack(images)
    return preprocess_images(images, description.preprocess).numpy()


def _torch_logits(checkpoint: Checkpoint, inputs: Tensor) -> Tensor:
    """Return the model's logits (B, K) float32."""
    with torch.inference_mode():
        logits: Tensor = checkpoint.model(inputs).float()
    return logits


def _checked_run(
    run: Run, inputs: np.ndarray, description: ArtefactDescription
) -> Float[np.ndarray, "B K"]:
    """Return the logits of a batch; with preprocessing the probabilities must be theirs."""
    outputs = run(inputs)
    logits = outputs[-1].astype(np.float32)
    if logits.shape != (len(inputs), description.num_classes):
        raise CheckpointError(
            f"the exported model returns {logits.shape} for {plural(len(inputs), 'image')}; "
            f"expected {description.num_classes} logits per image"
        )
    if description.with_preprocessing:
        wanted = torch.from_numpy(logits / description.temperature).softmax(1).numpy()
        # NaN is reported by the gate
        near = np.abs(outputs[0] - wanted).max() <= 1e-3  # False for NaN
        if np.isfinite(logits).all() and not near:
            raise CheckpointError(
                "the exported model's probabilities are not the softmax of its logits with "
                f"temperature {description.temperature:g}"
            )
    return logits


def compare_outputs(
    pairs: LogitPairs, images: GateImages, description: ArtefactDescription
) -> dict[str, Any]:
    """Return the figures of a comparison, by name.

    Args:
        pairs: the logits.
        images: with labels, if accuracy is to be compared.
        description: description of the exported model.

    Raises:
        CheckpointError: torch's own logits are not finite.
    """
    refuse_not_finite(int((~finite_rows(pairs.torch)).sum()), len(images))
    finite = finite_rows(pairs.exported)
    figures: dict[str, Any] = {
        "data": images.data,
        "split": images.split,
        "images": len(images),
        "not_finite": int((~finite).sum()),
    }
    if not finite.all():
        return figures
    predicted = pairs.exported.argmax(1)
    expected = pairs.torch.argmax(1)
    figures |= {
        "largest_logit_difference": float((pairs.exported - pairs.torch).abs().max()),
        "relative_logit_error": pairs.relative_error,
        "agreement": float((predicted == expected).double().mean()),
        "classes_predicted": {
            "torch": len(expected.unique()),
            "exported": len(predicted.unique()),
        },
    }
    if images.labels is not None:
        figures |= _accuracy(pairs, images, description)
    return figures


def _accuracy(
    pairs: LogitPairs, images: GateImages, description: ArtefactDescription
) -> dict[str, Any]:
    """Return the scores of both, as `vitkit eval` counts them, and the accuracy in each class."""
    labels = torch.from_numpy(np.array(images.labels))
    scores: dict[str, Any] = {}
    for name, logits in (("torch", pairs.torch), ("exported", pairs.exported)):
        found, _ = evaluate_outputs(
            [(logits, labels)], description.num_classes, description.temperature
        )
        scores[name] = {key: float(found[key]) for key in ("top1", "loss", "ece")}
    by_torch = pairs.torch.argmax(1) == labels
    exported = pairs.exported.argmax(1) == labels
    classes = []
    for number in labels.unique().tolist():
        mine = labels == number
        name = description.classes[number] if description.classes else str(number)
        shares = (float(right[mine].double().mean()) for right in (by_torch, exported))
        classes.append(asdict(ClassAccuracies(name, int(mine.sum()), *shares)))
    return scores | {"per_class": classes}


def refuse_worse(
    figures: dict[str, Any], description: ArtefactDescription, bounds: GateBounds
) -> None:
    """Refuse an exported model by its figures.

    Raises:
        CheckpointError: NaN, one class for every image, accuracy below the bound, or logits that
            differ by more than rounding.
    """
    images = figures["images"]
    if figures["not_finite"]:
        raise _refused(
            f"it gives NaN or infinity for {figures['not_finite']:,} of {plural(images, 'image')}"
        )
    predicted = figures["classes_predicted"]
    one_class = predicted["exported"] == 1 < predicted["torch"]
    if one_class and images >= FEWEST_FOR_ONE_CLASS:
        raise _refused(
            f"it predicts the same class for all {images:,} images, where torch predicts "
            f"{predicted['torch']} classes"
        )
    if "torch" in figures:
        _refuse_drop(figures, bounds)
    bound = _logit_bound(description, "torch" in figures)
    error = figures["relative_logit_error"]
    if not error <= bound:  # NaN is refused, too
        raise _refused(
            f"its logits differ from torch's by {error:.2g} of their spread (bound {bound:g}); it "
            f"agrees on the class of {figures['agreement']:.1%} of {plural(images, 'image')}"
        )


def _refuse_drop(figures: dict[str, Any], bounds: GateBounds) -> None:
    """Refuse a drop of top-1, or of one class's accuracy, beyond the bounds.

    A class of 50 images or more fails where it loses more than twice `max_drop` points, and more
    than one image: one of 50 to 99 is more than one point, and may be chance.
    """
    before, after = figures["torch"]["top1"], figures["exported"]["top1"]
    drop = 100 * (before - after)
    advice = "raise --max-drop (max_drop=) to accept it"
    if drop > bounds.max_drop + 1e-9:
        raise _refused(
            f"top-1 falls from {before:.2%} to {after:.2%} on {figures['images']:,} images, by "
            f"{drop:.2f} points (bound {bounds.max_drop:g}); {advice}"
        )
    pairs = [ClassAccuracies(**entry) for entry in figures["per_class"]]
    large = [pair for pair in pairs if pair.images >= CLASS_IMAGES and pair.lost > CLASS_MISTAKES]
    worst = max(large, key=lambda pair: pair.drop, default=None)
    if worst is not None and worst.drop > 2 * bounds.max_drop + 1e-9:
        raise _refused(
            f"the accuracy of {worst.name!r} falls from {worst.torch:.2%} to {worst.exported:.2%} "
            f"on {worst.images:,} images, by {worst.drop:.2f} points and {worst.lost:,} images "
            f"(bound {2 * bounds.max_drop:g} points, or 1 image); {advice}"
        )


def _logit_bound(description: ArtefactDescription, labelled: bool) -> float:
    if description.int8:
        return LABELLED_INT8_BOUND if labelled else INT8_BOUND
    bound = LOGIT_BOUNDS[description.precision]
    return max(bound, PREPROCESSING_BOUND) if description.with_preprocessing else bound


def refuse_other_batches(run: Run, image: np.ndarray, description: ArtefactDescription) -> None:
    """Refuse a model whose logits depend on the other image in a batch.

    Args:
        run: runs the exported model.
        image: RGB (H, W, 3) uint8; the second one is its mirror image.
        description: description of the exported model.

    Raises:
        CheckpointError: it cannot run two images, or their logits differ.
    """
    both = [image, np.ascontiguousarray(image[:, ::-1])]
    inputs = artefact_inputs(both, description)
    together = _checked_run(run, inputs, description)
    alone = [_checked_run(run, inputs[number : number + 1], description) for number in (0, 1)]
    pairs = LogitPairs(torch.from_numpy(np.concatenate(alone)), torch.from_numpy(together))
    if not pairs.relative_error <= _logit_bound(description, labelled=True):
        raise _refused("two images in one batch do not get the logits that each of them gets alone")


def refuse_fake_int8(layers: dict[str, int], expected: int) -> None:
    """Refuse an int8 model that the runtime executes in float32.

    Args:
        layers: layers that are executed in int8, by type, read back from the runtime.
        expected: the linear layers of the blocks.

    Raises:
        CheckpointError: fewer layers than expected.
    """
    found = sum(layers.values())
    if found < expected:
        raise _refused(
            f"the runtime executes {found} of {expected} linear layers of the blocks in int8, the "
            "others in float32; export without --int8"
        )


def _refused(reason: str) -> CheckpointError:
    return CheckpointError(f"export refused, {NOT_WRITTEN}: {reason}")


# The latency of an exported model beside that of its baseline, measured in turns.

ROUNDS = 7
RUNS = 3
"""Runs of a batch in each round; the fastest of all counts, as other work only adds to a run."""
SLOWEST = {"torch": 1.5, "float32": 1.05}
"""Baseline -> how many times as long the exported model may take."""


def measure_latency(
    checkpoint: Checkpoint,
    image: np.ndarray,
    process: FreshProcess,
    description: ArtefactDescription,
    baseline: FreshProcess | None,
) -> dict[str, Any]:
    """Return the latency of one image by the exported model and by its baseline.

    Both run in turns, so that other work on the machine meets both; each one's fastest run counts.

    Args:
        checkpoint: checkpoint of the exported model.
        image: RGB (H, W, 3) uint8.
        process: runs the exported model.
        description: description of it.
        baseline: runs the same model in float32 by the same runtime; None: torch, from the decoded
            image on where the preprocessing is inside.
    """
    inputs = preprocess_images([image], checkpoint.preprocess)
    batch = artefact_inputs([image], description)

    def run_torch() -> None:
        prepared = inputs
        if description.with_preprocessing:
            prepared = preprocess_images([image], checkpoint.preprocess)
        _torch_logits(checkpoint, prepared)

    def by_baseline(times: int) -> Sequence[float]:
        return _seconds(run_torch, times) if baseline is None else baseline.seconds(batch, times)

    by_baseline(1)  # the first run prepares memory
    process.seconds(batch, 1)
    exported: list[float] = []
    reference: list[float] = []
    for _ in range(ROUNDS):
        exported += process.seconds(batch, RUNS)
        reference += by_baseline(RUNS)
    return {
        "batch_size": 1,
        "exported_ms": 1000 * min(exported),
        "baseline_ms": 1000 * min(reference),
        "baseline": "torch" if baseline is None else "float32",
        "ratio": min(exported) / min(reference),
    }


def _seconds(run: Callable[[], None], times: int) -> list[float]:
    seconds = []
    for _ in range(times):
        start = time.perf_counter()
        run()
        seconds.append(time.perf_counter() - start)
    return seconds


def refuse_slower(
    latency: dict[str, Any], description: ArtefactDescription, bounds: GateBounds
) -> None:
    """Refuse an exported model that is slower than its baseline allows.

    A float32 graph with preprocessing has no bound: its resize costs more than Pillow's, and takes
    the place of code outside.

    Raises:
        CheckpointError: it is slower than the bound.
    """
    bound = SLOWEST[latency["baseline"]]
    unbounded = description.with_preprocessing and latency["baseline"] == "torch"
    if bounds.allow_slower or unbounded or latency["ratio"] <= bound:
        return
    baselines = {"torch": "torch", "float32": "the same runtime in float32"}
    raise CheckpointError(
        f"export refused, {NOT_WRITTEN}: it takes {latency['exported_ms']:.2f} ms per image, "
        f"{latency['ratio']:.2f} times as long as {baselines[latency['baseline']]} "
        f"({latency['baseline_ms']:.2f} ms; bound {bound:g}); pass --allow-slower "
        "(allow_slower=True) to accept it"
    )
