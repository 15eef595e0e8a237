"""Peak memory of this process, and a new beginning of its measurement."""

from __future__ import annotations

import re
import resource
import sys
from contextlib import suppress
from pathlib import Path

RESET = "5"
"""Written to `clear_refs` it sets the peak to the memory in use; proc(5)."""


def restart_peak() -> None:
    """Forget the peak so far, where the system can; elsewhere the peak is that of all the time."""
    with suppress(OSError):
        Path("/proc/self/clear_refs").write_text(RESET, encoding="utf-8")


def peak_megabytes() -> float:
    """Return the most memory (resident set) that this process has had, in MB of 10^6 bytes."""
    with suppress(OSError):
        status = Path("/proc/self/status").read_text(encoding="utf-8")
        found = re.search(r"VmHWM:\s*(\d+) kB", status)
        if found:
            return int(found[1]) * 1024 / 1e6
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    # bytes on macOS, kilobytes elsewhere
    return most / 1e6 if sys.platform == "darwin" else most * 1024 / 1e6
