"""An exported model that a runtime has opened."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import numpy as np
from jaxtyping import Float


@dataclass(frozen=True)
class Session:
    """An exported model that can be run.

    Attributes:
        run: a batch of images, uint8 (B, H, W, 3) or float32 (B, C, h, w) -> the outputs of the
            graph, of which the logits (B, K) are the last.
        layers: layer type -> how many of them the runtime executes in int8; empty where it cannot
            tell.
    """

    run: Callable[[np.ndarray], list[np.ndarray]]
    layers: Mapping[str, int] = field(default_factory=dict)

    def logits(self, images: np.ndarray) -> Float[np.ndarray, "B K"]:
        """Return the logits (B, K) float32 of a batch of images."""
        return np.asarray(self.run(images)[-1], dtype=np.float32)
