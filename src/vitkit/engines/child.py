"""Run a function in a child process, whose crash or hang does no harm."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pkgutil import resolve_name
from typing import Any

from vitkit.errors import VitkitError
from vitkit.process import child_environment

LONGEST_REASON = 200
"""Characters of a reason; errors of runtimes can fill pages."""
MARK = "vitkit-result: "
"""Prefix of the line with the result, as runtimes may print other lines."""


@dataclass(frozen=True)
class ChildResult:
    """How a child process ended.

    Attributes:
        value: what the function returned, if it did.
        reason: why there is no value, in a few words; empty if there is one.
    """

    value: Any = None
    reason: str = ""


def run_child(
    function: str, *arguments: str, seconds: float, environment: Mapping[str, str] | None = None
) -> ChildResult:
    """Call a function in a fresh Python process and return what it returned, or why it did not.

    The function may crash by a signal, print or hang: it is killed after `seconds`. An error of
    vitkit's gives its message as the reason.

    Args:
        function: as `package.module:function`; it takes texts and returns a JSON value.
        *arguments: the texts.
        seconds: time that it may take.
        environment: further variables of the process.
    """
    try:
        # without the working folder: a file named onnx.py there would be imported
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", "vitkit.engines.child", function, *arguments],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            env={**child_environment(), **(environment or {})},
            start_new_session=True,
        )
    except OSError as error:
        return ChildResult(reason=f"no child process could be started: {error}")
    try:
        output, messages = process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        return ChildResult(reason=f"no answer in {seconds:.3g} s")
    finally:
        _end_all(process)
    if process.returncode < 0:
        return ChildResult(reason=f"ended by {_signal_name(-process.returncode)}")
    for line in reversed(output.splitlines()):
        if line.startswith(MARK):
            return _parsed(line.removeprefix(MARK))
    last = (messages.strip() or "no message").splitlines()[-1]
    return ChildResult(reason=f"ended with code {process.returncode}: {last[:LONGEST_REASON]}")


def _end_all(process: subprocess.Popen[str]) -> None:
    """End a child process that is still running, and what it has started."""
    if process.poll() is None:
        with contextlib.suppress(OSError):
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def _parsed(text: str) -> ChildResult:
    try:
        document = json.loads(text)
        return ChildResult(document.get("value"), str(document.get("reason", "")))
    except (ValueError, AttributeError):
        return ChildResult(reason="its answer is not JSON")


def answer(arguments: list[str]) -> None:
    """Call the function that the arguments name, and print its result as one line."""
    function, *rest = arguments
    document: dict[str, Any] = {}
    try:
        document["value"] = resolve_name(function)(*rest)
    except VitkitError as error:
        document["reason"] = str(error)
    except Exception as error:  # noqa: BLE001 - a runtime raises anything
        first = str(error).strip().partition("\n")[0]
        document["reason"] = f"{type(error).__name__}: {first[:LONGEST_REASON]}"
    sys.stdout.write(f"\n{MARK}{json.dumps(document)}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    answer(sys.argv[1:])
