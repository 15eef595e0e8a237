"""The model as a `torch.export` program, from which the files of other runtimes are made."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn
from torch.export import Dim, ExportedProgram

from vitkit.errors import SettingError

INPUT = "images"
"""Name of the input, (B, C, H, W)."""
OUTPUT = "logits"
"""Name of the output, (B, K)."""
EXAMPLE_BATCH = 2
"""Batch size of the example input; a batch of one would be exported as a constant."""


def export_program(
    model: nn.Module, in_channels: int, image_size: tuple[int, int]
) -> ExportedProgram:
    """Return a model's program for batches of any size (`torch.export`).

    Args:
        model: (B, C, H, W) -> (B, K); in eval mode, on the CPU.
        in_channels: C.
        image_size: (H, W) of all images, in pixels.

    Raises:
        SettingError: a model that torch cannot export, with torch's reason.
    """
    like = next(model.parameters())
    example = torch.zeros(EXAMPLE_BATCH, in_channels, *image_size, dtype=like.dtype)
    shapes = ({0: Dim("batch", min=1)},)
    try:
        with torch.no_grad(), without_warnings():
            return torch.export.export(model, (example,), dynamic_shapes=shapes, strict=False)
    except Exception as error:  # torch raises many kinds
        reason = str(error).strip().partition("\n")[0]
        raise SettingError(
            f"torch cannot export this model ({type(error).__name__}: {reason}); pass --engine "
            "torch, and report the model"
        ) from error


@contextmanager
def without_warnings() -> Iterator[None]:
    """Hide the warnings of exporters and converters about their internals."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
