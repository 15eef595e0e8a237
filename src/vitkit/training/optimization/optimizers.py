"""Optimizers: AdamW, Adam, SGD, Muon, and the optimizers of the pytorch-optimizer library."""

import json
from collections.abc import Callable
from functools import cache, partial
from typing import Any

import torch
from torch import nn, optim

from vitkit import errors, messages
from vitkit.training.config.train_config import RunConfig
from vitkit.training.optimization.parameters import parameter_groups
from vitkit.training.state.registry import OptimizerPart

FUSED = 3
"""Matrices in a fused qkv weight; Muon orthogonalises query, key and value separately."""
OPTIMIZERS = ("adamw", "sgd", "adam", "muon")
"""vitkit's own optimizers; other names are looked up in the pytorch-optimizer library."""


def check_optimizer(name: str) -> None:
    """Refuse a name without an optimizer that a run can be resumed with.

    Raises:
        SettingError: there is no such optimizer, or its state cannot be stored and restored.
        MissingExtraError: it is not one of vitkit's, and pytorch-optimizer is not installed.
    """
    if name not in OPTIMIZERS:
        _library_optimizer(name)


def configured_optimizer(model: nn.Module, settings: RunConfig) -> optim.Optimizer:
    """Make the optimizer of a run for a model that is already on its device.

    Args:
        model: model whose parameters are optimised, except for frozen ones.
        settings: `opt` names it: `adamw`; `adam`, as in the ViT paper, with decoupled weight decay;
            `sgd`, with momentum and weight decay in the gradient; `muon`; or a name of the
            pytorch-optimizer library, with the library's defaults except for learning rate and
            weight decay. The betas are those of AdamW, of Adam, and of the AdamW beside Muon.

    Raises:
        SettingError, MissingExtraError: as `check_optimizer`.
        ValueError: Muon without a trainable matrix in a block, or without any other parameter.
    """
    lr, betas = settings.lr, (settings.beta1, settings.beta2)
    grouped = partial(
        parameter_groups,
        model,
        lr=lr,
        weight_decay=settings.weight_decay,
        layer_decay=settings.layer_decay,
    )
    # torch has kernels for these two that update all parameters in one call
    fused = all(p.device.type in ("cpu", "cuda") for p in model.parameters())
    if settings.opt == "muon":
        return MuonWithAdamW(model, grouped, lr=lr, betas=betas, fused=fused)
    groups = grouped()
    if settings.opt == "adamw":
        return optim.AdamW(groups, lr=lr, betas=betas, fused=fused)
    if settings.opt == "adam":
        return optim.Adam(groups, lr=lr, betas=betas, fused=fused, decoupled_weight_decay=True)
    if settings.opt == "sgd":
        return optim.SGD(groups, lr=lr, momentum=settings.momentum, fused=fused)
    return _library_optimizer(settings.opt)(groups, lr=lr)


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
        grouped: Callable[..., list[dict[str, Any]]],
        *,
        lr: float,
        betas: tuple[float, float],
        fused: bool,
    ) -> None:
        trainable = {name: p for name, p in model.named_parameters() if p.requires_grad}
        matrices = {
            name: p for name, p in trainable.items() if name.startswith("blocks.") and p.ndim == 2
        }
        fused_qkv = {id(p) for name, p in matrices.items() if name.endswith("qkv.weight")}
        # parameter of the model, its number of matrices, and one of them by number and as a view
        self._parts: list[tuple[nn.Parameter, int, int, nn.Parameter]] = []
        groups = grouped(only=matrices)
        for group in groups:
            views = []
            for whole in group["params"]:
                count = FUSED if id(whole) in fused_qkv else 1
                for number, view in enumerate(whole.data.chunk(count)):
                    views.append(nn.Parameter(view))
                    self._parts.append((whole, count, number, views[-1]))
            group["params"] = views
        self._muon = optim.Muon(groups, lr=lr, adjust_lr_fn="match_rms_adamw")
        rest = grouped(only=trainable.keys() - matrices.keys())
        self._adamw = optim.AdamW(rest, lr=lr, betas=betas, fused=fused)
        super().__init__([*self._muon.param_groups, *self._adamw.param_groups], {"lr": lr})
        self._share()

    def _share(self) -> None:
        """Let both optimizers work on the groups and the state of this one."""
        count = len(self._muon.param_groups)
        self._muon.param_groups = self.param_groups[:count]
        self._adamw.param_groups = self.param_groups[count:]
        self._muon.state = self._adamw.state = self.state

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Make one step of both optimizers, from the gradients of the model's own parameters."""
        # the override returns no loss, as no closure is called
        for whole, count, number, part in self._parts:
            part.grad = None if whole.grad is None else whole.grad.chunk(count)[number]
        # the parts are views, so this changes the parameters of the model
        self._muon.step()
        self._adamw.step()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the gradients of the model's own parameters, too."""
        super().zero_grad(set_to_none)
        for whole, *_ in self._parts:
            whole.grad = None

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the state that `state_dict` returned."""
        super().load_state_dict(state_dict)
        self._share()  # loading replaces the groups and the state


# Optimizers of the pytorch-optimizer library, if their state can be stored and restored.
#
# The library has more than a hundred optimizers. Whether a run can be resumed with one of them is
# decided by a trial, not by a list: a few steps on toy parameters, once straight and once with the
# state stored and restored in between.

OTHER_WEIGHTS = ("schedulefreeadamw", "schedulefreesgd", "schedulefreeradam", "splus")
"""Optimizers that train other weights than they evaluate, which no trial shows."""
STEPS, STORED_AFTER = 12, 7
"""Steps of the trial: more than the five or six after which some optimizers look ahead."""
SHAPES = ((4, 6), (4, 3, 2, 2), (1, 1, 4), (4,))
"""Parameters of the trial: a matrix, a kernel, a token and a bias."""

OptimizerFactory = Callable[..., optim.Optimizer]


def _library_optimizer(name: str) -> OptimizerFactory:
    """Return the optimizer class of a lower-case name, such as `lamb`, `lion` or `adan`."""
    # imported here: an optional dependency, and a slow one
    try:
        import pytorch_optimizer as library
    except ImportError:
        near = messages.did_you_mean(name, OPTIMIZERS)
        raise errors.MissingExtraError(
            f"--opt {name!r} is none of {', '.join(OPTIMIZERS)}{near}; for others install the "
            "pytorch-optimizer library: pip install 'vitkit[optim]'"
        ) from None
    known = library.get_supported_optimizers()
    if name not in known:
        near = messages.did_you_mean(name, dict.fromkeys([*OPTIMIZERS, *known]), count=2)
        raise errors.SettingError(
            f"--opt {name!r} does not exist{near}; pass {', '.join(OPTIMIZERS)}, or one of the "
            "pytorch-optimizer library, such as lamb, lion or adan"
        )
    optimizer_class: OptimizerFactory = library.load_optimizer(name)
    problem = _resume_problem(optimizer_class)
    if name in OTHER_WEIGHTS:
        problem = "it trains other weights than it evaluates"
    if problem is not None:
        raise errors.SettingError(
            f"--opt {name} cannot be used here: {problem}; pass adamw, lamb or lion"
        )
    return optimizer_class


@cache
def _resume_problem(optimizer_class: OptimizerFactory) -> str | None:
    """Test whether a run can resume with this optimizer; return one line if it cannot."""
    try:
        with torch.random.fork_rng(devices=[]):
            straight = _end_of_trial(optimizer_class)
            resumed = _end_of_trial(optimizer_class, stored_after=STORED_AFTER)
    except errors.Interrupted:
        raise
    except Exception as error:  # noqa: BLE001 - whatever a hundred optimizers raise
        return f"{type(error).__name__}: {error}"
    # bit-exact: in a run, a single rounding difference grows
    if all(map(torch.equal, straight, resumed)):
        return None
    return "a resumed run would not continue in the same way"


def _end_of_trial(
    optimizer_class: OptimizerFactory, stored_after: int | None = None
) -> list[nn.Parameter]:
    """Take `STEPS` steps with random gradients, storing and restoring the state after some."""
    torch.default_generator.manual_seed(0)
    parameters = [nn.Parameter(torch.randn(shape)) for shape in SHAPES]
    # two groups, as the parameters of a model have
    decayed = {"params": parameters[:2], "weight_decay": 0.1}
    not_decayed = {"params": parameters[2:], "weight_decay": 0.0}
    optimizer = optimizer_class([dict(decayed), dict(not_decayed)], lr=1e-2)
    for step in range(STEPS):
        if step == stored_after:
            part = OptimizerPart(optimizer)
            # as a saved state has them
            tensors = {name: tensor.clone() for name, tensor in part.tensors().items()}
            values = json.loads(json.dumps(part.metadata()))
            optimizer = optimizer_class([dict(decayed), dict(not_decayed)], lr=1e-2)
            OptimizerPart(optimizer).load(tensors, values)
        # The same gradients, and the same noise where an optimizer draws some, in both trials.
        torch.default_generator.manual_seed(step)
        for parameter in parameters:
            parameter.grad = torch.randn_like(parameter)
        optimizer.step()
    return parameters
