"""The norms of a block, by name, and LayerScale."""

from __future__ import annotations

from typing import get_args

import torch
from jaxtyping import Float
from torch import Tensor, nn

from vitkit.errors import SpecError, did_you_mean
from vitkit.spec import Norm

NORMS: dict[str, type[nn.LayerNorm] | type[nn.RMSNorm]] = {
    "layer": nn.LayerNorm,
    "rms": nn.RMSNorm,
}
assert set(NORMS) == set(get_args(Norm)), "spec.Norm lists what norm.py builds"


def make_norm(name: str, width: int, eps: float) -> nn.LayerNorm | nn.RMSNorm:
    """LayerNorm (arXiv 1607.06450) or RMSNorm (arXiv 1910.07467) over the last axis, by name."""
    if name not in NORMS:
        near = did_you_mean(name, NORMS)
        raise SpecError(f"norm {name!r} is none of {', '.join(NORMS)}{near}")
    return NORMS[name](width, eps=eps)


class LayerScale(nn.Module):
    """gamma * x, one learned number a channel, small at first (CaiT, arXiv 2103.17239, Eq. 4)."""

    def __init__(self, width: int, start: float) -> None:
        super().__init__()
        self.start = start
        self.gamma = nn.Parameter(torch.full((width,), start))

    def forward(self, branch: Float[Tensor, "*batch D"]) -> Float[Tensor, "*batch D"]:
        """(..., D) -> (..., D)."""
        return branch * self.gamma

    def reset_parameters(self) -> None:
        """gamma as at the start."""
        nn.init.constant_(self.gamma, self.start)
