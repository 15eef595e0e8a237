"""torch's Muon, with small matrices of equal shape orthogonalised in one batch.

K. Jordan et al., "Muon: An optimizer for hidden layers in neural networks" (2024). A small
Transformer has dozens of small matrices; one by one, launching the products takes longer than
computing them. The results are bitwise equal to torch's (`tests/training/test_optimizers.py`).
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, optim
from torch.optim.optimizer import ParamsT

LARGEST = 256
"""Longest side of a batched matrix; larger ones gain nothing from a batch."""


class BatchedMuon(optim.Muon):
    """`torch.optim.Muon` with Nesterov momentum and the same state and results.

    A step is momentum, orthogonalisation, decoupled weight decay, and an update scaled to AdamW's
    ("Muon is Scalable for LLM Training", arXiv 2502.16982, Eq. 4).

    Args:
        groups: parameters (R, C), or groups of them.
        lr: learning rate.
        weight_decay: decoupled, times the learning rate.
    """

    def __init__(self, groups: ParamsT, *, lr: float, weight_decay: float) -> None:
        super().__init__(groups, lr=lr, weight_decay=weight_decay, adjust_lr_fn="match_rms_adamw")

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Update all parameters that have a gradient."""
        # the override returns no loss, as no closure is called
        for group in self.param_groups:
            batches: dict[tuple[int, ...], list[Tensor]] = defaultdict(list)
            for number, matrix in enumerate(group["params"]):
                if matrix.grad is not None:
                    # A large matrix is processed alone: its index is part of the key.
                    key = (number,) if max(matrix.shape) > LARGEST else ()
                    batches[*matrix.shape, *key].append(matrix)
            for matrices in batches.values():
                self._update(group, matrices)

    def _update(self, group: dict[str, Any], matrices: list[Tensor]) -> None:
        """Update matrices of one shape."""
        lr = group["lr"]
        momentum = group["momentum"]
        gradients = [matrix.grad for matrix in matrices if matrix.grad is not None]
        buffers = []
        for matrix in matrices:
            state = self.state[matrix]
            if "momentum_buffer" not in state:
                state["momentum_buffer"] = torch.zeros_like(matrix)
            buffers.append(state["momentum_buffer"])
        torch._foreach_lerp_(buffers, gradients, 1 - momentum)
        directions = orthogonalise(
            torch._foreach_lerp(gradients, buffers, momentum),
            group["ns_coefficients"],
            group["ns_steps"],
            group["eps"],
        )
        # 0.2 is about the root mean square of an update of AdamW.
        scale = 0.2 * math.sqrt(max(matrices[0].shape))
        torch._foreach_mul_(matrices, 1 - lr * group["weight_decay"])
        torch._foreach_add_(matrices, directions, alpha=-lr * scale)


def orthogonalise(
    matrices: Sequence[Tensor], coefficients: Sequence[float], steps: int, eps: float
) -> list[Tensor]:
    """Return nearly orthogonal matrices (R, C) in bfloat16, by a quintic Newton-Schulz iteration.

    X <- a X + (b A + c A A) X with A = X X^T, from X = M / |M|.

    Args:
        matrices: matrices of one shape (R, C).
        coefficients: a, b and c.
        steps: number of iterations.
        eps: smallest norm |M| to divide by.
    """
    a, b, c = coefficients
    rows, columns = matrices[0].shape
    normalised = []
    for matrix in matrices:
        # Transposed where that makes X X^T the smaller product.
        wide = matrix.bfloat16() if rows <= columns else matrix.bfloat16().T
        normalised.append(wide / wide.norm().clamp(min=eps))
    x = torch.stack(normalised)
    for _ in range(steps):
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return list(x if rows <= columns else x.mT)
