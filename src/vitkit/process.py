"""Process-wide settings: cores, memory, threads, fast imports, and a record of Ctrl-C.

The command line applies them to itself and to the processes that it starts, and torch's engines
keep freed memory. A script that imports vitkit decides for itself; `docs/benchmarks.md` lists the
settings.
"""

from __future__ import annotations

import functools
import gc
import math
import os
import signal
import sys
import sysconfig
from collections.abc import Iterator, MutableMapping
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType

SPINCOUNT = "1000"
"""Iterations that a thread of GNU OpenMP (libgomp) spins before it sleeps.

The default is 300,000 or more. Beside another busy program the threads of one step then wait for
each other while they occupy the cores that they wait for. Fewer iterations help a busy machine and
cost a free one time, in small models most: docs/benchmarks.md has the figures of
`benchmarks/busy.py`.
"""
WAIT_VARIABLES = ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")
"""Environment variables with which a user sets how threads wait."""
M_TRIM_THRESHOLD = -1
M_MMAP_THRESHOLD = -3
"""Numbers of `mallopt`'s parameters, from glibc's malloc.h."""
KEPT_BYTES = 2**30
"""Free memory at the end of the heap that is kept, and the size from which a block is returned."""
OLD_KEPT_BYTES = 2**25
"""The largest such block for older versions of glibc."""
INTERRUPTS: list[int] = []
"""Every Ctrl-C since `remember_interrupts`."""


def remember_interrupts() -> None:
    """Note each Ctrl-C in `INTERRUPTS`, beside the exception that it raises.

    Some libraries drop an exception that comes while they are imported, and fail with another one
    later. Where Ctrl-C is ignored, as in a background job, it stays ignored.
    """
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, note_interrupt)


def note_interrupt(signum: int, frame: FrameType | None) -> None:
    """Handle a Ctrl-C: note it, and raise `KeyboardInterrupt`."""
    INTERRUPTS.append(signum)
    signal.default_int_handler(signum, frame)


def shorten_spinning(environment: MutableMapping[str, str]) -> None:
    """Let waiting OpenMP threads sleep early; call it before torch is imported.

    Args:
        environment: changed in place, unless it has one of `WAIT_VARIABLES`: the user's choice.
    """
    if not any(name in environment for name in WAIT_VARIABLES):
        environment["GOMP_SPINCOUNT"] = SPINCOUNT


def child_environment() -> dict[str, str]:
    """Return the variables of a child process of Python, which finds this same vitkit.

    Its waiting threads leave the cores to others, unless the user has chosen otherwise.
    """
    variables = dict(os.environ)
    shorten_spinning(variables)
    root = str(Path(__file__).parents[1])
    if root != sysconfig.get_path("purelib"):  # an installed vitkit is found anyway
        known = variables.get("PYTHONPATH")
        variables["PYTHONPATH"] = root if not known else f"{root}{os.pathsep}{known}"
    return variables


def available_cores(root: Path = Path("/")) -> int:
    """Return the number of cores that this process may use, 1 or more.

    A container or a job of a cluster often has fewer than the machine: as it may run on some cores
    alone (affinity), or gets a share of the time of all (the CPU quota of a control group).

    Args:
        root: root of the file system with /proc and /sys.
    """
    cores = os.cpu_count() or 1
    if hasattr(os, "sched_getaffinity"):
        cores = len(os.sched_getaffinity(0))
    for limit in _group_limits(root):
        with suppress(ValueError):
            quota, period = limit.split()
            if quota not in ("max", "-1"):
                cores = min(cores, math.ceil(int(quota) / int(period)))
    return cores


def _group_limits(root: Path) -> Iterator[str]:
    """Generate the limit of each of the process's control groups: quota and period of its cores.

    Source: "Control Group v2" (`cpu.max`) and "CFS Bandwidth Control" (v1), documentation of Linux.
    """
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:  # not Linux, or /proc is hidden
        return
    for line in lines:  # 0::/job (v2), or 4:cpu,cpuacct:/job (v1)
        _, controllers, name = line.split(":", 2)
        top = root / "sys/fs/cgroup"
        files: tuple[str, ...] = ("cpu.max",)
        if "cpu" in controllers.split(","):
            top, files = top / "cpu", ("cpu.cfs_quota_us", "cpu.cfs_period_us")
        group = top / name.strip("/")
        # a limit of a group applies to all groups in it
        while group.is_relative_to(top):
            with suppress(OSError):
                yield " ".join((group / file).read_text().strip() for file in files)
            group = group.parent


@functools.cache
def keep_freed_memory() -> None:
    """Let glibc keep freed memory for the next call, instead of returning it to the system.

    A returned page is filled with zeros by the system when it is used again: 50,000 of 4 kB in each
    forward pass of 8 images by a ViT-B/16. The process may need more memory for it, above all while
    models are converted, so it is called for torch alone. Do nothing with another C library, or if
    the user has set one of glibc's `MALLOC_` variables. Source: mallopt(3).
    """
    # imported here: no other command waits for them
    import ctypes
    import platform

    if platform.libc_ver()[0] != "glibc":
        return
    if any(name.startswith("MALLOC_") for name in os.environ):
        return
    mallopt = ctypes.CDLL(None).mallopt
    # a freed block below this size stays in the heap, and the heap keeps its end
    if not mallopt(M_MMAP_THRESHOLD, KEPT_BYTES):
        mallopt(M_MMAP_THRESHOLD, OLD_KEPT_BYTES)
    mallopt(M_TRIM_THRESHOLD, KEPT_BYTES)


@contextmanager
def uncollected_imports() -> Iterator[None]:
    """Import torch without garbage collections, which take a tenth of the time of a short command.

    They go through all new objects again and again, and modules are never garbage. What is there at
    the end is left out of later collections, too. Do nothing if torch is imported already.
    """
    if "torch" in sys.modules or not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()
