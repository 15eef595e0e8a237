"""`ModelInputs`: images and targets on the model's device, augmented and mixed."""

from __future__ import annotations

from dataclasses import dataclass

from jaxtyping import Float, Int64
from torch import Tensor

from vitkit.data.augmentation.mixup import Mixture
from vitkit.shapes import Images


@dataclass(frozen=True)
class ModelInputs:
    """Images and their targets.

    Attributes:
        images: normalised, (B, C, H, W) float.
        targets: class numbers (B,), or a probability for every class (B, K).
        mixture: how the images are mixed, if they are; the targets are mixed already.
        soft: a teacher's probability for every class (B, K), mixed likewise.
    """

    images: Images
    targets: Int64[Tensor, " B"] | Float[Tensor, "B K"]
    mixture: Mixture | None = None
    soft: Float[Tensor, "B K"] | None = None
