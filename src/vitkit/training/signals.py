"""Ctrl-C and SIGTERM raise a flag; the loop looks at it between two steps.

What has no steps and nothing half done is left at once, by an exception.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType

from vitkit.errors import Interrupted

CAUGHT = (signal.SIGINT, signal.SIGTERM)


@dataclass
class StopFlag:
    """Attributes: signum: the signal that arrived, or `None`."""

    signum: int | None = None


@contextmanager
def stop_flag() -> Iterator[StopFlag]:
    """Catch SIGINT and SIGTERM while the block runs; a second one ends the process at once.

    Outside the main thread nothing is caught, as Python allows it nowhere else. A signal that the
    block did nothing about is handed on to who would have had it.
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
    if flag.signum is not None:
        outer = before[signal.Signals(flag.signum)]
        if callable(outer) and outer is not signal.default_int_handler:
            outer(flag.signum, None)


@contextmanager
def left_at_once() -> Iterator[None]:
    """SIGINT and SIGTERM raise `Interrupted` in the block, but where a `stop_flag` catches them."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def handle(signum: int, frame: FrameType | None) -> None:
        raise Interrupted(signum, f"stopped by {signal.Signals(signum).name}")

    before = {signum: signal.signal(signum, handle) for signum in CAUGHT}
    try:
        yield
    finally:
        for signum, handler in before.items():
            signal.signal(signum, handler)
