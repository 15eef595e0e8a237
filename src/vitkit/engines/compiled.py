"""The engine `compile`: torch.compile with the inductor backend."""

from __future__ import annotations

import torch
from torch import Tensor

from vitkit.engines.eager import cast
from vitkit.engines.engine import EngineRequest, Forward
from vitkit.engines.inference_folds import fold_for_inference
from vitkit.engines.registry import compiler_name, has_compiler
from vitkit.errors import MissingExtraError
from vitkit.process import keep_freed_memory


def build_compiled(request: EngineRequest) -> Forward:
    """Return a compiled forward pass; the first batch compiles for up to a minute.

    On a processor its program is for any number of images, so that the last batch, and the batches
    of another process after a trial, find it compiled: about as fast as one for each size.
    A single image has a program of its own.

    Raises:
        MissingExtraError: no C++ compiler is installed.
    """
    refuse_no_compiler(request.device)
    model = cast(fold_for_inference(request.model), request.precision).requires_grad_(False)
    dtype = next(model.parameters()).dtype
    on_cpu = request.device.type == "cpu"
    if on_cpu:
        keep_freed_memory()
    run = torch.compile(model, options={"freezing": on_cpu})

    def forward(images: Tensor) -> Tensor:
        images = images.detach().to(dtype)
        if on_cpu:
            torch._dynamo.maybe_mark_dynamic(images, 0)
        # frozen weights are constants of the program, which gradients do not allow
        with torch.no_grad():
            logits: Tensor = run(images)
        return logits

    return forward


def refuse_no_compiler(device: torch.device) -> None:
    """Raise `MissingExtraError` if inductor has no compiler for a processor."""
    if device.type == "cpu" and not has_compiler():
        raise MissingExtraError(
            f"engine compile needs a C++ compiler, and {compiler_name()} is not on the PATH; "
            "install it, name another one in the variable CXX, or pass --engine torch"
        )
