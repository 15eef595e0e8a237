"""The engine `torch`: the model itself, with its weights cast once."""

from __future__ import annotations

import copy

import torch
from torch import Tensor

from vitkit.engines.engine import EngineRequest, Forward
from vitkit.models.vit import ViT


def build_eager(request: EngineRequest) -> Forward:
    """Return the model's forward pass in the precision of the request, without autocast."""
    model = cast(request.for_torch(), request.precision)
    dtype = next(model.parameters()).dtype

    def forward(images: Tensor) -> Tensor:
        logits: Tensor = model(images.to(dtype))
        return logits

    return forward


def cast(model: ViT, precision: str) -> ViT:
    """Return a model in a precision: itself in float32, else a copy with other weights.

    A model whose weights are of half precision already stays as it is.
    """
    if precision == "bfloat16" and next(model.parameters()).dtype == torch.float32:
        return copy.deepcopy(model).to(torch.bfloat16)
    return model
