"""Optimizers of the pytorch-optimizer library, if their state can be stored and restored.

The library has more than a hundred optimizers. Whether a run can be resumed with one of them is
decided by a trial, not by a list: a few steps on toy parameters, once straight and once with the
state stored and restored in between.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from functools import cache
from typing import Any

import torch
from torch import nn, optim

from vitkit.errors import CheckpointError, MissingExtraError, SettingError
from vitkit.messages import did_you_mean
from vitkit.training.state.registry import OptimizerPart

SEVERAL_LOSSES = ("lbfgs", "sam", "asam", "gsam", "wsam", "looksam", "friendlysam", "bsam", "alig")
SECOND_DERIVATIVES = ("adahessian", "sophiah")
OTHER_WEIGHTS = ("schedulefreeadamw", "schedulefreesgd", "schedulefreeradam", "splus")
UNSUPPORTED = {
    **dict.fromkeys(SEVERAL_LOSSES, "evaluates the loss several times per step"),
    **dict.fromkeys(SECOND_DERIVATIVES, "asks for second derivatives"),
    **dict.fromkeys(OTHER_WEIGHTS, "trains other weights than it evaluates"),
}
"""Optimizers that need more from the training step than a gradient, with the reason."""
STEPS, STORED_AFTER = 12, 7
"""Steps of the trial: more than the five or six after which some optimizers look ahead."""
SHAPES = ((4, 6), (4, 3, 2, 2), (1, 1, 4), (4,))
"""Parameters of the trial: a matrix, a kernel, a token and a bias."""

OptimizerFactory = Callable[..., optim.Optimizer]


def library_optimizer(name: str, others: Iterable[str] = ()) -> OptimizerFactory:
    """Return the optimizer class of a lower-case name, such as `lamb`, `lion` or `adan`.

    Args:
        name: a name in the library's list.
        others: vitkit's own names, for suggestions in messages.

    Raises:
        SettingError: there is no such name, or a run cannot use it, or cannot be resumed with it.
        MissingExtraError: pytorch-optimizer is not installed.
    """
    if name in UNSUPPORTED:
        raise SettingError(
            f"--opt {name} {UNSUPPORTED[name]}, which this training step does not support; pass "
            "adamw, lamb or lion"
        )
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
