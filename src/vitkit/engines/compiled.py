"""The engine `compile`: torch's inductor, which writes and compiles a program for the model."""

from __future__ import annotations

import shutil

import torch
from torch import Tensor, nn

from vitkit.engines.eager import cast
from vitkit.engines.engine import EngineRequest, Forward
from vitkit.errors import MissingExtraError

COMPILERS = ("c++", "g++", "clang++", "cl")
"""Programs of which inductor needs one on a processor."""


def build_compiled(request: EngineRequest) -> Forward:
    """Return a compiled forward pass; the first batch of each size compiles for up to a minute.

    Raises:
        MissingExtraError: no C++ compiler is installed.
    """
    refuse_no_compiler(request.device)
    model = cast(request.for_runtimes(), request.precision).requires_grad_(False)
    dtype = next(model.parameters()).dtype
    run = torch.compile(model, options={"freezing": request.device.type == "cpu"})

    def forward(images: Tensor) -> Tensor:
        # frozen weights are constants of the program, which gradients do not allow
        with torch.no_grad():
            logits: Tensor = run(images.to(dtype))
        return logits

    return forward


def refuse_no_compiler(device: torch.device) -> None:
    """Raise `MissingExtraError` if inductor has no compiler for a processor."""
    if device.type == "cpu" and not any(map(shutil.which, COMPILERS)):
        raise MissingExtraError(
            "engine compile needs a C++ compiler, and none is on the PATH: install g++ "
            "(apt install g++), or pass --engine torch"
        )


def is_compiled(module: nn.Module) -> bool:
    """Return True for a module that `torch.compile` returned."""
    return hasattr(module, "_orig_mod")
