"""Run an exported model in a fresh process, which sees nothing of this one."""

from __future__ import annotations

import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO, cast

import numpy as np

from vitkit.errors import CheckpointError
from vitkit.exporting.artefact import RuntimeFailure
from vitkit.exporting.child import receive_message, send_message
from vitkit.process import child_environment

SECONDS = 300.0
"""Seconds that opening, or one batch, may take; the largest models take some 30 s per batch."""
COMMAND = (sys.executable, "-P", "-m", "vitkit.exporting.child")
"""-P: not the working folder first, where a file onnx.py of the user's would be imported."""
LEAVING_SECONDS = 10.0
"""Seconds in which a process must exit after its pipes are closed; then it is killed."""


class FreshProcess:
    """A running child process with an open artefact; a context manager that ends it.

    Args:
        path: path of the artefact.
        seconds: time that opening, or one batch, may take.
        command: the child; it takes the path.

    Attributes:
        network: how the child was cut off from the network.
        layers: layers that the runtime executes in int8, by type.

    Raises:
        CheckpointError: the artefact cannot be opened, or the runtime dies or hangs.
    """

    def __init__(
        self,
        path: Path,
        *,
        seconds: float = SECONDS,
        command: Sequence[str] = COMMAND,
    ) -> None:
        self._path = path
        self._seconds = seconds
        self._messages = tempfile.TemporaryFile()  # noqa: SIM115 - until the process ends
        try:
            self._process = subprocess.Popen(
                [*command, str(path)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._messages,
                env=child_environment(),
            )
        except OSError as error:
            self._messages.close()
            raise CheckpointError(
                f"{path}: no process can be started to check it in: {error.strerror}"
            ) from None
        try:
            values, _ = self._answer()
        except BaseException:
            self.close()
            raise
        self.network: str = values["network"]
        self.layers: dict[str, int] = values["layers"]

    def run(self, images: np.ndarray) -> list[np.ndarray]:
        """Return the outputs of the graph for a batch; the logits are the last.

        Raises:
            CheckpointError: the runtime fails, dies or hangs.
        """
        return self._exchange(images, 1)[1]

    def seconds(self, images: np.ndarray, times: int) -> list[float]:
        """Return the seconds of each of several runs of a batch; errors as for `run`."""
        return list(self._exchange(images, times)[0]["seconds"])

    def __enter__(self) -> FreshProcess:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close the input: the process exits, and deletes its files."""
        assert self._process.stdin is not None, "a pipe"
        with suppress(OSError):  # unread input
            self._process.stdin.close()
        self._leaves()
        for stream in (self._process.stdin, self._process.stdout):
            assert stream is not None, "both are pipes"
            with suppress(OSError):  # unread input
                stream.close()
        self._messages.close()

    def _leaves(self) -> bool:
        """Wait for the process to exit; kill it if it does not, and return False."""
        try:
            self._process.wait(LEAVING_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
            return False
        return True

    def _exchange(self, images: np.ndarray, times: int) -> tuple[dict[str, Any], list[np.ndarray]]:
        return self._answer((images,), times)

    def _answer(
        self, arrays: Sequence[np.ndarray] = (), times: int = 0
    ) -> tuple[dict[str, Any], list[np.ndarray]]:
        """Send a batch, if any, and wait for the answer, for a limited time."""
        requests, answers = (
            cast(BinaryIO, self._process.stdin),
            cast(BinaryIO, self._process.stdout),
        )
        timed_out = threading.Event()

        def stop() -> None:
            timed_out.set()
            self._process.kill()  # unblocks the read below, as the pipes close

        timer = threading.Timer(self._seconds, stop)
        timer.start()
        try:
            if times:
                send_message(requests, {"times": times}, arrays)
            values, outputs = receive_message(answers)
        except (EOFError, OSError, ValueError):
            leaves = self._leaves()  # it closes its pipes before it has ended
            if timed_out.is_set():
                reason = f"does not answer within {self._seconds:g} s"
            elif not leaves:
                reason = "sends an invalid reply and does not exit"
            else:
                reason = self._end()
            raise RuntimeFailure(f"{self._path}: its runtime {reason}") from None
        finally:
            timer.cancel()
        if "error" in values:
            raise RuntimeFailure(values["error"])
        return values, outputs

    def _end(self) -> str:
        """Describe how the process ended."""
        code = self._process.wait()
        if code == -signal.SIGILL:
            return "was ended by SIGILL: this CPU lacks instructions that it needs"
        if code < 0:
            return f"was ended by {signal.Signals(-code).name}"
        self._messages.seek(0)
        lines = self._messages.read().decode("utf-8", "replace").strip().splitlines()
        return f"ended with code {code}: {(lines or ['no message'])[-1]}"
