"""Import of torchvision beside a torch that its compiled library does not fit."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import torch

OPERATORS = (
    "nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    "qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
)
"""Operators that torchvision's Python files name while they are imported."""
_DECLARED: list[torch.library.Library] = []
"""Libraries that must live as long as the process."""


def declare_missing_operators() -> None:
    """Declare torchvision's operators where its compiled library cannot be loaded.

    The package index has wheels of torchvision for CUDA alone. Beside a torch for processors their
    library does not load, and `import torchvision` fails, as does that of timm, which needs it. The
    models of both use none of these operators. Do nothing where the library loads. Only processes
    of benchmarks do this: a user's process would lose the error of a broken installation.
    """
    found = importlib.util.find_spec("torchvision")
    if found is None or found.origin is None or hasattr(torch.ops.torchvision, "nms"):
        return
    for library in Path(found.origin).parent.glob("_C*.so"):
        try:
            torch.ops.load_library(str(library))
        except OSError:
            continue
        return
    operators = torch.library.Library("torchvision", "DEF")
    for signature in OPERATORS:
        operators.define(signature)
    _DECLARED.append(operators)
