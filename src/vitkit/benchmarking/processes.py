"""Processes of contenders: started, asked, and ended; a crash of one is an answer like another."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
from types import TracebackType
from typing import Any

from vitkit.errors import VitkitError
from vitkit.process import SPINCOUNT

MODULE = "vitkit.benchmarking.contender_process.worker"
THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")
"""Variables by which libraries learn how many threads they may use."""
SECONDS_TO_END = 10
"""Given to a process that has no more requests, before it is killed."""
LONGEST_ANSWER = 600.0
"""Seconds for any answer but a turn: to convert, compile and warm up a large model."""
LONGEST_TURN = 120.0
"""Seconds that a turn may take beyond the ones asked for: more than any call that is timed."""


class ContenderError(VitkitError):
    """A contender that refuses the model, or whose process ended or hung."""


class Worker:
    """The process of a contender.

    Args:
        threads: of the processor.
    """

    def __init__(self, threads: int) -> None:
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115 - closed with the process
        self._late = ""
        self._process = subprocess.Popen(
            [sys.executable, "-m", MODULE],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            env=_environment(threads),
        )

    def __enter__(self) -> Worker:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def ask(self, do: str, **request: Any) -> dict[str, Any]:
        """Send a request and wait for the answer; a process that gives none in time is killed.

        Raises:
            ContenderError: the contender refuses, or its process has ended.
        """
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        line = json.dumps({"do": do, **request}) + "\n"
        limit = LONGEST_ANSWER
        if do == "run":
            limit = LONGEST_TURN + request["seconds"]
        timer = threading.Timer(limit, self._kill, [f"gave no answer to {do!r} in {limit:g} s"])
        timer.start()
        try:
            self._process.stdin.write(line.encode())
            self._process.stdin.flush()
            answer = self._process.stdout.readline()
        except BrokenPipeError:
            answer = b""
        finally:
            timer.cancel()
        if not answer.endswith(b"\n"):
            raise ContenderError(self._end())
        reply: dict[str, Any] = json.loads(answer)
        if "refused" in reply:
            raise ContenderError(reply["refused"])
        return reply

    def close(self) -> None:
        """End the process."""
        for pipe in (self._process.stdin, self._process.stdout):
            try:
                if pipe is not None:
                    pipe.close()
            except BrokenPipeError:  # it has ended with a request unread
                pass
        try:
            self._process.wait(SECONDS_TO_END)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._errors.close()

    def _kill(self, reason: str) -> None:
        self._late = reason
        self._process.kill()

    def _end(self) -> str:
        """Describe how the process ended, by its signal or the last line that it printed."""
        code = self._process.wait()
        if self._late:
            return f"its process {self._late} and was ended"
        if code < 0:
            return f"its process was ended by {signal.Signals(-code).name}"
        self._errors.seek(0)
        lines = self._errors.read().decode(errors="replace").strip().splitlines() or ["no message"]
        return f"its process ended with exit code {code}: {lines[-1]}"


def _environment(threads: int) -> dict[str, str]:
    """Return the environment of a contender.

    The command line shortens the spinning of OpenMP's threads for busy machines; here every library
    gets its own default, as only one contender runs at a time.
    """
    environment = os.environ | dict.fromkeys(THREAD_VARIABLES, str(threads))
    environment["KMP_BLOCKTIME"] = "0"  # Intel's OpenMP would spin for 200 ms
    if environment.get("GOMP_SPINCOUNT") == SPINCOUNT:
        del environment["GOMP_SPINCOUNT"]
    return environment
