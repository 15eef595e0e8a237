"""Outputs of a model that are not finite (NaN, infinity): counted, never as a predicted class."""

from __future__ import annotations

from jaxtyping import Bool, Float
from torch import Tensor

from vitkit.errors import CheckpointError
from vitkit.messages import plural


def finite_rows(outputs: Float[Tensor, "B K"]) -> Bool[Tensor, " B"]:
    """Return True for each image whose logits give probabilities.

    NaN and +infinity do not; -infinity, a class that is ruled out, does unless all K are.
    """
    return outputs.logsumexp(1).isfinite()


def refuse_not_finite(count: int, images: int, first: str = "") -> None:
    """Raise `CheckpointError` where a model gives numbers that are not finite.

    Args:
        count: count of images with such outputs; 0 is fine.
        images: their number in all.
        first: the name of the first of them, where it is known.
    """
    if count:
        named = f" (first: {first})" if first else ""
        raise CheckpointError(
            f"the model gives NaN or infinity for {count:,} of {plural(images, 'image')}{named}, "
            "so they have no class; its weights or numbers overflow: use an earlier checkpoint, or "
            "float32 where it runs in half precision"
        )
