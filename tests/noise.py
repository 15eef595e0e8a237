"""Seeded noise for parity tests: a zero head or a fresh norm would hide a swapped key."""

import torch
from torch import nn

NORMS = (nn.LayerNorm, nn.RMSNorm, nn.GroupNorm)


def fill_with_noise(module: nn.Module, seed: int = 0, std: float = 0.02) -> None:
    """N(0, std) around each parameter's identity: 1 for the weights of norms and the gammas of
    LayerScale, 0 for all others."""
    generator = torch.Generator().manual_seed(seed)
    ones = {id(part.weight) for part in module.modules() if isinstance(part, NORMS)}
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            scales = id(parameter) in ones or name.rpartition(".")[2].startswith("gamma")
            noise = torch.randn(parameter.shape, generator=generator) * std
            parameter.copy_(noise + (1.0 if scales else 0.0))
