"""Temperature scaling: one number that makes probabilities say how often they are right."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int64
from torch import Tensor
from torch.nn import functional as F

from vitkit.distributed import World

Output = tuple[Float[Tensor, "_ K"], Int64[Tensor, "_"]]
"""Of a batch: logits and class numbers."""
LOWEST, HIGHEST = 0.05, 20.0
"""Temperatures that are looked at."""
HALVINGS = 40
FEWEST, FOLDS = 100, 5
"""Images that a temperature is fitted on at least, and parts of the cross-validation.

With 60 linear heads on noisy digits, their strength chosen on the same images, a temperature that
passes `calibrate` raised the loss on test (by more than 0.005 nats) for 1 of 60 with 50 images and
for none with 100 or more; with 24 images fitted always, it did for 17 of 60, by up to 0.13."""


@dataclass(frozen=True)
class Calibration:
    """What came of looking for a temperature.

    Attributes:
        temperature: to divide logits by; `None` where they stay as they are.
        said: one line: the temperature and what it is worth, or why there is none.
    """

    temperature: float | None
    said: str


def calibrate(outputs: Iterable[Output], world: World | None = None) -> Calibration:
    """Fit a temperature on validation, and keep it only if cross-validation says that it helps.

    There must be 100 images. Each of 5 parts of them is scored with the temperature that the other
    four give; where that lowers the mean loss by more than its standard error, the temperature of
    all images is the answer.

    Args:
        outputs: logits and class numbers, batch by batch; of images that are not trained on.
        world: the processes that share the images; each must call, and each gets the same.
    """
    world = world or World()
    held = [(logits.cpu(), labels.cpu()) for logits, labels in outputs]
    count = int(world.summed(torch.tensor(sum(len(labels) for _, labels in held))))
    if count < FEWEST:
        return Calibration(None, f"temperature left at 1: fitting one needs {FEWEST} validation "
                                 f"images, and there are {count}")  # fmt: skip
    fitted = fit_temperature(held, world)
    if fitted is None:
        return Calibration(None, "temperature left at 1: the validation loss has no minimum in "
                                 f"[{LOWEST:g}, {HIGHEST:g}]")  # fmt: skip
    before, after, error = _cross_validated(held, world)
    said = f"{FOLDS}-fold cross-validation on {count:,} images: loss {before:.4f} -> {after:.4f}"
    if before - after <= error:
        return Calibration(None, f"temperature left at 1: no clear gain in {said}")
    return Calibration(fitted, f"temperature {fitted:.3f}, fitted on validation; {said}")


def _cross_validated(held: Sequence[Output], world: World) -> tuple[float, float, float]:
    """The mean loss without and with a temperature, and the standard error of the difference."""
    folds, seen = [], 0
    for logits, _ in held:  # this process has the images rank, rank + size ... of the split
        place = world.rank + world.size * torch.arange(seen, seen + len(logits))
        folds.append(place % FOLDS)
        seen += len(logits)
    sums = torch.zeros(4, dtype=torch.float64)
    for number in range(FOLDS):
        others = [(logits[fold != number], labels[fold != number])
                  for (logits, labels), fold in zip(held, folds, strict=True)]  # fmt: skip
        temperature = fit_temperature(others, world) or 1.0
        for (logits, labels), fold in zip(held, folds, strict=True):
            mine, truth = logits[fold == number].double(), labels[fold == number]
            before = F.cross_entropy(mine, truth, reduction="none")
            after = F.cross_entropy(mine / temperature, truth, reduction="none")
            gain = before - after
            sums += torch.stack([before.sum(), gain.sum(), gain.square().sum(),
                                 gain.new_tensor(len(gain))])  # fmt: skip
    loss, gain, squares, count = world.summed(sums).tolist()
    variance = max(0.0, squares / count - (gain / count) ** 2)
    return loss / count, (loss - gain) / count, math.sqrt(variance / count)


def fit_temperature(outputs: Iterable[Output], world: World | None = None) -> float | None:
    """The T whose softmax(z / T) has the least negative log-likelihood of the labels.

    Guo et al., "On Calibration of Modern Neural Networks" (arXiv 1706.04599), Sec. 4.2. In
    b = 1 / T the loss is convex, with the slope sum_i (E_softmax(b z_i)[z_i] - z_i,label), so that
    halving an interval finds the one place where it is level. Which class comes first does not
    change.

    Args:
        outputs: logits and class numbers, batch by batch; of images that are neither trained on
            nor tested with.
        world: the processes that share the images; each must call, and each gets the same.

    Returns:
        T in [0.05, 20]; `None` where the loss is least at a bound. That is so where every image
        is right: the loss then falls for ever as T does, and the labels do not say how sure one
        may be.
    """
    world = world or World()
    held = [(logits.cpu(), labels.cpu()) for logits, labels in outputs]

    def slope(b: float) -> float:
        total = torch.zeros((), dtype=torch.float64)
        for single, labels in held:
            logits = single.double()
            expected = ((b * logits).softmax(1) * logits).sum(1)
            total += (expected - logits.gather(1, labels[:, None])[:, 0]).sum()
        return float(world.summed(total))

    low, high = 1 / HIGHEST, 1 / LOWEST
    if not slope(low) < 0 < slope(high):
        return None
    for _ in range(HALVINGS):
        middle = math.sqrt(low * high)
        low, high = (middle, high) if slope(middle) < 0 else (low, middle)
    return 1 / math.sqrt(low * high)
