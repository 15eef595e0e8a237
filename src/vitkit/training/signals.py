"""Ctrl-C and SIGTERM raise a flag; the loop looks at it between two steps."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType

CAUGHT = (signal.SIGINT, signal.SIGTERM)


@dataclass
class StopFlag:
    """Attributes: signum: the signal that arrived, or `None`."""

    signum: int | None = None


@contextmanager
def stop_flag() -> Iterator[StopFlag]:
    """Catch SIGINT and SIGTERM while the block runs; a second one ends the process at once.

    Outside the main thread nothing is caught, as Python allows it nowhere else.
    """
    flag = StopFlag()
    if threading.current_thread() is not threading.main_thread():
        yield flag
        return

    def handle(signum: int, frame: FrameType | None) -> None:
        if flag.signum is not None:
            signal.signal(signum, signal.SIG_DFL)
            os.kill(os.getpid(), signum)
        flag.signum = signum

    before = {signum: signal.signal(signum, handle) for signum in CAUGHT}
    try:
        yield flag
    finally:
        for signum, handler in before.items():
            signal.signal(signum, handler)
