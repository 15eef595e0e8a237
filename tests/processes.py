"""Processes of tests: commands that need one of their own, and waiting for what they do.

A new interpreter that imports torch and vitkit takes seconds. A fork of the test's own process has
both; `Forked` runs the command line in one. What the interpreter itself does at its start and end
is left to the few tests that start `python -m vitkit`.
"""

import contextlib
import os
import signal
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NoReturn

Command = Sequence[str] | Callable[[], int]
PATIENCE = 100.0
"""Seconds until what does not happen counts as never happening: a busy machine takes long."""


def wait_until(happened: Callable[[], Any], pause: float = 0.02) -> None:
    """Wait until something is true, however long a busy machine takes."""
    deadline = time.monotonic() + PATIENCE
    while not happened():
        if time.monotonic() > deadline:
            raise TimeoutError(f"not within {PATIENCE:g} seconds: {happened}")
        time.sleep(pause)


class Forked:
    """A command of vitkit in a fork of this process, in a process group of its own.

    Args:
        command: the command line, without `vitkit`, or a function that returns the exit code.
        place: a folder for what is printed.
        before: called in the fork before the command, to set limits for example.

    Attributes:
        pid: its process id, also that of its group.
        returncode: how it ended, negative where a signal ended it; None while it runs.
        stdout, stderr: what it printed, once it has ended.
    """

    def __init__(
        self, command: Command, place: Path, before: Callable[[], None] = lambda: None
    ) -> None:
        self._files = [place / f"{name}-{time.monotonic_ns()}.txt" for name in ("out", "err")]
        self.returncode: int | None = None
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # fork beside threads
            self.pid = os.fork()
        if not self.pid:
            self._be(command, before)

    def _be(self, command: Command, before: Callable[[], None]) -> NoReturn:
        code = 1
        try:
            os.setsid()
            for number, file in enumerate(self._files, 1):
                opened = os.open(file, os.O_CREAT | os.O_WRONLY)
                os.dup2(opened, number)
                os.close(opened)
            sys.stdout, sys.stderr = os.fdopen(1, "w"), os.fdopen(2, "w")
            from vitkit import cli

            before()
            code = command() if callable(command) else cli.run([*map(str, command)])
        except BaseException:  # noqa: BLE001 - the test shows it
            traceback.print_exc()
        finally:
            with contextlib.suppress(Exception):
                sys.stdout.flush()
                sys.stderr.flush()
            os._exit(code)

    @property
    def stdout(self) -> str:
        return self._files[0].read_text()

    @property
    def stderr(self) -> str:
        return self._files[1].read_text()

    def poll(self) -> int | None:
        if self.returncode is None:
            ended, status = os.waitpid(self.pid, os.WNOHANG)
            if ended:
                self.returncode = os.waitstatus_to_exitcode(status)
        return self.returncode

    def wait(self) -> int:
        """Wait for its end; returns the exit code."""
        wait_until(lambda: self.poll() is not None)
        assert self.returncode is not None
        return self.returncode

    def send_signal(self, signum: int) -> None:
        os.kill(self.pid, signum)

    def kill(self) -> None:
        """End it and its children, if it runs, and wait for its end."""
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.pid, signal.SIGKILL)
            self.wait()


@contextlib.contextmanager
def forked(
    command: Command, place: Path, before: Callable[[], None] = lambda: None
) -> Iterator[Forked]:
    """A command in a fork, killed at the end of the block if it still runs."""
    child = Forked(command, place, before)
    try:
        yield child
    finally:
        child.kill()
