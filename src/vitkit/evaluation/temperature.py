"""Temperature scaling: one number, fitted on validation, that calibrates the probabilities."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int64
from torch import Tensor
from torch.nn import functional as F

from vitkit.distributed import ProcessGroup
from vitkit.evaluation.predict import LabelledLogits

LOWEST_TEMPERATURE = 0.05
HIGHEST_TEMPERATURE = 20.0
"""Bounds of the temperatures that are tried."""
BISECTIONS = 40
"""Bisections of the interval between them, on a logarithmic scale."""
FEWEST_IMAGES = 100
"""Images that a temperature is fitted on at least.

With 60 linear heads on noisy digits, their strength chosen on the same images, a temperature that
passes `calibrate` raised the loss on test (by more than 0.005 nats) for 1 of 60 with 50 images and
for none with 100 or more; with 24 images fitted always, it did for 17 of 60, by up to 0.13."""
FOLDS = 5
"""Parts of the cross-validation."""


@dataclass(frozen=True)
class Calibration:
    """The result of fitting a temperature.

    Attributes:
        temperature: divides the logits; `None` to leave them as they are.
        message: one line: the temperature and its gain, or the reason why there is none.
    """

    temperature: float | None
    message: str


def calibrate(
    predictions: Iterable[LabelledLogits], world: ProcessGroup | None = None
) -> Calibration:
    """Fit a temperature on validation; use it only if cross-validation confirms the gain.

    There must be 100 images. Each of 5 parts of them is scored with the temperature that the other
    four give; where that lowers the mean loss by more than its standard error, the temperature of
    all images is the result.

    Args:
        predictions: logits (B, K) and class numbers (B,), batch by batch; of images that are not
            trained on.
        world: the processes that share the images; each must call, and each gets the same.
    """
    world = world or ProcessGroup()
    batches = _on_cpu(predictions)
    count = int(world.all_reduce_sum(torch.tensor(sum(len(labels) for _, labels in batches))))
    if count < FEWEST_IMAGES:
        return Calibration(
            None,
            f"temperature left at 1: fitting it needs {FEWEST_IMAGES} validation images, and "
            f"there are {count}",
        )
    temperature = fit_temperature(batches, world)
    if temperature is None:
        return Calibration(
            None,
            f"temperature left at 1: the validation loss has no minimum in "
            f"[{LOWEST_TEMPERATURE:g}, {HIGHEST_TEMPERATURE:g}]",
        )
    before, after, error = _cross_validate(batches, world)
    test = f"{FOLDS}-fold cross-validation on {count:,} images: loss {before:.4f} -> {after:.4f}"
    # the gain must exceed its own standard error
    if before - after <= error:
        return Calibration(None, f"temperature left at 1: no significant gain in {test}")
    return Calibration(
        temperature, f"temperature {temperature:.3f}, fitted on the validation split; {test}"
    )


def _on_cpu(predictions: Iterable[LabelledLogits]) -> list[LabelledLogits]:
    return [(logits.cpu(), labels.cpu()) for logits, labels in predictions]


def _cross_validate(
    batches: Sequence[LabelledLogits], world: ProcessGroup
) -> tuple[float, float, float]:
    """Return the mean loss without and with a temperature, and the difference's standard error."""
    folds = _fold_numbers(batches, world)
    sums = torch.zeros(4, dtype=torch.float64)
    for number in range(FOLDS):
        others = []
        for (logits, labels), fold in zip(batches, folds, strict=True):
            others.append((logits[fold != number], labels[fold != number]))
        temperature = fit_temperature(others, world) or 1.0  # no minimum: no scaling
        for (logits, labels), fold in zip(batches, folds, strict=True):
            held_out = logits[fold == number].double()
            targets = labels[fold == number]
            before = F.cross_entropy(held_out, targets, reduction="none")
            after = F.cross_entropy(held_out / temperature, targets, reduction="none")
            gain = before - after
            count = gain.new_tensor(len(gain))
            sums += torch.stack([before.sum(), gain.sum(), gain.square().sum(), count])
    loss, total_gain, squares, images = world.all_reduce_sum(sums).tolist()
    # rounding may make the difference of squares negative
    variance = max(0.0, squares / images - (total_gain / images) ** 2)
    return loss / images, (loss - total_gain) / images, math.sqrt(variance / images)


def _fold_numbers(
    batches: Sequence[LabelledLogits], world: ProcessGroup
) -> list[Int64[Tensor, "B"]]:
    """Return each image's part of the cross-validation, the same for any number of processes."""
    folds = []
    seen = 0
    for logits, _ in batches:
        # this process has the images rank, rank + size ... of the split
        index = world.rank + world.size * torch.arange(seen, seen + len(logits))
        folds.append(index % FOLDS)
        seen += len(logits)
    return folds


def fit_temperature(
    predictions: Iterable[LabelledLogits], world: ProcessGroup | None = None
) -> float | None:
    """Return the T whose softmax(z / T) has the least negative log-likelihood of the labels.

    Guo et al., "On Calibration of Modern Neural Networks" (arXiv 1706.04599), Sec. 4.2. In
    b = 1 / T the loss is convex, with the slope sum_i (E_softmax(b z_i)[z_i] - z_i,label), so
    bisection finds the minimum. The order of the classes does not change.

    Args:
        predictions: logits (B, K) and class numbers (B,), batch by batch; of images that are
            neither trained on nor tested with.
        world: the processes that share the images; each must call, and each gets the same.

    Returns:
        T in [0.05, 20]; `None` where the loss is least at a bound. That is so where every image
        is right: the loss then falls as T approaches 0, and the labels give no evidence for any
        confidence.
    """
    world = world or ProcessGroup()
    batches = _on_cpu(predictions)

    def slope(b: float) -> float:
        total = torch.zeros((), dtype=torch.float64)
        for single_precision, labels in batches:
            logits: Float[Tensor, "B K"] = single_precision.double()
            expected = ((b * logits).softmax(1) * logits).sum(1)
            total += (expected - logits.gather(1, labels[:, None])[:, 0]).sum()
        return float(world.all_reduce_sum(total))

    low = 1 / HIGHEST_TEMPERATURE
    high = 1 / LOWEST_TEMPERATURE
    # without a change of sign the minimum is at a bound
    if not slope(low) < 0 < slope(high):
        return None
    for _ in range(BISECTIONS):
        middle = math.sqrt(low * high)  # bisection on a logarithmic scale
        if slope(middle) < 0:
            low = middle
        else:
            high = middle
    return 1 / math.sqrt(low * high)
