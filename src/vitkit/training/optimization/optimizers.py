"""Optimizers: AdamW, Adam, SGD, Muon, and the optimizers of the pytorch-optimizer library."""

from __future__ import annotations

import json
import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, TypedDict

import torch
from torch import Tensor, nn, optim
from torch.optim.optimizer import ParamsT

from vitkit.errors import CheckpointError, MissingExtraError, SettingError
from vitkit.messages import did_you_mean
from vitkit.training.config.train_config import RunConfig
from vitkit.training.optimization.parameters import parameter_groups
from vitkit.training.state.registry import OptimizerPart

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
        _library_optimizer(name)


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
    return _library_optimizer(name)(groups, lr=lr)


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


# torch's Muon, with small matrices of equal shape orthogonalised in one batch.
#
# K. Jordan et al., "Muon: An optimizer for hidden layers in neural networks" (2024). A small
# Transformer has dozens of small matrices; one by one, launching the products takes longer than
# computing them. The results are bitwise equal to torch's (`tests/training/test_optimizers.py`).

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
        directions = _orthogonalise(
            torch._foreach_lerp(gradients, buffers, momentum),
            group["ns_coefficients"],
            group["ns_steps"],
            group["eps"],
        )
        # 0.2 is about the root mean square of an update of AdamW.
        scale = 0.2 * math.sqrt(max(matrices[0].shape))
        torch._foreach_mul_(matrices, 1 - lr * group["weight_decay"])
        torch._foreach_add_(matrices, directions, alpha=-lr * scale)


def _orthogonalise(
    matrices: Sequence[Tensor], coefficients: Sequence[float], steps: int, eps: float
) -> list[Tensor]:
    """Return nearly orthogonal matrices (R, C) in bfloat16: quintic Newton-Schulz iteration."""
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
    others = OPTIMIZERS
    # imported here: an optional dependency, and a slow one
    try:
        import pytorch_optimizer as library
    except ImportError:
        near = did_you_mean(name, others)
        raise MissingExtraError(
            f"--opt {name!r} is none of {', '.join(others)}{near}; for others install the "
            "pytorch-optimizer library: pip install 'vitkit[optim]'"
        ) from None
    known = library.get_supported_optimizers()
    if name not in known:
        near = did_you_mean(name, dict.fromkeys([*others, *known]), count=2)
        raise SettingError(
            f"--opt {name!r} does not exist{near}; pass {', '.join(others)}, or one of the "
            "pytorch-optimizer library, such as lamb, lion or adan"
        )
    optimizer_class: OptimizerFactory = library.load_optimizer(name)
    problem = _resume_problem(optimizer_class)
    if name in OTHER_WEIGHTS:
        problem = "it trains other weights than it evaluates"
    if problem is not None:
        raise SettingError(f"--opt {name} cannot be used here: {problem}; pass adamw, lamb or lion")
    return optimizer_class


@cache
def _resume_problem(optimizer_class: OptimizerFactory) -> str | None:
    """Test whether a run can resume with this optimizer; return one line if it cannot."""
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(0)
        straight = [nn.Parameter(torch.randn(shape)) for shape in SHAPES]
        resumed = [nn.Parameter(parameter.detach().clone()) for parameter in straight]
        try:
            _train(optimizer_class, straight)
            _train(optimizer_class, resumed, stored_after=STORED_AFTER)
        except CheckpointError as error:
            return str(error)
        except Exception as error:  # noqa: BLE001 - whatever a hundred optimizers raise
            return f"{type(error).__name__}: {error}"
    for expected, actual in zip(straight, resumed, strict=True):
        # Bit-exact: in a run, a single rounding difference grows.
        if not torch.equal(expected, actual):
            return "a resumed run would not continue in the same way"
    return None


def _train(
    optimizer_class: OptimizerFactory,
    parameters: list[nn.Parameter],
    stored_after: int | None = None,
) -> None:
    """Take `STEPS` steps with random gradients, storing and restoring the state after some."""
    optimizer = _make(optimizer_class, parameters)
    for step in range(STEPS):
        if step == stored_after:
            optimizer = _store_and_restore(optimizer, _make(optimizer_class, parameters))
        # The same gradients, and the same noise where an optimizer draws some, in both trials.
        torch.default_generator.manual_seed(step)
        for parameter in parameters:
            parameter.grad = torch.randn_like(parameter)
        optimizer.step()


def _make(optimizer_class: OptimizerFactory, parameters: list[nn.Parameter]) -> optim.Optimizer:
    # two groups, as the parameters of a model have
    decayed = {"params": parameters[:2], "weight_decay": 0.1}
    not_decayed = {"params": parameters[2:], "weight_decay": 0.0}
    return optimizer_class([decayed, not_decayed], lr=1e-2)


def _store_and_restore(old: optim.Optimizer, new: optim.Optimizer) -> optim.Optimizer:
    """Fill a new optimizer from the state of an old one, as a checkpoint would."""
    part = OptimizerPart(old)
    tensors = {name: tensor.clone() for name, tensor in part.tensors().items()}
    try:
        metadata: dict[str, Any] = json.loads(json.dumps(part.metadata()))
    except TypeError:
        raise CheckpointError("its state holds more than tensors and numbers") from None
    OptimizerPart(new).load(tensors, metadata)
    return new
