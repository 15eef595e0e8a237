"""The machine: processor, instructions, versions, load, memory of a process."""

from __future__ import annotations

import importlib.util
import os
import platform
import re
import resource
import sys
from contextlib import suppress
from importlib import metadata
from pathlib import Path
from typing import Any

INSTRUCTIONS = (
    "avx2", "fma", "avx512f", "avx512_vnni", "avx_vnni", "avx512_bf16", "amx_tile", "amx_bf16",
    "amx_int8", "asimd", "bf16", "i8mm", "sve",
)  # fmt: skip
"""Flags of a processor that decide how fast matrix products can be."""
OPERATORS = ("nms", "qnms")
"""Operators that torchvision's Python files name while they are imported."""
KEPT: list[Any] = []
"""Torch libraries that must live as long as the process."""


def processor_name() -> str:
    """Return the processor's name and the number of cores."""
    name = _from_proc("cpuinfo", "model name") or platform.processor() or platform.machine()
    return f"{name}, {os.cpu_count()} cores"


def instruction_sets() -> list[str]:
    """Return those of `INSTRUCTIONS` that the processor has; none are known outside Linux."""
    flags = _from_proc("cpuinfo", "flags|Features").split()
    return [flag for flag in INSTRUCTIONS if flag in flags]


def named(package: str) -> str:
    """Return a package's name with its version, if it is installed."""
    with suppress(metadata.PackageNotFoundError):
        return f"{package} {metadata.version(package)}"
    return package


def machine_facts() -> dict[str, Any]:
    """Return what is known of the machine before a measurement; rows have the other versions."""
    return {
        "processor": processor_name(),
        "instructions": instruction_sets(),
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        "versions": [named("vitkit"), named("torch")],
        "load_before": os.getloadavg()[0],
    }


def restart_peak() -> None:
    """Forget the peak of memory so far, where the system can; source: proc(5), `clear_refs`."""
    with suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5", encoding="utf-8")


def peak_megabytes() -> float:
    """Return the most memory (resident set) that this process has had, in MB of 10^6 bytes."""
    found = _from_proc("self/status", "VmHWM")
    if found:
        return int(found.split()[0]) * 1024 / 1e6
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return most / 1e6 if sys.platform == "darwin" else most * 1024 / 1e6


def declare_missing_operators() -> None:
    """Declare torchvision's operators where its compiled library cannot be loaded.

    The package index has wheels of torchvision for CUDA alone. Beside a torch for processors their
    library does not load, and `import torchvision` fails, as does that of timm, which needs it. The
    models of both use none of these operators. Do nothing where the library loads.
    """
    import torch

    found = importlib.util.find_spec("torchvision")
    if found is None or found.origin is None or hasattr(torch.ops.torchvision, "nms"):
        return
    for library in Path(found.origin).parent.glob("_C*.so"):
        with suppress(OSError):
            torch.ops.load_library(str(library))
            return
    operators = torch.library.Library("torchvision", "DEF")
    for name in OPERATORS:
        operators.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    KEPT.append(operators)


def _from_proc(file: str, key: str) -> str:
    """Return the first value of a key in a file of /proc; empty outside Linux."""
    with suppress(OSError):
        text = Path("/proc", file).read_text(encoding="utf-8")
        found = re.search(rf"^(?:{key})\s*:\s*(.+)", text, flags=re.MULTILINE)
        if found:
            return found[1]
    return ""
