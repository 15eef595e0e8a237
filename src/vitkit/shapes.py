"""Letters of shapes, as in every docstring and annotation.

    B  batch              N  patches (N = gh * gw)        L  depth (blocks)
    C  channels           gh, gw  grid of patches         k  heads
    H  image height       R  register tokens              h  head width
    W  image width        T  tokens (prefix + N)          M  MLP width
    P  patch (height or width)    D  width                K  classes

Height comes before width everywhere. The aliases are checked while the tests run (jaxtyping and
beartype) and cost nothing otherwise.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

from jaxtyping import Float, Int64
from torch import Tensor

Images: TypeAlias = Float[Tensor, "B C H W"]
Tokens: TypeAlias = Float[Tensor, "B T D"]
Logits: TypeAlias = Float[Tensor, "B K"]
Pooled: TypeAlias = Float[Tensor, "B D"]
AttentionMaps: TypeAlias = Float[Tensor, "B k Q T"]
Grid: TypeAlias = tuple[int, int]
Targets: TypeAlias = Int64[Tensor, " B"] | Float[Tensor, "B K"]
"""Class numbers, or a probability for every class."""
Loss: TypeAlias = Callable[[Logits, Targets], Tensor]
"""A function of logits and targets that returns the mean over the images, in nats."""

__all__ = [
    "AttentionMaps",
    "Grid",
    "Images",
    "Logits",
    "Loss",
    "Pooled",
    "Targets",
    "Tokens",
]
