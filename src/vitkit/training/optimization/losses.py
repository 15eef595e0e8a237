"""Loss functions on logits (B, K) and targets.

Targets are class numbers (B,) or, where images are mixed, a probability for every class (B, K).
Both losses accept both.
"""

from dataclasses import dataclass

import torch
from torch.nn import functional as F

from vitkit import errors, messages, shapes
from vitkit.io.results import import_setting


@dataclass(frozen=True)
class CrossEntropy:
    """Softmax cross-entropy: -sum_k t_k log softmax(y)_k, with t smoothed: t (1 - s) + s / K.

    Attributes:
        smoothing: s in [0, 1): "Rethinking the Inception Architecture" (arXiv 1512.00567), Sec. 7.
    """

    smoothing: float = 0.0

    def __call__(self, logits: shapes.Logits, targets: shapes.Targets) -> torch.Tensor:
        """Return the mean over the images."""
        return F.cross_entropy(logits, targets, label_smoothing=self.smoothing)


@dataclass(frozen=True)
class BinaryCrossEntropy:
    """Sigmoid cross-entropy: -sum_k t_k log sigmoid(y_k) + (1 - t_k) log(1 - sigmoid(y_k)).

    The loss is summed over the classes as in AugReg (arXiv 2106.10270; start from `head_bias`
    -6.9). DeiT III (arXiv 2204.07118) takes the mean over the classes: this loss divided by K.
    With LAMB and Adam both give the same steps if `clip_grad` is K times as large, too.

    Attributes:
        smoothing: s in [0, 1), as for `CrossEntropy`.
        threshold: set the target to 1 for every class above this probability and to 0 for the
            others. DeiT III's threshold of 0 gives the classes of both mixed images the target 1.
            `None` leaves the probabilities unchanged.
    """

    smoothing: float = 0.0
    threshold: float | None = None

    def __call__(self, logits: shapes.Logits, targets: shapes.Targets) -> torch.Tensor:
        """Return the mean over the images."""
        classes = logits.shape[1]
        probabilities = F.one_hot(targets, classes) if targets.ndim == 1 else targets
        if self.threshold is not None:
            probabilities = probabilities > self.threshold
        smoothed = probabilities.to(logits.dtype) * (1 - self.smoothing) + self.smoothing / classes
        summed = F.binary_cross_entropy_with_logits(logits, smoothed, reduction="sum")
        return summed / len(logits)


def make_loss(name: str, *, smoothing: float = 0.0, threshold: float | None = None) -> shapes.Loss:
    """Return the loss of a name: `cross-entropy`, `bce`, or a user's own as `module:function`.

    Args:
        name: name of the loss.
        smoothing: label smoothing in [0, 1); a user's own loss gets none.
        threshold: threshold of `BinaryCrossEntropy`.

    Raises:
        SettingError: there is no loss of this name, or the module or function cannot be imported.
    """
    losses: dict[str, shapes.Loss] = {
        "cross-entropy": CrossEntropy(smoothing),
        "bce": BinaryCrossEntropy(smoothing, threshold),
    }
    if name in losses:
        return losses[name]
    if ":" not in name:
        near = messages.did_you_mean(name, losses)
        raise errors.SettingError(
            f"--loss {name!r} does not exist{near}; pass one of {', '.join(losses)}, or your "
            "own function as MODULE:NAME"
        )
    return _import_loss(name)


# The user's own loss, `--loss MODULE:FUNCTION`: imported, and tried once before the run.


def _import_loss(name: str) -> shapes.Loss:
    """Return the user's own loss of a name `module:function`."""
    loss: shapes.Loss = import_setting("loss", name)
    # A class would be called with logits and targets, and return an object.
    if not callable(loss) or isinstance(loss, type):
        raise errors.SettingError(f"--loss {name} must be a function of (logits, targets)")
    return loss


def check_loss(name: str, num_classes: int, *, mixed: str | None) -> None:
    """Call a user's own loss once, on tensors as the run will pass to it.

    Args:
        name: the setting `loss`; vitkit's own losses accept all targets and are not called.
        num_classes: K.
        mixed: the settings that make targets probabilities, such as `mixup 0.8`; else `None`.

    Raises:
        SettingError: it fails, or does not return a single number. If only probabilities are not
            supported, the message names the settings that cause them.
    """
    if ":" not in name:
        return
    loss = _import_loss(name)
    # batches that are not mixed have class numbers
    problem = _problem(loss, torch.zeros(2, dtype=torch.int64), num_classes)
    text = f"must return one number for logits (B, K) and class numbers (B,): {problem}"
    if problem is None and mixed is not None:
        problem = _problem(loss, torch.full((2, num_classes), 1 / num_classes), num_classes)
        text = (
            f"takes class numbers only, and {mixed} gives it probabilities (B, K) ({problem}); "
            "pass --mixup 0 --cutmix 0, or --loss cross-entropy"
        )
    if problem is not None:
        raise errors.SettingError(f"--loss {name} {text}")


def _problem(loss: shapes.Loss, targets: torch.Tensor, num_classes: int) -> str | None:
    """Call a loss; return one line on why the run cannot use it, or `None`."""
    logits = torch.zeros(2, num_classes, requires_grad=True)
    try:
        value = loss(logits, targets)
    except errors.Interrupted:
        raise
    except Exception as error:  # noqa: BLE001 - whatever a user's own function raises
        return f"{type(error).__name__}: {error}"
    # A loss without a gradient would leave all weights unchanged.
    if not isinstance(value, torch.Tensor) or value.ndim or not value.requires_grad:
        return f"it returned {type(value).__name__} {list(getattr(value, 'shape', []))}"
    return None
