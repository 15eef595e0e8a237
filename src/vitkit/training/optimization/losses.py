"""What is made small: a number from logits (B, K) and targets.

Targets are class numbers (B,), or where images are mixed a probability for every class (B, K).
Both losses take both.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int64
from torch import Tensor
from torch.nn import functional as F

from vitkit.errors import SettingError, did_you_mean
from vitkit.io.import_path import import_by_name
from vitkit.shapes import Logits

Targets = Int64[Tensor, " B"] | Float[Tensor, "B K"]
Loss = Callable[[Logits, Targets], Tensor]
"""Logits (B, K) and targets to the mean over the images, in nats."""


@dataclass(frozen=True)
class CrossEntropy:
    """-sum_k t_k log softmax(y)_k, with t smoothed: t (1 - s) + s / K.

    Attributes:
        smoothing: s in [0, 1): "Rethinking the Inception Architecture" (arXiv 1512.00567), Sec. 7.
    """

    smoothing: float = 0.0

    def __call__(self, logits: Logits, targets: Targets) -> Tensor:
        """The mean over the images."""
        return F.cross_entropy(logits, targets, label_smoothing=self.smoothing)


@dataclass(frozen=True)
class BinaryCrossEntropy:
    """-sum_k t_k log sigmoid(y_k) + (1 - t_k) log(1 - sigmoid(y_k)): every class a yes or no.

    Summed over the classes as in AugReg (arXiv 2106.10270; start from `head_bias` -6.9). DeiT III
    (arXiv 2204.07118) takes their mean, which is this over K: LAMB and Adam make the same of both,
    where `clip_grad` is K times as large, too.

    Attributes:
        smoothing: s in [0, 1), as for `CrossEntropy`.
        threshold: take every class above this probability for present: DeiT III's 0 gives both
            images of a mixture the target 1. `None`: probabilities stay as they are.
    """

    smoothing: float = 0.0
    threshold: float | None = None

    def __call__(self, logits: Logits, targets: Targets) -> Tensor:
        """The mean over the images."""
        classes = logits.shape[1]
        wanted = F.one_hot(targets, classes) if targets.ndim == 1 else targets
        if self.threshold is not None:
            wanted = wanted > self.threshold
        wanted = wanted.to(logits.dtype) * (1 - self.smoothing) + self.smoothing / classes
        summed = F.binary_cross_entropy_with_logits(logits, wanted, reduction="sum")
        return summed / len(logits)


def make_loss(name: str, *, smoothing: float = 0.0, threshold: float | None = None) -> Loss:
    """The loss of a setting's name: `cross-entropy`, `bce`, or one's own as `module:function`.

    Raises:
        SettingError: another name, or a module or function that cannot be imported.
    """
    ours: dict[str, Loss] = {
        "cross-entropy": CrossEntropy(smoothing),
        "bce": BinaryCrossEntropy(smoothing, threshold),
    }
    if name in ours:
        return ours[name]
    if ":" not in name:
        near = did_you_mean(name, ours)
        raise SettingError(
            f"there is no loss {name!r}{near}; take {', '.join(ours)}, or your own as MODULE:NAME"
        )
    try:
        own = import_by_name(name)
    except (ImportError, AttributeError, ValueError) as error:
        raise SettingError(f"loss {name} cannot be imported: {error}") from None
    if not callable(own) or isinstance(own, type):
        raise SettingError(f"loss {name} must be a function of (logits, targets)")
    return own


def check_loss(name: str, num_classes: int, *, mixed: str | None) -> None:
    """Call one's own loss once, on what the run will give it.

    Args:
        name: the setting; vitkit's own losses take everything.
        num_classes: K.
        mixed: the settings that make targets probabilities, such as `mixup 0.8`; else `None`.

    Raises:
        SettingError: it fails, or gives no single number; where only the probabilities are too
            much for it, the message says so.
    """
    loss = make_loss(name)
    if isinstance(loss, CrossEntropy | BinaryCrossEntropy):
        return
    problem = _problem(loss, torch.zeros(2, dtype=torch.int64), num_classes)
    if problem is not None:
        raise SettingError(
            f"loss {name} must give one number for logits (B, K) and class numbers (B,): {problem}"
        )
    if mixed is None:
        return
    problem = _problem(loss, torch.full((2, num_classes), 1 / num_classes), num_classes)
    if problem is not None:
        raise SettingError(
            f"loss {name} takes class numbers only, and {mixed} gives it probabilities (B, K) "
            f"({problem}); pass --mixup 0 --cutmix 0, or --loss cross-entropy"
        )


def _problem(loss: Loss, targets: Tensor, num_classes: int) -> str | None:
    """Why a loss is none, in a line."""
    logits = torch.zeros(2, num_classes, requires_grad=True)
    try:
        found = loss(logits, targets)
    except Exception as error:  # noqa: BLE001 - whatever a user's own function raises
        return f"{type(error).__name__}: {error}"
    if not isinstance(found, Tensor) or found.ndim or not found.requires_grad:
        return f"it gave {type(found).__name__} {list(getattr(found, 'shape', []))}"
    return None
