"""The optimizers: AdamW with its decay kept where it belongs, and Muon for the matrices."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn, optim

from vitkit.training.parameters import parameter_groups

FUSED = 3
"""Query, key and value lie in one matrix; Muon treats them as the three that they are."""


def make_optimizer(
    model: nn.Module, name: str, *, lr: float, weight_decay: float, betas: tuple[float, float]
) -> optim.Optimizer:
    """The optimizer of a setting's name, `adamw` or `muon`, over a model already on its device."""
    if name == "muon":
        return MuonWithAdamW(model, lr=lr, weight_decay=weight_decay, betas=betas)
    groups = parameter_groups(model, lr=lr, weight_decay=weight_decay)
    return optim.AdamW(groups, lr=lr, betas=betas, fused=_fusible(model))


class MuonWithAdamW(optim.Optimizer):
    """Muon for the matrices of the blocks, AdamW for everything else, behind one optimizer's face.

    Muon replaces a matrix's momentum by the nearest orthogonal matrix (K. Jordan et al., "Muon: An
    optimizer for hidden layers in neural networks", 2024); torch's implementation, with the step
    scaled to AdamW's (arXiv 2502.16982, Eq. 4), so that one learning rate serves both. The fused
    qkv matrix is orthogonalised as three.
    """

    def __init__(
        self, model: nn.Module, *, lr: float, weight_decay: float, betas: tuple[float, float]
    ) -> None:
        named = {n: p for n, p in model.named_parameters() if p.requires_grad}
        matrices = {n: p for n, p in named.items() if n.startswith("blocks.") and p.ndim == 2}
        rest = {n: p for n, p in named.items() if n not in matrices}
        self._parts = [
            (whole, number, nn.Parameter(part))
            for name, whole in matrices.items()
            for number, part in enumerate(_parts(name, whole.data))
        ]
        self._muon = optim.Muon(
            [part for _, _, part in self._parts],
            lr=lr,
            weight_decay=weight_decay,
            adjust_lr_fn="match_rms_adamw",
        )
        groups = parameter_groups(model, lr=lr, weight_decay=weight_decay, only=rest)
        self._adamw = optim.AdamW(groups, lr=lr, betas=betas, fused=_fusible(model))
        self._names = {id(whole): name for name, whole in matrices.items()}
        super().__init__(list(named.values()), {"lr": lr})
        self.param_groups = [*self._muon.param_groups, *self._adamw.param_groups]

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """One step of both, from the gradients of the model's own parameters."""
        for whole, number, part in self._parts:
            gradient = whole.grad
            part.grad = None
            if gradient is not None:
                part.grad = _parts(self._names[id(whole)], gradient)[number]
        self._muon.step()
        self._adamw.step()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the gradients of the model's own parameters."""
        for whole, _, part in self._parts:
            whole.grad = part.grad = None
        self._adamw.zero_grad(set_to_none)

    def state_dict(self) -> dict[str, Any]:
        """Both states in one, Muon's first: the layout of any optimizer's."""
        muon, adamw = self._muon.state_dict(), self._adamw.state_dict()
        first = len(self._parts)
        state = muon["state"] | {first + n: values for n, values in adamw["state"].items()}
        groups = [_moved(group, first) for group in adamw["param_groups"]]
        return {"state": state, "param_groups": muon["param_groups"] + groups}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """What `state_dict` gave."""
        first, state = len(self._parts), state_dict["state"]
        muon = {n: values for n, values in state.items() if n < first}
        adamw = {n - first: values for n, values in state.items() if n >= first}
        groups = state_dict["param_groups"]
        self._muon.load_state_dict({"state": muon, "param_groups": groups[:1]})
        moved = [_moved(group, -first) for group in groups[1:]]
        self._adamw.load_state_dict({"state": adamw, "param_groups": moved})
        self.param_groups = [*self._muon.param_groups, *self._adamw.param_groups]


def _parts(name: str, matrix: Tensor) -> tuple[Tensor, ...]:
    """Views of the matrices that lie in one parameter."""
    return matrix.chunk(FUSED) if name.endswith("qkv.weight") else (matrix,)


def _moved(group: dict[str, Any], by: int) -> dict[str, Any]:
    return group | {"params": [number + by for number in group["params"]]}


def _fusible(model: nn.Module) -> bool:
    """Whether AdamW has a fused kernel for the model's device."""
    return all(p.device.type in ("cpu", "cuda") for p in model.parameters())
