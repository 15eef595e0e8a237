"""Temperature scaling: one number, fitted on validation, that calibrates the probabilities.

The best epoch of a run, or the penalty of a linear head, is chosen by validation scores. On the
same images that model is better than on others, and a temperature fitted there is too low. So the
images are divided into folds, and each image's logits come from the model that the images of the
other folds choose (cross-fitting). They cost no further evaluation, and no images.
"""

import json
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import safetensors.torch
import torch
from jaxtyping import Float, Float64, Int64
from safetensors import SafetensorError, safe_open
from torch import Tensor
from torch.nn import functional as F

from vitkit.distributed import ProcessGroup
from vitkit.evaluation.loop import LabelledLogits
from vitkit.io.atomic import write_bytes

LOWEST_TEMPERATURE = 0.05
HIGHEST_TEMPERATURE = 20.0
"""Bounds of the temperatures that are tried."""
BISECTIONS = 40
"""Bisections of the interval between them, on a logarithmic scale."""
FEWEST_IMAGES = 125
"""Least images to fit a temperature on, 25 in each fold.

With 192 small classifiers of digits, a temperature that passes `calibrate` raised the loss on other
images by up to 0.007 nats; with 100 images of 96 others, by up to 0.03. With 24 images that chose
the model, fitted always, it did by up to 0.13."""
PRIOR = 1.0
"""Images of unknown class that are added to the fit, as Platt (1999) does for two classes: without
them, the best temperature of images that are all right would be 0."""
FOLDS = 5
"""Folds of the validation images; four choose the model that the fifth is evaluated with."""
MOST_LOGITS = 2**22
"""Most logits that are kept, 16 MB; beyond that, only of every n-th image."""


@dataclass(frozen=True)
class Calibration:
    """The result of fitting a temperature.

    Attributes:
        temperature: divides the logits; `None` to leave them as they are.
        message: one line: the temperature and its gain, or the reason why there is none.
    """

    temperature: float | None
    message: str


def calibrate(logits: Float[Tensor, "N K"], labels: Int64[Tensor, " N"]) -> Calibration:
    """Fit a temperature on validation; use it only if cross-validation confirms the gain.

    There must be 125 images: whether one is fitted depends on nothing but their number. Each of 5
    folds of them is scored with the temperature that the other four give; where that lowers the
    mean loss by more than its standard error, the temperature of all images is the result.

    Args:
        logits: (N, K) of images that are not trained on, and did not choose the model: see
            `HeldOutLogits`.
        labels: class numbers (N,).
    """
    count, left = len(labels), "temperature left at 1"
    if count < FEWEST_IMAGES:
        needed = f"fitting it needs {FEWEST_IMAGES} validation images, and there are {count}"
        return Calibration(None, f"{left}: {needed}")
    temperature = fit_temperature(logits, labels)
    if temperature is None:
        bounds = f"{LOWEST_TEMPERATURE:g} to {HIGHEST_TEMPERATURE:g}"
        return Calibration(None, f"{left}: the best one on validation is not within {bounds}")
    folds = torch.arange(count) % FOLDS
    before = F.cross_entropy(logits.double(), labels, reduction="none")
    after = torch.empty_like(before)
    for fold in range(FOLDS):
        inside = folds == fold
        fitted = fit_temperature(logits[~inside], labels[~inside]) or 1.0  # no minimum: no scaling
        scaled = logits[inside].double() / fitted
        after[inside] = F.cross_entropy(scaled, labels[inside], reduction="none")
    losses = f"loss {before.mean():.4f} -> {after.mean():.4f}"
    test = f"{FOLDS}-fold cross-validation on {count:,} images: {losses}"
    gain = before - after
    # the gain must exceed its own standard error
    if gain.mean() <= gain.std(correction=0) / math.sqrt(count):
        return Calibration(None, f"{left}: no significant gain in {test}")
    message = f"temperature {temperature:.3f}, fitted on the validation split; {test}"
    return Calibration(temperature, message)


def fit_temperature(logits: Float[Tensor, "N K"], labels: Int64[Tensor, " N"]) -> float | None:
    """Return the T whose softmax(z / T) has the least negative log-likelihood of the labels.

    Guo et al., "On Calibration of Modern Neural Networks" (arXiv 1706.04599), Sec. 4.2. In
    b = 1 / T the loss is convex, with the slope sum_i (E_softmax(b z_i)[z_i] - z_i,label), so
    bisection finds the minimum. The order of the classes does not change. One image is added whose
    logits are like the others' and whose label may be any class, as in Platt, "Probabilistic
    Outputs for Support Vector Machines" (1999), Sec. 2.2: it ends the fall of the loss towards
    T = 0 where every image is right, and moves T by about 1 / N else.

    Args:
        logits: (N, K) of images that are neither trained on nor tested with.
        labels: class numbers (N,).

    Returns:
        T in [0.05, 20]; `None` where the loss is least at a bound, as for a model that is worse
        than a guess.
    """
    values = logits.double()
    of_label = values.gather(1, labels[:, None])[:, 0]
    of_any = values.mean(1)  # Platt's added image: its label is each class with probability 1 / K

    def slope(b: float) -> float:
        expected = ((b * values).softmax(1) * values).sum(1)
        of_unknown = float((expected - of_any).sum()) / max(len(labels), 1)
        return float((expected - of_label).sum()) + PRIOR * of_unknown

    low, high = 1 / HIGHEST_TEMPERATURE, 1 / LOWEST_TEMPERATURE
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


class HeldOutLogits:
    """Cross-fitted validation logits: for each fold, of the model that the other folds choose.

    Models are added as they are evaluated, one after another. Image i of the split is in fold
    i mod 5, if all logits are kept; the model is chosen as in the run: by top-1, then by loss.

    Args:
        images: number of validation images.
        num_classes: K.

    Attributes:
        is_complete: False if some evaluated models were not added, as in a run that was resumed
            without the logits of its first part.
    """

    def __init__(self, images: int, num_classes: int) -> None:
        self._every = self.step(images, num_classes)
        kept = -(-images // self._every)
        self._logits = torch.zeros(kept, num_classes)
        self._labels = torch.zeros(kept, dtype=torch.long)
        # top-1 and negative loss of the chosen models, on the images of the other folds
        self._best: list[tuple[float, float]] = [(-1.0, 0.0)] * FOLDS
        self._sums: Float64[Tensor, "5 3"] = torch.zeros(FOLDS, 3, dtype=torch.float64)
        self._rows: list[tuple[Tensor, Tensor, Tensor]] = []
        self.is_complete = True

    @staticmethod
    def step(images: int, num_classes: int) -> int:
        """Return n: the logits of every n-th image are kept, at most 2**22 numbers.

        Args:
            images: number of validation images.
            num_classes: K.
        """
        return -(-images * num_classes // MOST_LOGITS)  # rounded up

    def watched(
        self, predictions: Iterable[LabelledLogits], world: ProcessGroup
    ) -> Iterator[LabelledLogits]:
        """Yield the outputs of a model for this process's images, and keep them for `add`.

        Args:
            predictions: logits (B, K) and class numbers (B,), in the order of the split.
            world: process r of n has the images r, r + n ...
        """
        self._sums, self._rows = torch.zeros(FOLDS, 3, dtype=torch.float64), []
        seen = 0
        for logits, labels in predictions:
            own, targets = logits.detach().cpu().float(), labels.cpu()
            index = world.rank + world.size * torch.arange(seen, seen + len(own))
            seen += len(own)
            right = own.argmax(1) == targets
            loss = F.cross_entropy(own, targets, reduction="none")
            row = torch.stack([right.double(), loss.double(), torch.ones(len(own)).double()], 1)
            self._sums.index_add_(0, index // self._every % FOLDS, row)
            kept = index % self._every == 0
            self._rows.append((index[kept] // self._every, own[kept], targets[kept]))
            yield logits, labels

    def add(self, world: ProcessGroup | None = None) -> None:
        """Add the model whose outputs were watched, for each fold whose other folds choose it.

        Args:
            world: the processes that share the images; each must call, and each keeps the same.
        """
        world = world or ProcessGroup()
        sums = world.all_reduce_sum(self._sums)
        # The images of a fold do not take part in the choice of its model.
        others = sums.sum(0) - sums
        improved = torch.zeros(FOLDS, dtype=torch.bool)
        for fold, (right, loss, images) in enumerate(others.tolist()):
            score = (right / max(images, 1), -loss / max(images, 1))
            if score > self._best[fold] or self._best[fold][0] < 0:
                self._best[fold], improved[fold] = score, True
        logits, labels = torch.zeros_like(self._logits), torch.zeros_like(self._labels)
        for places, own, targets in self._rows:
            logits[places], labels[places] = own, targets
        self._rows = []
        logits, labels = world.all_reduce_sum(logits), world.all_reduce_sum(labels)
        chosen = improved[torch.arange(len(labels)) % FOLDS]
        self._logits[chosen], self._labels[chosen] = logits[chosen], labels[chosen]

    def predictions(self) -> tuple[Float[Tensor, "N K"], Int64[Tensor, "N"]]:
        """Return the logits of all kept images (N, K), and their class numbers (N,)."""
        return self._logits, self._labels

    def save(self, path: Path) -> None:
        """Write the kept logits, if they are complete.

        Args:
            path: a .safetensors file; its folder is created.

        Raises:
            OutputError: it cannot be written.
        """
        if self.is_complete:
            tensors = {"logits": self._logits, "labels": self._labels}
            write_bytes(path, safetensors.torch.save(tensors, {"best": json.dumps(self._best)}))

    def load(self, path: Path) -> None:
        """Restore what `save` wrote.

        Args:
            path: the file; without it, or with that of another run, the logits are not complete.
        """
        try:
            with safe_open(path, "pt") as file:
                logits, labels = file.get_tensor("logits"), file.get_tensor("labels")
                best = json.loads(file.metadata()["best"])
            if logits.shape != self._logits.shape or labels.shape != self._labels.shape:
                raise ValueError("logits of another run")
        except (OSError, SafetensorError, LookupError, TypeError, ValueError):
            self.is_complete = False
            return
        self._logits, self._labels = logits, labels
        self._best = [(top1, loss) for top1, loss in best]
