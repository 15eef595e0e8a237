"""AdamW with its decay kept where it belongs."""

from __future__ import annotations

from typing import Any

from torch import nn, optim

NOT_DECAYED = ("cls_token", "pos_embed")


def parameter_groups(model: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Two groups: matrices and kernels decay; biases, norms, tokens and positions do not."""
    decayed: list[nn.Parameter] = []
    kept: list[nn.Parameter] = []
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            free = parameter.ndim < 2 or name.rpartition(".")[2] in NOT_DECAYED
            (kept if free else decayed).append(parameter)
    return [
        {"params": decayed, "weight_decay": weight_decay},
        {"params": kept, "weight_decay": 0.0},
    ]


def adamw(
    model: nn.Module, *, lr: float, weight_decay: float, betas: tuple[float, float]
) -> optim.AdamW:
    """Decoupled weight decay (arXiv 1711.05101), as one fused kernel."""
    return optim.AdamW(parameter_groups(model, weight_decay), lr=lr, betas=betas, fused=True)
