"""Signals that ask a run to stop raise a flag; the loop looks at it between two steps.

What has no steps and nothing half done is left at once, by an exception. Whoever asks twice gets
what he asks for: the process ends at once, and says which state is left.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType
from typing import NoReturn

from vitkit.errors import Interrupted

CAUGHT = tuple(
    getattr(signal, name)
    for name in ("SIGINT", "SIGTERM", "SIGHUP", "SIGUSR1")
    if hasattr(signal, name)
)
"""Ctrl-C; what ends a job; the terminal or the connection is closed; Slurm's warning."""

STDERR = 2


@dataclass
class StopFlag:
    """Attributes: signum: the signal that arrived, or `None`."""

    signum: int | None = None


def _caught() -> list[int]:
    """The signals to catch; a hang-up that is ignored already, as `nohup` does, stays ignored."""
    ignored = {s for s in CAUGHT if s.name == "SIGHUP" and signal.getsignal(s) is signal.SIG_IGN}
    return [signum for signum in CAUGHT if signum not in ignored]


@contextmanager
def stop_on_signal(left: Callable[[], str] | None = None) -> Iterator[StopFlag]:
    """Catch signals while the block runs; a second one ends the process at once.

    Outside the main thread nothing is caught, as Python allows it nowhere else. A signal that the
    block did nothing about is handed on to who would have had it.

    Args:
        left: a line on what is left, printed when a second signal ends the process.
    """
    flag = StopFlag()
    if threading.current_thread() is not threading.main_thread():
        yield flag
        return

    process = os.getpid()

    def handle(signum: int, frame: FrameType | None) -> None:
        if os.getpid() != process:
            return  # a fork of ours that has no handlers of its own yet: whoever made it ends it
        if flag.signum is not None:
            _leave_at_once(signum, left)
        flag.signum = signum

    before = {signum: signal.signal(signum, handle) for signum in _caught()}
    try:
        yield flag
    finally:
        for signum, handler in before.items():
            signal.signal(signum, handler)
    if flag.signum is not None:
        outer = before[signal.Signals(flag.signum)]
        if callable(outer) and outer is not signal.default_int_handler:
            outer(flag.signum, None)


def _leave_at_once(signum: int, left: Callable[[], str] | None) -> NoReturn:
    """End the process; its children first, as they would complain that it is gone."""
    try:
        if left is not None:
            name = signal.Signals(signum).name
            os.write(
                STDERR, f"vitkit: left at once by a second signal, {name}; {left()}\n".encode()
            )
    finally:
        end_process(128 + signum)


def end_process(code: int) -> NoReturn:
    """Leave with an exit code, without the interpreter's own clearing up, which a signal may break.

    Child processes of `multiprocessing` are killed.
    """
    try:
        if hasattr(signal, "SIGCHLD"):  # torch would take their end for a fault, and raise
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        for child in multiprocessing.active_children():
            child.kill()
    finally:
        os._exit(code)


@contextmanager
def raise_on_signal(left: Callable[[], str] | None = None) -> Iterator[None]:
    """Signals raise `Interrupted` in the block, but where a `stop_on_signal` catches them.

    Args:
        left: a line on what is left, for the error.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def handle(signum: int, frame: FrameType | None) -> None:
        what = "" if left is None else f"; {left()}"
        raise Interrupted(signum, f"stopped by {signal.Signals(signum).name}{what}")

    before = {signum: signal.signal(signum, handle) for signum in _caught()}
    try:
        yield
    finally:
        for signum, handler in before.items():
            signal.signal(signum, handler)
