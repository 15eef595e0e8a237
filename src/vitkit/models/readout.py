"""From the last tokens to one vector: Eq. 4 of "An Image is Worth 16x16 Words", y = LN(z_L^0)."""

from __future__ import annotations

from dataclasses import dataclass

from jaxtyping import Float
from torch import Tensor, nn

from vitkit.shapes import Grid, Pooled, Tokens
from vitkit.spec import Pooling


@dataclass(frozen=True)
class Features:
    """What the encoder says of a batch, after the last norm.

    Attributes:
        cls: the class token (B, D), or `None` where the model has none.
        distillation: the distillation token (B, D), or `None`.
        registers: register tokens (B, R, D), or `None`.
        patches: patch tokens (B, N, D), row by row.
        grid: (gh, gw), with N = gh * gw.
    """

    cls: Pooled | None
    distillation: Pooled | None
    registers: Float[Tensor, "B R D"] | None
    patches: Float[Tensor, "B N D"]
    grid: Grid

    @classmethod
    def split(cls, tokens: Tokens, grid: Grid, *, class_token: bool) -> Features:
        """Take the normed tokens (B, T, D) of a model apart."""
        prefix = int(class_token)
        return cls(
            cls=tokens[:, 0] if class_token else None,
            distillation=None,
            registers=None,
            patches=tokens[:, prefix:],
            grid=grid,
        )


class Readout(nn.Module):
    """Eq. 4: y = LN(z_L)^0, the normed class token; or the mean of the normed patches.

    Args:
        pooling: `cls` or `mean` (the latter is big_vision's `gap`, arXiv 2205.01580).
    """

    def __init__(self, pooling: Pooling = "cls") -> None:
        super().__init__()
        self.pooling = pooling

    def forward(self, features: Features) -> Pooled:
        """y (B, D)."""
        if self.pooling == "cls" and features.cls is not None:
            return features.cls
        return features.patches.mean(dim=1)
