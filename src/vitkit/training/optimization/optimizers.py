"""Optimizers: AdamW, Adam, SGD, Muon, and the optimizers of the pytorch-optimizer library."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypedDict

import torch
from torch import Tensor, nn, optim

from vitkit.errors import SettingError
from vitkit.training.config.run_config import RunConfig
from vitkit.training.optimization.muon import BatchedMuon
from vitkit.training.optimization.optimizer_library import library_optimizer
from vitkit.training.optimization.parameter_groups import parameter_groups

FUSED = 3
"""Matrices in a fused qkv weight; Muon orthogonalises query, key and value separately."""
OPTIMIZERS = ("adamw", "sgd", "adam", "muon")
"""vitkit's own optimizers; other names are looked up in the pytorch-optimizer library."""


class _GroupSettings(TypedDict):
    """Arguments of `parameter_groups`."""

    lr: float
    weight_decay: float
    layer_decay: float


def check_optimizer(name: str) -> None:
    """Refuse a name without an optimizer that a run can be resumed with.

    Raises:
        SettingError: there is no such optimizer, or its state cannot be stored and restored.
        MissingExtraError: it is not one of vitkit's, and pytorch-optimizer is not installed.
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
    """Make the optimizer of a name for a model that is already on its device.

    Args:
        model: model whose parameters are optimised, except for frozen ones.
        name: `adamw`; `adam`, as in the ViT paper, with decoupled weight decay; `sgd`, with
            momentum and weight decay in the gradient; `muon`; or a name of the pytorch-optimizer
            library, with the library's defaults except for learning rate and weight decay.
        lr: learning rate.
        weight_decay: weight decay of matrices and kernels; see `parameter_groups`.
        betas: betas of AdamW, of Adam, and of the AdamW that is used beside Muon.
        momentum: momentum of SGD.
        layer_decay: factor of the learning rate from each layer to the one before it; see
            `parameter_groups`.

    Raises:
        SettingError: as `check_optimizer`; or Muon without a trainable matrix.
        MissingExtraError: as `check_optimizer`.
    """
    group_settings = _GroupSettings(lr=lr, weight_decay=weight_decay, layer_decay=layer_decay)
    if name == "muon":
        return MuonWithAdamW(model, betas=betas, **group_settings)
    groups = parameter_groups(model, **group_settings)
    fused = _has_fused_kernel(model)
    # Fused kernels update all parameters in one call.
    if name == "adamw":
        return optim.AdamW(groups, lr=lr, betas=betas, fused=fused)
    if name == "adam":
        return optim.Adam(groups, lr=lr, betas=betas, fused=fused, decoupled_weight_decay=True)
    if name == "sgd":
        return optim.SGD(groups, lr=lr, momentum=momentum, fused=fused)
    return library_optimizer(name, OPTIMIZERS)(groups, lr=lr)


def configured_optimizer(model: nn.Module, settings: RunConfig) -> optim.Optimizer:
    """Make the optimizer of a run from its settings; errors as for `make_optimizer`."""
    return make_optimizer(
        model,
        settings.opt,
        lr=settings.lr,
        weight_decay=settings.weight_decay,
        betas=(settings.beta1, settings.beta2),
        momentum=settings.momentum,
        layer_decay=settings.layer_decay,
    )


class MuonWithAdamW(optim.Optimizer):
    """Muon for the matrices of the blocks and AdamW for everything else, as one optimizer.

    Muon replaces the momentum of a matrix by the nearest orthogonal matrix (K. Jordan et al.,
    "Muon: An optimizer for hidden layers in neural networks", 2024). Its step is scaled to that of
    AdamW (arXiv 2502.16982, Eq. 4), so that one learning rate fits both. The fused qkv matrix is
    orthogonalised as three matrices.
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
        trainable: dict[str, nn.Parameter] = {}
        matrices: dict[str, nn.Parameter] = {}
        for name, parameter in model.named_parameters():
            if parameter.requires_grad:
                trainable[name] = parameter
                if name.startswith("blocks.") and parameter.ndim == 2:
                    matrices[name] = parameter
        if not matrices:
            raise SettingError(
                "--opt muon trains the matrices of blocks, and all of them are frozen; pass "
                "--opt adamw"
            )
        group_settings = _GroupSettings(lr=lr, weight_decay=weight_decay, layer_decay=layer_decay)
        self._names = {id(whole): name for name, whole in matrices.items()}
        # Parameter of the model, number of the matrix in it, and that matrix as a view.
        self._parts: list[tuple[nn.Parameter, int, nn.Parameter]] = []
        groups = parameter_groups(model, **group_settings, only=matrices)
        for group in groups:
            views = []
            for whole in group["params"]:
                for number, view in enumerate(self._split(whole, whole.data)):
                    part = nn.Parameter(view)
                    views.append(part)
                    self._parts.append((whole, number, part))
            group["params"] = views
        self._muon = BatchedMuon(groups, lr=lr, weight_decay=weight_decay)
        rest = trainable.keys() - matrices.keys()
        other_groups = parameter_groups(model, **group_settings, only=rest)
        fused = _has_fused_kernel(model)
        self._adamw = optim.AdamW(other_groups, lr=lr, betas=betas, fused=fused)
        super().__init__(list(trainable.values()), {"lr": lr})
        # A schedule writes learning rates into these groups, which both optimizers read.
        self.param_groups = [*self._muon.param_groups, *self._adamw.param_groups]

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Make one step of both optimizers, from the gradients of the model's own parameters."""
        # the override returns no loss, as no closure is called
        for whole, number, part in self._parts:
            gradient = whole.grad
            part.grad = None
            if gradient is not None:
                part.grad = self._split(whole, gradient)[number]
        # The parts are views, so that this changes the parameters of the model.
        self._muon.step()
        self._adamw.step()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the gradients of the model's own parameters."""
        for whole, _, part in self._parts:
            whole.grad = part.grad = None
        self._adamw.zero_grad(set_to_none)

    def state_dict(self) -> dict[str, Any]:
        """Return both states as that of one optimizer, with Muon's parameters first."""
        muon = self._muon.state_dict()
        adamw = self._adamw.state_dict()
        first = len(self._parts)  # AdamW's parameters are numbered after Muon's
        state = muon["state"] | {first + n: values for n, values in adamw["state"].items()}
        groups = [_renumbered(group, first) for group in adamw["param_groups"]]
        return {"state": state, "param_groups": muon["param_groups"] + groups}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the state that `state_dict` returned."""
        first = len(self._parts)
        muon: dict[int, Any] = {}
        adamw: dict[int, Any] = {}
        for number, values in state_dict["state"].items():
            if number < first:
                muon[number] = values
            else:
                adamw[number - first] = values
        groups = state_dict["param_groups"]
        muon_groups = groups[: len(self._muon.param_groups)]
        adamw_groups = [_renumbered(group, -first) for group in groups[len(muon_groups) :]]
        self._muon.load_state_dict({"state": muon, "param_groups": muon_groups})
        self._adamw.load_state_dict({"state": adamw, "param_groups": adamw_groups})
        # Loading replaces the dictionaries of the groups.
        self.param_groups = [*self._muon.param_groups, *self._adamw.param_groups]

    def _split(self, whole: Tensor, values: Tensor) -> tuple[Tensor, ...]:
        """Return views of the matrices in one parameter, or in its gradient."""
        fused = self._names[id(whole)].endswith("qkv.weight")
        return values.chunk(FUSED) if fused else (values,)


def _renumbered(group: dict[str, Any], by: int) -> dict[str, Any]:
    # In a `state_dict`, parameters are numbers.
    return group | {"params": [number + by for number in group["params"]]}


def _has_fused_kernel(model: nn.Module) -> bool:
    """Return whether torch has a fused optimizer kernel for the model's device."""
    return all(p.device.type in ("cpu", "cuda") for p in model.parameters())
