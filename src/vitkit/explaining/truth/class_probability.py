"""The probability of each image's class, by some of the image's patches."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
from jaxtyping import Float64, Int64
from torch import Tensor

from vitkit.shapes import Logits

ROWS = 64
"""Forward passes at a time."""


@runtime_checkable
class PatchSubsets(Protocol):
    """Images that a model can see by some of their patches, such as `TokenSubsets`.

    Attributes:
        count: N, the number of patches of an image.
    """

    count: int

    def logits(
        self, patches: Int64[Tensor, "R n"], image: Int64[Tensor, " R"] | None = None
    ) -> Logits:
        """Return logits (R, K) of R passes with n patches each, of the images `image` (R,)."""
        ...


@dataclass(frozen=True)
class ClassProbability:
    """The probability of one class of each image, by some of its patches.

    The caller chooses the model's mode and switches gradients off.

    Attributes:
        subsets: of B images.
        classes: the class of each image, (B,).
        rows: forward passes at a time.
    """

    subsets: PatchSubsets
    classes: Int64[Tensor, " B"]
    rows: int = ROWS

    @property
    def images(self) -> int:
        """B, the number of images."""
        return len(self.classes)

    @property
    def patches(self) -> int:
        """N, the number of patches of an image."""
        return self.subsets.count

    def log(
        self, patches: Int64[Tensor, "R n"], image: Int64[Tensor, " R"] | None = None
    ) -> Float64[Tensor, " R"]:
        """Return the log-probability of its image's class for each pass.

        Args:
            patches: (R, n) the patches that stay.
            image: (R,) the image of each pass; default: one pass for each image.
        """
        found = []
        if image is None:
            image = torch.arange(len(patches))
        wanted = self.classes.cpu()[image].unsqueeze(1)  # R 1
        for part in torch.arange(len(patches)).split(self.rows):
            # float64: probabilities near 0 and 1 are told apart, and MPS has none
            logits = self.subsets.logits(patches[part], image[part]).cpu().double()
            found.append(logits.log_softmax(dim=1).gather(1, wanted[part]).squeeze(1))
        return torch.cat(found)
