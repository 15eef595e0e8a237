"""The machine that was measured: processor, its instructions, versions, load, and stolen time."""

from __future__ import annotations

import os
import platform
import re
from collections.abc import Iterable
from contextlib import suppress
from importlib import metadata
from pathlib import Path
from typing import Any

from vitkit.process import available_cores

INSTRUCTIONS = (
    "avx2",
    "fma",
    "avx512f",
    "avx512_vnni",
    "avx_vnni",
    "avx512_bf16",
    "amx_tile",
    "amx_bf16",
    "amx_int8",
    "asimd",
    "bf16",
    "i8mm",
    "sve",
)
"""Flags of a processor that decide how fast matrix products can be."""
QUIET_LOAD = 0.3
"""Load average over one minute up to which a machine counts as idle."""


def processor_name() -> str:
    """Return the processor's name and the number of cores."""
    name = platform.processor() or platform.machine()
    found = re.search(r"model name\s*: (.+)", _cpuinfo())
    if found:
        name = found[1]
    return f"{name}, {os.cpu_count()} cores"


def _cpuinfo() -> str:
    """Return what Linux knows of its processors; nothing elsewhere."""
    with suppress(OSError):
        return Path("/proc/cpuinfo").read_text(encoding="utf-8")
    return ""


def instruction_sets() -> list[str]:
    """Return those of `INSTRUCTIONS` that the processor has; none are known outside Linux."""
    found = re.search(r"^(?:flags|Features)\s*: (.+)", _cpuinfo(), flags=re.MULTILINE)
    flags = set(found[1].split()) if found else set()
    return [flag for flag in INSTRUCTIONS if flag in flags]


def installed_versions(distributions: Iterable[str]) -> dict[str, str]:
    """Return the installed version of each package; those that are missing are left out."""
    installed: dict[str, str] = {}
    for name in distributions:
        with suppress(metadata.PackageNotFoundError):
            installed[name] = metadata.version(name)
    return installed


def stolen_seconds() -> float | None:
    """Return the seconds that a virtual machine's cores were given to others since its start.

    None where the system does not count them. Source: proc(5), `/proc/stat`, `steal`.
    """
    with suppress(OSError, ValueError, IndexError):
        first = Path("/proc/stat").read_text(encoding="utf-8").split("\n", 1)[0]
        return int(first.split()[8]) / float(os.sysconf("SC_CLK_TCK"))
    return None


class MachineRecord:
    """Facts of the machine before and after a measurement.

    Args:
        distributions: packages whose versions count.
    """

    def __init__(self, distributions: Iterable[str]) -> None:
        self._before = stolen_seconds()
        self._facts: dict[str, Any] = {
            "processor": processor_name(),
            "available_cores": available_cores(),
            "instructions": instruction_sets(),
            "system": f"{platform.system()} {platform.release()}",
            "python": platform.python_version(),
            "versions": installed_versions(distributions),
            "load_before": os.getloadavg()[0],
        }

    def to_json(self) -> dict[str, Any]:
        """Return the facts, with the seconds that were stolen since the record was begun."""
        now = stolen_seconds()
        stolen = None
        if now is not None and self._before is not None:
            stolen = now - self._before
        return {**self._facts, "stolen_seconds": stolen}
