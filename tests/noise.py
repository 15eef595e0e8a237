"""Seeded noise for parity tests: a zero head or a fresh norm would hide a swapped key."""

from __future__ import annotations

import torch
from torch import nn


def fill_with_noise(module: nn.Module, seed: int = 0, std: float = 0.02) -> None:
    """N(0, std) around each parameter's identity: 1 for norm weights, 0 for all others."""
    generator = torch.Generator().manual_seed(seed)
    norms = {id(part.weight) for part in module.modules() if isinstance(part, nn.LayerNorm)}
    with torch.no_grad():
        for parameter in module.parameters():
            noise = torch.randn(parameter.shape, generator=generator) * std
            parameter.copy_(noise + (1.0 if id(parameter) in norms else 0.0))
