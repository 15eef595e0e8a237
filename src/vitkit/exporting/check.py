"""The check of an export: its logits and its accuracy beside the checkpoint's.

The file is run once in a child process, which a runtime may crash. Labelled images are evaluated
here after that.
"""

import timeit
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, UInt8
from torch import Tensor

from vitkit import errors, messages, process
from vitkit.data.datasets.split import Split
from vitkit.data.images.preprocess import preprocess_images
from vitkit.engines.choose import logit_error, sample_images
from vitkit.evaluation import loop, metrics
from vitkit.exporting import exported_model, files
from vitkit.exporting.artefact import ArtefactDescription
from vitkit.weights.checkpoint import Checkpoint

Image = UInt8[np.ndarray, "H W 3"]
NOT_WRITTEN = "nothing is written"
BATCH_SIZE = 16
SAMPLES = 8
"""Images of the user's that the child process runs, each in a batch with its mirror image."""
SECONDS = 600.0
"""Seconds that it may take; the largest models take some 30 s to open."""
RUNS = 5
"""Runs of one image that are timed; the fastest counts, as other work only adds to a run."""
LOGIT_BOUNDS = {"float32": 1e-3, "float16": 2e-2, "bfloat16": 1e-1}
"""Precision -> the largest relative error of logits, whose cause is rounding."""
PREPROCESSING_BOUND = 2e-2
"""The bound with preprocessing inside: single pixels differ by 1 of 255."""
INT8_BOUNDS = {False: 0.3, True: 0.5}
"""The bounds for int8 without labelled images, and with: then accuracy decides."""
SAMPLE_SIZES = ((240, 320), (320, 240), (224, 224), (375, 500))
"""Heights and widths of the images that are generated where the user names no data."""


def check_export(
    checkpoint: Checkpoint, path: Path, description: ArtefactDescription, images: Split | None
) -> dict[str, Any]:
    """Run an exported model beside torch; return the figures of the comparison, by name.

    Args:
        checkpoint: its model runs in float32 on the CPU.
        path: path of the exported model.
        description: description of it.
        images: labelled images, as the checkpoint numbers the classes; None: generated ones.

    Raises:
        CheckpointError: the exported model cannot be run, or torch's own logits are not finite.
    """
    if images is None:
        sample = generated_images()
    else:
        chosen = np.linspace(0, len(images) - 1, min(SAMPLES, len(images))).astype(int)
        sample = [_colour(images.read(index)) for index in chosen.tolist()]
    pairs = [[image, np.ascontiguousarray(image[:, ::-1])] for image in sample]

    def prepared(raw: list[Image]) -> Tensor:
        return preprocess_images(raw, checkpoint.preprocess)

    batches = [prepared(pair).numpy() for pair in pairs]

    def run_torch() -> None:
        first = torch.from_numpy(batches[0][:1])
        checkpoint.model(prepared(sample[:1]) if description.with_preprocessing else first)

    given = [np.stack(pair) for pair in pairs] if description.with_preprocessing else batches
    try:
        found, int8_layers, seconds = process.run_in_child(run_alone, path, given, seconds=SECONDS)
    except process.ChildError as error:
        raise files.RuntimeFailure(f"{path}: in a process of its own: {error}") from None
    with torch.inference_mode():
        expected = torch.cat([checkpoint.model(torch.from_numpy(batch)) for batch in batches])
        by_torch = timeit.repeat(run_torch, number=1, repeat=RUNS)
    figures = compare_logits(torch.from_numpy(found), expected)
    if images is not None and not figures["not_finite"]:
        figures = _on_labelled_images(checkpoint, path, images)
    return figures | {
        "latency": {"exported_ms": 1000 * seconds, "torch_ms": 1000 * min(by_torch)},
        "int8_layers": int8_layers,
    }


def run_alone(path: Path, batches: list[np.ndarray]) -> tuple[np.ndarray, int, float]:
    """Return the logits of batches, the layers in int8, and the seconds of an image.

    It runs in a child process.

    Args:
        path: path of the exported model.
        batches: as the model takes them.
    """
    artefact = files.open_artefact(path, trust_code=True)
    logits = [artefact(torch.from_numpy(batch)).numpy() for batch in batches]
    image = torch.from_numpy(batches[0][:1])
    seconds = min(timeit.repeat(lambda: artefact(image), number=1, repeat=RUNS))
    return np.concatenate(logits), artefact.int8_layers, seconds


def _on_labelled_images(checkpoint: Checkpoint, path: Path, images: Split) -> dict[str, Any]:
    """Return the figures of all images, with the scores of both as `vitkit eval` counts them."""
    model, preprocess = checkpoint.model, checkpoint.preprocess
    expected, labels = _all(loop.predict_batches(model, images, preprocess, batch_size=BATCH_SIZE))
    artefact = files.open_artefact(path, trust_code=True)
    found, _ = _all(exported_model.artefact_predictions(artefact, images, BATCH_SIZE))
    figures = compare_logits(found, expected)
    if not figures["not_finite"]:
        for name, logits in (("torch", expected), ("exported", found)):
            scores, _ = loop.evaluate_outputs(
                [(logits, labels)], model.spec.num_classes, checkpoint.temperature
            )
            figures[name] = {key: float(scores[key]) for key in ("top1", "loss", "ece")}
    return figures


def _all(batches: Iterable[loop.LabelledLogits]) -> tuple[Tensor, Tensor]:
    """Return the logits (N, K) and the class numbers (N,) of all batches."""
    logits, labels = zip(*batches, strict=True)
    return torch.cat(logits), torch.cat(labels)


def compare_logits(found: Float[Tensor, "N K"], expected: Float[Tensor, "N K"]) -> dict[str, Any]:
    """Return the figures of logits (N, K) beside those of torch (N, K).

    Raises:
        CheckpointError: torch's own logits are not finite.
    """
    metrics.refuse_not_finite(int((~metrics.finite_rows(expected)).sum()), len(expected))
    return {
        "images": len(expected),
        "not_finite": int((~metrics.finite_rows(found)).sum()),
        "largest_logit_difference": float((found - expected).abs().max()),
        "relative_logit_error": logit_error(found, expected),
        "agreement": float((found.argmax(1) == expected.argmax(1)).double().mean()),
    }


def refuse_worse(
    figures: dict[str, Any], description: ArtefactDescription, layers: int, max_drop: float
) -> None:
    """Refuse an exported model by its figures.

    Args:
        figures: those of `check_export`.
        description: description of the exported model.
        layers: linear layers of the blocks, which int8 quantises.
        max_drop: points of a hundred that top-1 may fall.

    Raises:
        CheckpointError: NaN, accuracy below the bound, logits that differ by more than rounding, or
            int8 that the runtime executes in float32.
    """
    count = messages.plural(figures["images"], "image")
    bound = LOGIT_BOUNDS[description.precision]
    if description.with_preprocessing:
        bound = max(bound, PREPROCESSING_BOUND)
    if description.int8:
        bound = INT8_BOUNDS["torch" in figures]
    before, after = (figures.get(name, {}).get("top1", 0.0) for name in ("torch", "exported"))
    error, executed = figures["relative_logit_error"], figures["int8_layers"]
    reasons = {
        f"it gives NaN or infinity for {figures['not_finite']:,} of {count}": figures["not_finite"],
        f"top-1 falls from {before:.2%} to {after:.2%} on {count}, by "
        f"{100 * (before - after):.2f} points (bound {max_drop:g}); raise --max-drop (max_drop=) "
        "to accept it": 100 * (before - after) > max_drop + 1e-9,
        f"its logits differ from torch's by {error:.2g} of their spread (bound {bound:g}); it "
        f"agrees on the class of {figures['agreement']:.1%} of {count}": not error <= bound,
        f"the runtime executes {executed} of {layers} linear layers of the blocks in int8, the "
        "others in float32; export without --int8": description.int8 and executed < layers,
    }
    for reason, wrong in reasons.items():
        if wrong:
            raise errors.CheckpointError(f"export refused, {NOT_WRITTEN}: {reason}")


def generated_images() -> list[Image]:
    """Return smooth noise in several sizes and colours, the same in every call."""
    images: list[Image] = []
    for seed, size in enumerate(SAMPLE_SIZES):
        noise = sample_images(SAMPLES, 3, size, seed).permute(0, 2, 3, 1).numpy()
        levels = np.random.default_rng(seed).uniform(64, 192, (SAMPLES, 1, 1, 3))
        images += [*np.clip(noise * 48 + levels, 0, 255).astype(np.uint8)]
    return images


def _colour(pixels: UInt8[np.ndarray, "H W C"]) -> Image:
    """Return an image with three channels, as an exported model takes pixels."""
    if pixels.shape[2] == 1:
        return np.repeat(pixels, 3, axis=2)
    return pixels
