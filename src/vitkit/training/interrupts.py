"""SIGINT, SIGTERM and the other signals that stop a run: as a flag, or as an exception.

`callbacks` reads the flag between two steps and ends the loop; `saving` then
saves. Phases without intermediate state are interrupted immediately by `Interrupted`. A second
signal ends the process at once, with a line on the newest state.
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
from typing import Any, NoReturn, TypeAlias

from vitkit.errors import Interrupted
from vitkit.process import note_interrupt

# SIGINT: Ctrl-C; SIGTERM: the end of a job; SIGHUP: the terminal or the connection is closed;
# SIGUSR1: the warning of Slurm before a time limit. Some systems do not have all of them.
SIGNAL_NAMES = ("SIGINT", "SIGTERM", "SIGHUP", "SIGUSR1")
CAUGHT = tuple(getattr(signal, name) for name in SIGNAL_NAMES if hasattr(signal, name))
"""Signals that stop a run."""

STDERR = 2
Handler: TypeAlias = Callable[[int, FrameType | None], Any] | int | None
"""The type of a handler of `signal.signal`."""


@dataclass
class StopFlag:
    """A request to stop.

    Attributes:
        signum: the signal that arrived, or `None`.
    """

    signum: int | None = None


def _signals_to_catch() -> list[int]:
    """List the signals; a hang-up that is ignored already, as by `nohup`, stays ignored."""
    signals = list[int]()
    for signum in CAUGHT:
        if signum.name != "SIGHUP" or signal.getsignal(signum) is not signal.SIG_IGN:
            signals.append(signum)
    return signals


@contextmanager
def _signals_handled_by(handle: Callable[[int], None]) -> Iterator[dict[int, Handler]]:
    """Call a function on a signal to this process while the block runs.

    Outside the main thread nothing is caught, because Python does not allow it there.

    Args:
        handle: called with the number of the signal.

    Yields:
        Signal -> the handler that was installed before.
    """
    if threading.current_thread() is not threading.main_thread():
        yield {}
        return

    process = os.getpid()

    def of_this_process(signum: int, frame: FrameType | None) -> None:
        # A new fork inherits this handler until it installs its own; its parent ends it.
        if os.getpid() == process:
            handle(signum)

    before = {signum: signal.signal(signum, of_this_process) for signum in _signals_to_catch()}
    try:
        yield before
    finally:
        for signum, handler in before.items():
            signal.signal(signum, handler)


@contextmanager
def stop_on_signal(hint: Callable[[], str] | None = None) -> Iterator[StopFlag]:
    """Catch signals while the block runs; a second one ends the process at once.

    Outside the main thread nothing is caught. A signal that the block did not handle is passed to
    the handler that was installed before.

    Args:
        hint: returns a line on what can be resumed, printed when a second signal ends the process.
    """
    flag = StopFlag()

    def handle(signum: int) -> None:
        if flag.signum is not None:
            _end_at_once(signum, hint)
        flag.signum = signum

    with _signals_handled_by(handle) as before:
        yield flag
    # The block ended without an error: the signal came too late, or there are no steps.
    if flag.signum is not None:
        outer = before.get(flag.signum)
        if callable(outer) and outer not in (signal.default_int_handler, note_interrupt):
            outer(flag.signum, None)


def _end_at_once(signum: int, hint: Callable[[], str] | None) -> NoReturn:
    """End the process and its child processes, which would report its loss."""
    try:
        if hint is not None:
            name = signal.Signals(signum).name
            line = f"vitkit: stopped at once by a second signal, {name}; {hint()}\n"
            # Not print(): the signal may have interrupted a write to the same stream.
            os.write(STDERR, line.encode())
    finally:
        end_process(128 + signum)


def end_process(code: int) -> NoReturn:
    """End this process with an exit code, without the cleanup of the interpreter.

    A signal may interrupt that cleanup and make it fail. Child processes of `multiprocessing` are
    killed.
    """
    try:
        if hasattr(signal, "SIGCHLD"):  # otherwise torch reports the workers' exit as an error
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        for child in multiprocessing.active_children():
            child.kill()
    finally:
        os._exit(code)


@contextmanager
def raise_on_signal(hint: Callable[[], str] | None = None) -> Iterator[None]:
    """Raise `Interrupted` on a signal in the block, except inside a `stop_on_signal`.

    Args:
        hint: returns a line on what can be resumed, for the error.
    """

    def handle(signum: int) -> NoReturn:
        end = "" if hint is None else f"; {hint()}"
        raise Interrupted(signum, f"stopped by {signal.Signals(signum).name}{end}")

    with _signals_handled_by(handle):
        yield
