"""Any optimizer of the pytorch-optimizer library, where its state survives being stored.

The library has over a hundred. Which of them a run can be stopped and resumed with is not a list
but a trial: a few steps on toy parameters, with and without the state stored in between.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from functools import cache
from typing import Any

import torch
from torch import nn, optim

from vitkit.errors import CheckpointError, MissingExtraError, SettingError, did_you_mean
from vitkit.training.state.registry import OptimizerPart

MORE_THAN_A_GRADIENT = {
    **dict.fromkeys(("lbfgs", "sam", "asam", "gsam", "wsam", "looksam", "friendlysam", "bsam",
                     "alig"), "asks for the loss several times a step"),
    **dict.fromkeys(("adahessian", "sophiah"), "asks for second derivatives"),
    **dict.fromkeys(("schedulefreeadamw", "schedulefreesgd", "schedulefreeradam", "splus"),
                    "trains other weights than it evaluates"),
}  # fmt: skip
"""Optimizers that want more of the training step than a gradient, and what."""
STEPS, STORED_AFTER = 12, 7
"""Of the trial: past the five or six steps after which some of them look ahead."""
SHAPES = ((4, 6), (4, 3, 2, 2), (1, 1, 4), (4,))
"""A matrix, a kernel, a token and a bias."""

Make = Callable[..., optim.Optimizer]


def library_optimizer(name: str, others: Iterable[str] = ()) -> Make:
    """The class of a name, in lower case: `lamb`, `lion`, `adan` ...

    Args:
        name: as the library lists it.
        others: names that are meant as well, for a did-you-mean.

    Raises:
        SettingError: no such name, or one that a run cannot use or not be resumed with.
        MissingExtraError: pytorch-optimizer is not installed.
    """
    if name in MORE_THAN_A_GRADIENT:
        raise SettingError(
            f"opt {name} {MORE_THAN_A_GRADIENT[name]}, which a training step here does not do; "
            f"take adamw, lamb or lion"
        )
    try:
        import pytorch_optimizer as library
    except ImportError:
        near = did_you_mean(name, others)
        raise MissingExtraError(
            f"opt {name!r} is none of {', '.join(others)}{near}; others need the pytorch-optimizer "
            f"library: pip install 'vitkit[optim]'"
        ) from None
    known = library.get_supported_optimizers()
    if name not in known:
        near = did_you_mean(name, dict.fromkeys([*others, *known]), count=2)
        raise SettingError(
            f"there is no optimizer {name!r}{near}; take {', '.join(others)} or one of "
            f"pytorch_optimizer.get_supported_optimizers()"
        )
    kind: Make = library.load_optimizer(name)
    problem = _problem(kind)
    if problem is not None:
        raise SettingError(f"opt {name} cannot be used here: {problem}; take adamw, lamb or lion")
    return kind


@cache
def _problem(kind: Make) -> str | None:
    """Why a run cannot go on from this optimizer's stored state, in a line."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        straight = [nn.Parameter(torch.randn(shape)) for shape in SHAPES]
        stopped = [nn.Parameter(p.detach().clone()) for p in straight]
        try:
            one, two = _made(kind, straight), _made(kind, stopped)
            for step in range(STEPS):
                if step == STORED_AFTER:
                    two = _stored_and_restored(two, _made(kind, stopped))
                for optimizer, parameters in ((one, straight), (two, stopped)):
                    torch.manual_seed(step)
                    for parameter in parameters:
                        parameter.grad = torch.randn_like(parameter)
                    optimizer.step()
        except CheckpointError as error:
            return str(error)
        except Exception as error:  # noqa: BLE001 - whatever a hundred optimizers raise
            return f"{type(error).__name__}: {error}"
    if all(torch.equal(a, b) for a, b in zip(straight, stopped, strict=True)):
        return None
    return "a run that is resumed would not go on as it was"


def _made(kind: Make, parameters: list[nn.Parameter]) -> optim.Optimizer:
    decayed, free = {"params": parameters[:2]}, {"params": parameters[2:]}
    return kind([decayed | {"weight_decay": 0.1}, free | {"weight_decay": 0.0}], lr=1e-2)


def _stored_and_restored(old: optim.Optimizer, new: optim.Optimizer) -> optim.Optimizer:
    part = OptimizerPart(old)
    tensors = {name: tensor.clone() for name, tensor in part.tensors().items()}
    try:
        values: dict[str, Any] = json.loads(json.dumps(part.values()))
    except TypeError:
        raise CheckpointError("its state is more than tensors and numbers") from None
    OptimizerPart(new).restore(tensors, values)
    return new
