"""The user's own loss, `--loss MODULE:FUNCTION`: imported, and tried once before the run."""

from __future__ import annotations

import torch
from torch import Tensor

from vitkit.errors import SettingError
from vitkit.io.import_path import import_setting
from vitkit.shapes import Loss


def import_loss(name: str) -> Loss:
    """Return the user's own loss of a name `module:function`.

    Raises:
        SettingError: the module or function cannot be imported, or is not a function.
    """
    loss: Loss = import_setting("loss", name)
    # A class would be called with logits and targets, and return an object.
    if not callable(loss) or isinstance(loss, type):
        raise SettingError(f"--loss {name} must be a function of (logits, targets)")
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
    loss = import_loss(name)
    # Batches that are not mixed have class numbers.
    problem = _problem(loss, torch.zeros(2, dtype=torch.int64), num_classes)
    if problem is not None:
        raise SettingError(
            f"--loss {name} must return one number for logits (B, K) and class numbers (B,): "
            f"{problem}"
        )
    if mixed is None:
        return
    problem = _problem(loss, torch.full((2, num_classes), 1 / num_classes), num_classes)
    if problem is not None:
        raise SettingError(
            f"--loss {name} takes class numbers only, and {mixed} gives it probabilities (B, K) "
            f"({problem}); pass --mixup 0 --cutmix 0, or --loss cross-entropy"
        )


def _problem(loss: Loss, targets: Tensor, num_classes: int) -> str | None:
    """Call a loss; return one line on why the run cannot use it, or `None`."""
    logits = torch.zeros(2, num_classes, requires_grad=True)
    try:
        value = loss(logits, targets)
    except Exception as error:  # noqa: BLE001 - whatever a user's own function raises
        return f"{type(error).__name__}: {error}"
    # A loss without a gradient would leave all weights unchanged.
    if not isinstance(value, Tensor) or value.ndim or not value.requires_grad:
        return f"it returned {type(value).__name__} {list(getattr(value, 'shape', []))}"
    return None
