"""The engines of torch: `torch` (eager) and `compile`."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable
from typing import TypeAlias

import torch
from torch import Tensor

from vitkit.engines.engine import EngineRequest, Forward
from vitkit.engines.inference_folds import fold_for_inference, fuse_gelu
from vitkit.engines.registry import compiler_name, has_compiler
from vitkit.errors import MissingExtraError
from vitkit.models.vit import ViT
from vitkit.process import keep_freed_memory

Capture: TypeAlias = Callable[[Forward, Tensor], Forward]
Kind: TypeAlias = tuple[torch.Size, torch.dtype]
"""Shape and dtype of images."""
WARM_UP_CALLS = 3
"""Calls on a side stream before a capture, in which libraries allocate their workspaces."""


def build_eager(request: EngineRequest) -> Forward:
    """Return the model's forward pass in the precision of the request, without autocast."""
    if request.device.type == "cpu":
        keep_freed_memory()
    model = cast(request.model, request.precision)
    dtype = next(model.parameters()).dtype

    def forward(images: Tensor) -> Tensor:
        logits: Tensor = model(images.to(dtype))
        return logits

    return SingleImageGraph(forward) if request.device.type == "cuda" else forward


def _capture_graph(forward: Forward, images: Tensor) -> Forward:
    """Return the CUDA graph of a forward pass, as a function of images of this shape and dtype."""
    given = images.clone()
    with torch.cuda.device(images.device):
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(WARM_UP_CALLS):
                forward(given)
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            output = forward(given)

    def replay(images: Tensor) -> Tensor:
        with torch.cuda.device(given.device):
            given.copy_(images)
            graph.replay()
            return output.clone()  # the next replay overwrites it

    return replay


def cast(model: ViT, precision: str) -> ViT:
    """Return a model in a precision: itself in float32, else a copy with other weights.

    A model whose weights are of half precision already stays as it is.
    """
    like = next(model.parameters())
    if precision == "bfloat16" and like.dtype == torch.float32:
        model = copy.deepcopy(model).to(torch.bfloat16)
        if like.is_cuda:
            fuse_gelu(model)
    return model


class SingleImageGraph:
    """A forward pass on a GPU that captures a CUDA graph for single images, at the second one.

    One image is not enough work for a GPU: its time is that of starting some 150 kernels, which a
    graph starts at once (`docs/benchmarks.md`, "On a GPU"). Other batches run as they are, and so
    do single images of another shape or dtype than those of the graph.

    Args:
        forward: (B, C, H, W) -> (B, K), without any wait for the GPU inside.
        capture: makes the graph of `forward` for an image, as a function from such an image.
    """

    def __init__(self, forward: Forward, capture: Capture = _capture_graph) -> None:
        self._forward = forward
        self._capture = capture
        self._lock = threading.Lock()  # a graph has one input and one output
        self._seen: Kind | None = None
        self._graphs: dict[Kind, Forward] = {}
        """At most one: each graph holds the memory of a forward pass."""

    def __call__(self, images: Tensor) -> Tensor:
        """Return the outputs (B, K)."""
        if len(images) != 1:
            return self._forward(images)
        kind = (images.shape, images.dtype)
        with self._lock, torch.inference_mode():
            if not self._graphs and self._seen == kind:  # not the first one: there may be no other
                self._graphs[kind] = self._capture(self._forward, images)
            self._seen = kind
            return self._graphs.get(kind, self._forward)(images)


# The engine `compile`: torch.compile with the inductor backend.


def build_compiled(request: EngineRequest) -> Forward:
    """Return a compiled forward pass; the first batch compiles for up to a minute.

    On a processor its program is for any number of images, so that the last batch, and the batches
    of another process after a trial, find it compiled: about as fast as one for each size.
    A single image has a program of its own.

    Raises:
        MissingExtraError: no C++ compiler is installed.
    """
    _refuse_no_compiler(request.device)
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


def _refuse_no_compiler(device: torch.device) -> None:
    """Raise `MissingExtraError` if inductor has no compiler for a processor."""
    if device.type == "cpu" and not has_compiler():
        raise MissingExtraError(
            f"engine compile needs a C++ compiler, and {compiler_name()} is not on the PATH; "
            "install it, name another one in the variable CXX, or pass --engine torch"
        )
