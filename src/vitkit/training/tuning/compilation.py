"""Check whether torch.compile works on this machine."""

from __future__ import annotations

import torch

from vitkit.engines.registry import has_compiler


def compiler_problem(device: torch.device) -> str | None:
    """Return in a few words why torch.compile cannot work on a device; `None` if it can."""
    if device.type == "cuda":
        from torch.utils._triton import has_triton  # imported here: it takes a second

        return None if has_triton() else "there is no Triton for this GPU"
    return None if has_compiler() else "there is no C++ compiler here"
