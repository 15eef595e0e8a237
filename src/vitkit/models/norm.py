"""The norms of a block, by name, and LayerScale."""

from __future__ import annotations

from typing import get_args

import torch
from jaxtyping import Float
from torch import Tensor, nn

from vitkit.models.mlp import by_name
from vitkit.spec import Norm

NORMS = {"layer": nn.LayerNorm, "rms": nn.RMSNorm}
assert set(NORMS) == set(get_args(Norm)), "spec.Norm lists what norm.py builds"


def make_norm(name: str, width: int, eps: float, wanted: bool = True) -> nn.Module:
    """Create LayerNorm (arXiv 1607.06450) or RMSNorm (arXiv 1910.07467) over the last axis."""
    return by_name("norm", name, NORMS)(width, eps=eps) if wanted else nn.Identity()


class LayerScale(nn.Module):
    """gamma * x, one learned number a channel, small at first (CaiT, arXiv 2103.17239, Eq. 4)."""

    def __init__(self, width: int, start: float) -> None:
        super().__init__()
        self.gamma = nn.Parameter(torch.full((width,), start))

    def forward(self, branch: Float[Tensor, "*batch D"]) -> Float[Tensor, "*batch D"]:
        return branch * self.gamma
