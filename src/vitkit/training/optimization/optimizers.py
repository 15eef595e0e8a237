"""The optimizers: AdamW with its decay kept where it belongs, SGD, Adam, Muon, and a library's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypedDict

import torch
from torch import Tensor, nn, optim

from vitkit.errors import SettingError
from vitkit.training.config.train_config import TrainConfig
from vitkit.training.optimization.muon import BatchedMuon
from vitkit.training.optimization.optimizer_library import library_optimizer
from vitkit.training.optimization.parameter_groups import parameter_groups

FUSED = 3
"""Query, key and value lie in one matrix; Muon treats them as the three that they are."""
OPTIMIZERS = ("adamw", "sgd", "adam", "muon")
"""Those of vitkit; every other name is one of the pytorch-optimizer library."""


class _Pace(TypedDict):
    """What `parameter_groups` makes groups by."""

    lr: float
    weight_decay: float
    layer_decay: float


def check_optimizer(name: str) -> None:
    """Whether there is an optimizer of this name that a run can be resumed with.

    Raises:
        SettingError: none, or one whose state cannot be stored and restored.
        MissingExtraError: not one of vitkit's, and pytorch-optimizer is not installed.
    """
    if name not in OPTIMIZERS:
        library_optimizer(name, OPTIMIZERS)


def make_optimizer(
    model: nn.Module,
    name: str,
    *,
    lr: float,
    weight_decay: float,
    betas: tuple[float, float],
    momentum: float = 0.9,
    layer_decay: float = 1.0,
) -> optim.Optimizer:
    """The optimizer of a setting's name over a model already on its device.

    Args:
        model: its parameters that are not frozen are taken.
        name: `adamw`; `adam`, as in the ViT paper, whose decay is decoupled too; `sgd`, with
            momentum and decay in the gradient; `muon`; or a name of the pytorch-optimizer library,
            with the library's own defaults for all but the rate and the decay.
        lr: learning rate.
        weight_decay: of matrices and kernels; see `parameter_groups`.
        betas: of AdamW, Adam and the AdamW beside Muon.
        momentum: of SGD.
        layer_decay: how much slower each earlier layer learns; see `parameter_groups`.

    Raises:
        SettingError: as `check_optimizer`; Muon without a matrix that trains.
        MissingExtraError: as `check_optimizer`.
    """
    pace = _Pace(lr=lr, weight_decay=weight_decay, layer_decay=layer_decay)
    if name == "muon":
        return MuonWithAdamW(model, betas=betas, **pace)
    groups, fused = parameter_groups(model, **pace), _fusible(model)
    if name == "adamw":
        return optim.AdamW(groups, lr=lr, betas=betas, fused=fused)
    if name == "adam":
        return optim.Adam(groups, lr=lr, betas=betas, fused=fused, decoupled_weight_decay=True)
    if name == "sgd":
        return optim.SGD(groups, lr=lr, momentum=momentum, fused=fused)
    return library_optimizer(name, OPTIMIZERS)(groups, lr=lr)


def configured_optimizer(model: nn.Module, config: TrainConfig) -> optim.Optimizer:
    """The optimizer of a run; errors as for `make_optimizer`."""
    return make_optimizer(
        model,
        config.opt,
        lr=config.lr,
        weight_decay=config.weight_decay,
        betas=(config.beta1, config.beta2),
        momentum=config.momentum,
        layer_decay=config.layer_decay,
    )


class MuonWithAdamW(optim.Optimizer):
    """Muon for the matrices of the blocks, AdamW for everything else, behind one optimizer's face.

    Muon replaces a matrix's momentum by the nearest orthogonal matrix (K. Jordan et al., "Muon: An
    optimizer for hidden layers in neural networks", 2024). Its step is scaled to AdamW's (arXiv
    2502.16982, Eq. 4), so that one learning rate serves both. The fused qkv matrix is
    orthogonalised as three.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        lr: float,
        weight_decay: float,
        betas: tuple[float, float],
        layer_decay: float = 1.0,
    ) -> None:
        named = {n: p for n, p in model.named_parameters() if p.requires_grad}
        matrices = {n: p for n, p in named.items() if n.startswith("blocks.") and p.ndim == 2}
        if not matrices:
            raise SettingError("opt muon is for matrices of blocks, and none trains; take adamw")
        rest = {n: p for n, p in named.items() if n not in matrices}
        pace = _Pace(lr=lr, weight_decay=weight_decay, layer_decay=layer_decay)
        self._names = {id(whole): name for name, whole in matrices.items()}
        self._parts: list[tuple[nn.Parameter, int, nn.Parameter]] = []
        groups = parameter_groups(model, **pace, only=matrices)
        for group in groups:
            parts = [
                (whole, number, nn.Parameter(part))
                for whole in group["params"]
                for number, part in enumerate(self._split(whole, whole.data))
            ]
            group["params"] = [part for _, _, part in parts]
            self._parts += parts
        self._muon = BatchedMuon(groups, lr=lr, weight_decay=weight_decay)
        others = parameter_groups(model, **pace, only=rest)
        self._adamw = optim.AdamW(others, lr=lr, betas=betas, fused=_fusible(model))
        super().__init__(list(named.values()), {"lr": lr})
        self.param_groups = [*self._muon.param_groups, *self._adamw.param_groups]

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """One step of both, from the gradients of the model's own parameters."""
        for whole, number, part in self._parts:
            gradient = whole.grad
            part.grad = None
            if gradient is not None:
                part.grad = self._split(whole, gradient)[number]
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
        groups, mine = state_dict["param_groups"], len(self._muon.param_groups)
        self._muon.load_state_dict({"state": muon, "param_groups": groups[:mine]})
        moved = [_moved(group, -first) for group in groups[mine:]]
        self._adamw.load_state_dict({"state": adamw, "param_groups": moved})
        self.param_groups = [*self._muon.param_groups, *self._adamw.param_groups]

    def _split(self, whole: Tensor, values: Tensor) -> tuple[Tensor, ...]:
        """Views of the matrices that lie in one parameter, or in its gradient."""
        fused = self._names[id(whole)].endswith("qkv.weight")
        return values.chunk(FUSED) if fused else (values,)


def _moved(group: dict[str, Any], by: int) -> dict[str, Any]:
    return group | {"params": [number + by for number in group["params"]]}


def _fusible(model: nn.Module) -> bool:
    """Whether there is a fused kernel for the model's device."""
    return all(p.device.type in ("cpu", "cuda") for p in model.parameters())
