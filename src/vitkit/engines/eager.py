"""The engine `torch`: the model itself, its weights cast once; single images by a CUDA graph."""

from __future__ import annotations

import copy
import threading

import torch
from torch import Tensor

from vitkit.engines.engine import EngineRequest, Forward
from vitkit.models.vit import ViT

WARM_UP_CALLS = 3
"""Calls on a side stream before a capture, in which libraries allocate their workspaces."""


def build_eager(request: EngineRequest) -> Forward:
    """Return the model's forward pass in the precision of the request, without autocast."""
    model = cast(request.for_torch(), request.precision)
    dtype = next(model.parameters()).dtype

    def forward(images: Tensor) -> Tensor:
        logits: Tensor = model(images.to(dtype))
        return logits

    return SingleImageGraph(forward) if request.device.type == "cuda" else forward


def cast(model: ViT, precision: str) -> ViT:
    """Return a model in a precision: itself in float32, else a copy with other weights.

    A model whose weights are of half precision already stays as it is.
    """
    if precision == "bfloat16" and next(model.parameters()).dtype == torch.float32:
        return copy.deepcopy(model).to(torch.bfloat16)
    return model


class SingleImageGraph:
    """A forward pass on a GPU that captures a CUDA graph for single images, at the second one.

    One image is not enough work for a GPU: its time is that of starting some 150 kernels, which a
    graph starts at once (`docs/benchmarks.md`, "On a GPU"). Other batches run as they are.

    Args:
        forward: (B, C, H, W) -> (B, K), without any wait for the GPU inside.
    """

    def __init__(self, forward: Forward) -> None:
        self._forward = forward
        self._lock = threading.Lock()  # the graph has one input and one output
        self._seen: torch.Size | None = None
        self._graph: torch.cuda.CUDAGraph | None = None
        self._input = self._output = torch.empty(0)

    def __call__(self, images: Tensor) -> Tensor:
        """Return the outputs (B, K)."""
        if len(images) != 1:
            return self._forward(images)
        with self._lock, torch.cuda.device(images.device), torch.inference_mode():
            if self._graph is None:
                if self._seen != images.shape:  # the first one: there may be no other
                    self._seen = images.shape
                    return self._forward(images)
                self._capture(images)
            if images.shape != self._input.shape or images.dtype != self._input.dtype:
                return self._forward(images)
            assert self._graph is not None, "captured above"
            self._input.copy_(images)
            self._graph.replay()
            return self._output.clone()

    def _capture(self, images: Tensor) -> None:
        given = images.clone()
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(WARM_UP_CALLS):
                self._forward(given)
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            output = self._forward(given)
        # all at once, after a capture that has succeeded
        self._graph, self._input, self._output = graph, given, output
