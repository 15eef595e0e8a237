"""The process of one library: requests and answers are lines of JSON.

A library that crashes takes its process along, and nothing else.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from statistics import median
from textwrap import shorten
from typing import Any, NamedTuple

from versus.machine import peak_megabytes, restart_peak
from vitkit.errors import VitkitError

Request = dict[str, Any]
PROGRAM = "from versus.child import answer_requests; answer_requests()"
THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")
LONGEST_ANSWER = 600.0
"""Seconds to convert, compile and warm up a large model; a process that needs more is killed."""
LONGEST_REASON = 200
"""Characters of a library's error."""
WARM_CALLS = 4
"""Calls after a change of the batch's size that are not timed."""
SHORT = 0.1
"""Seconds; before its turn a shorter call is made once untimed, as another process ran before."""
REST = 0.02
"""Seconds of rest after a turn. Threads of OpenMP spin for milliseconds before they sleep, and
would take the cores from the next library."""


class Ready(NamedTuple):
    """A library that is ready to be measured.

    Attributes:
        version: what computes, with its version.
        fit: given a batch's size, returns the call to time; a call takes its number.
        logits: (B, K) of the compared images.
        loss: of its first step, if it trains.
    """

    version: str
    fit: Callable[[int], Callable[[int], object]]
    logits: Any
    loss: float | None = None


class ChildError(VitkitError):
    """A library that refuses the model, or whose process has ended."""


class Child:
    """A process for one library, with so many threads of the processor."""

    def __init__(self, threads: int) -> None:
        paths = [str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH", "")]
        environment = os.environ | dict.fromkeys(THREAD_VARIABLES, str(threads))
        environment["KMP_BLOCKTIME"] = "0"  # Intel's OpenMP would spin for 200 ms
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
        self._process = subprocess.Popen(
            [sys.executable, "-c", PROGRAM], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            env=environment, text=True,
        )  # fmt: skip

    def close(self) -> None:
        """End the process, which has nothing to save."""
        with suppress(BrokenPipeError), self._process:  # closes the pipes and waits
            self._process.kill()

    def ask(self, do: str, **request: Any) -> Request:
        """Send a request and wait for the answer.

        Raises:
            ChildError: the library refuses, or its process has ended.
        """
        timer = threading.Timer(LONGEST_ANSWER, self._process.kill)
        timer.start()
        answer = ""
        with suppress(BrokenPipeError):
            self._process.stdin.write(json.dumps({"do": do, **request}) + "\n")
            self._process.stdin.flush()
            answer = self._process.stdout.readline()
        timer.cancel()
        if not answer:
            raise ChildError(f"its process ended with exit code {self._process.wait()}")
        reply: Request = json.loads(answer)
        if "refused" in reply:
            raise ChildError(reply["refused"])
        return reply


class Answers:
    """The answers of a child process: `build` first, then `fit`, then any number of `run`."""

    def build(self, request: Request) -> Request:
        """Build what is to be measured."""
        import torch

        torch.set_num_threads(request["threads"])
        torch.set_flush_denormal(True)
        torch.manual_seed(0)
        ready: Ready = import_module(f"versus.{request['module']}").build(request)
        self._fit = ready.fit
        return {"version": ready.version, "logits": ready.logits.tolist(), "loss": ready.loss}

    def fit(self, request: Request) -> Request:
        """Get ready for batches of another size; the peak of memory counts from the end."""
        self._call: Callable[[int], object] = lambda number: None  # forgets the last program
        self._call = self._fit(request["batch_size"])
        for number in range(WARM_CALLS):
            self._usual = self._seconds(number)
        self._calls = 0
        restart_peak()
        time.sleep(REST)
        return {}

    def run(self, request: Request) -> Request:
        """Run for some seconds, once at least; the reply has the median seconds of a call."""
        if self._usual < SHORT:
            self._seconds(self._calls)
        seconds: list[float] = []
        start = time.perf_counter()
        while not seconds or time.perf_counter() - start < request["seconds"]:
            self._calls += 1
            seconds.append(self._seconds(self._calls))
        time.sleep(REST)
        return {"seconds": median(seconds), "peak_mb": peak_megabytes()}

    def products(self, request: Request) -> Request:
        """Answer with the speed of matrix products, by library."""
        module = import_module("versus.inference")
        return dict(module.product_speeds(request["precision"], request["threads"]))

    def _seconds(self, number: int) -> float:
        """Return the seconds of a call."""
        start = time.perf_counter()
        self._call(number)
        return time.perf_counter() - start


def answer(answers: Answers, request: Request) -> Request:
    """Answer one request; `refused` has the reason in one line where it cannot be fulfilled."""
    try:
        reply: Request = getattr(answers, request["do"])(request)
    except VitkitError as error:
        return {"refused": str(error)}
    except Exception as error:  # noqa: BLE001 - libraries raise whatever they like
        return {"refused": shorten(f"{type(error).__name__}: {error}", LONGEST_REASON)}
    return reply


def answer_requests() -> None:
    """Answer requests until there are no more."""
    out = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # libraries print where only answers may stand
    answers = Answers()
    for line in sys.stdin:
        out.write(json.dumps(answer(answers, json.loads(line))) + "\n")
        out.flush()
