"""Check whether torch.compile works on this machine."""

from __future__ import annotations

import torch


def compiler_problem(device: torch.device) -> str | None:
    """Return in a few words why torch.compile cannot work on a device; `None` if it can."""
    # Imported here: importing a compiler takes a second.
    if device.type == "cuda":
        from torch.utils._triton import has_triton

        return None if has_triton() else "there is no Triton for this GPU"
    from torch._inductor.cpp_builder import get_cpp_compiler
    from torch._inductor.exc import InvalidCxxCompiler

    try:
        get_cpp_compiler()
    except InvalidCxxCompiler:
        return "there is no C++ compiler here"
    return None
