"""The score that a map of a class explains: one logit of each image, and its gradients."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from jaxtyping import Float, Int64
from torch import Tensor

from vitkit.errors import CheckpointError, SettingError
from vitkit.explaining.method import Method
from vitkit.models.layers import eval_mode
from vitkit.models.vit import ViT
from vitkit.shapes import Logits


@contextmanager
def gradients_in_eval_mode(model: ViT) -> Iterator[None]:
    """Run a `with` block in eval mode with gradients enabled, whatever the caller's settings."""
    with eval_mode(model), torch.inference_mode(False), torch.enable_grad():
        yield


def check_classes(model: ViT, classes: Int64[Tensor, " B"], methods: Mapping[str, Method]) -> None:
    """Check that the model has these classes.

    Args:
        model: any ViT.
        classes: (B,) class numbers, from 0.
        methods: all methods, to name those that need no class.

    Raises:
        SettingError: a model without a head, or a class that it does not have.
    """
    count = model.spec.num_classes
    if not count:
        able = [method.name for method in methods.values() if not method.by_class]
        raise SettingError(
            "the model has no head, so it has no class to explain; methods that need none: "
            f"{', '.join(able)}"
        )
    for number in classes.tolist():
        if not 0 <= number < count:
            raise SettingError(f"class {number} does not exist; classes are 0 to {count - 1}")


def check_finite(logits: Logits) -> Logits:
    """Return logits (B, K) that are numbers.

    Raises:
        CheckpointError: logits of a model whose weights are broken, or overflow.
    """
    if not torch.isfinite(logits).all():
        raise CheckpointError(
            "the model's logits are not finite (NaN or infinity), so no class can be explained; "
            "check its weights, or use the model in float32"
        )
    return logits


def class_scores(logits: Logits, classes: Int64[Tensor, " B"]) -> Float[Tensor, " B"]:
    """Return the logit of each row's class: (B, K), (B,) -> (B,)."""
    # a copy: a graph cannot keep the predicted classes of `torch.inference_mode`
    return logits.gather(1, classes.to(logits.device).clone()[:, None])[:, 0]


def at_least_float32(values: Float[Tensor, "..."]) -> Float[Tensor, "..."]:
    """Return half precision as float32, for sums; other dtypes unchanged."""
    return values.to(torch.promote_types(values.dtype, torch.float32))
