"""Settings of a whole process that make training on a processor faster.

The command line makes them for itself and for the processes that it starts. A script that imports
vitkit decides for itself; `docs/benchmarks.md` says what to set.
"""

from __future__ import annotations

import ctypes
import os
import platform
from collections.abc import MutableMapping

SPINCOUNT = "500"
"""Turns that a thread of GNU's OpenMP (libgomp) waits in a loop before it sleeps.

By default it is 300,000 and more. Beside another busy program the threads of one step then wait for
each other while they hold the cores that they wait for. `benchmarks/busy.py` measures it.
"""
WAITING = ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")
"""Variables by which a user decides how threads wait."""
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3
"""Numbers of `mallopt`'s parameters, from glibc's malloc.h."""
TRIM_BYTES, MMAP_BYTES = 2**30, 2**25
"""Free memory at the end of the heap that is kept, and the size from which memory comes from the
system and goes back to it. The second is the largest that glibc takes."""


def shorten_spinning(environment: MutableMapping[str, str]) -> None:
    """Let waiting OpenMP threads sleep soon; must happen before torch is imported.

    Args:
        environment: changed in place, unless it has one of `WAITING`: a user's own choice.
    """
    if not any(name in environment for name in WAITING):
        environment["GOMP_SPINCOUNT"] = SPINCOUNT


def keep_freed_memory() -> None:
    """Let glibc keep freed memory for the next step, instead of giving it back to the system.

    Nothing happens with another C library, or where the user has set one of glibc's `MALLOC_`
    variables. Source: mallopt(3).
    """
    if platform.libc_ver()[0] != "glibc" or any(name.startswith("MALLOC_") for name in os.environ):
        return
    mallopt = ctypes.CDLL(None).mallopt
    mallopt(M_MMAP_THRESHOLD, MMAP_BYTES)
    mallopt(M_TRIM_THRESHOLD, TRIM_BYTES)
