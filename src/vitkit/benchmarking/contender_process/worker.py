"""The process of one contender: it builds a model, and runs it when its turn comes.

    python -m vitkit.benchmarking.contender_process.worker

Reads requests from the standard input and answers each, a line of JSON each. What libraries print
goes to the standard error. A contender that crashes takes this process along, and nothing else.
Modules are imported when a request needs them, as no process needs all.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from vitkit.benchmarking.contender_process.memory import peak_megabytes, restart_peak
from vitkit.errors import VitkitError

if TYPE_CHECKING:
    import torch

    from vitkit.benchmarking.contender_process.forward_passes import Task

Reply = dict[str, Any]
BATCHES = 3
"""Batches that calls go through, so that no input stays in a cache."""
WARM_CALLS = 3
"""Calls after a change of the batch's size that are not timed."""
SHORT = 0.1
"""Seconds; before its turn a shorter call is made once untimed, as another process ran before."""
LONGEST_CALL = 60.0
"""Seconds. Half precision may take minutes on a processor without instructions for it."""
REST = 0.02
"""Seconds of rest after a turn. Threads of OpenMP spin for milliseconds before they sleep, and
would take the cores from the next contender."""


class ContenderProcess:
    """The contender of this process, once `build` has made it."""

    def __init__(self) -> None:
        self._call: Callable[[int], object] = lambda number: None
        self._calls = 0
        self._fit: Callable[[int], None] = lambda count: None
        self._usual = 0.0

    def build(self, request: Reply) -> Reply:
        """Build what is to be measured, and answer with logits of the compared images."""
        import torch

        torch.set_num_threads(request["threads"])
        torch.set_flush_denormal(True)
        torch.manual_seed(0)
        start = time.perf_counter()
        tasks: dict[str, Callable[[Reply], Reply]] = {
            "inference": self._build_inference,
            "training": self._build_training,
            "loader": self._build_loader,
        }
        reply = tasks[request["task"]](request)
        return {**reply, "build_seconds": time.perf_counter() - start}

    def _build_inference(self, request: Reply) -> Reply:
        import torch

        from vitkit.benchmarking.contender_process.forward_passes import make_forward_pass
        from vitkit.benchmarking.inputs import PROBES
        from vitkit.engines.choosing.sample_images import sample_images

        task = _task(request)
        made = make_forward_pass(task)
        forward: list[Callable[[torch.Tensor], torch.Tensor]] = [made.fit(PROBES)]
        batches: list[torch.Tensor] = []
        size, channels = task.spec.image_size, task.spec.in_channels

        def fit(count: int) -> None:
            batches[:] = [sample_images(count, channels, size, seed=n) for n in range(BATCHES)]
            forward[:] = []  # one program at a time is in memory
            forward.append(made.fit(count))

        def call(number: int) -> None:
            with torch.inference_mode():
                forward[0](batches[number % BATCHES])

        self._fit, self._call = fit, call
        with torch.inference_mode():
            logits = forward[0](sample_images(PROBES, channels, size))
        return {"library": made.library, "logits": logits.float().tolist()}

    def _build_training(self, request: Reply) -> Reply:
        from vitkit.benchmarking.contender_process.training_steps import (
            make_trained_model,
            training_batch,
        )
        from vitkit.benchmarking.inputs import PROBES
        from vitkit.engines.choosing.sample_images import sample_images

        task = _task(request)
        made = make_trained_model(task)
        batches: list[tuple[torch.Tensor, torch.Tensor]] = []

        def fit(count: int) -> None:
            batches[:] = [training_batch(task, count, seed) for seed in range(BATCHES)]

        logits = made.logits(sample_images(PROBES, task.spec.in_channels, task.spec.image_size))
        loss = made.step(*training_batch(task, request["batch_size"], 0))
        self._fit = fit
        self._call = lambda number: made.step(*batches[number % BATCHES])
        return {"library": made.library, "logits": logits.float().tolist(), "loss": loss}

    def _build_loader(self, request: Reply) -> Reply:
        from vitkit.benchmarking.contender_process.image_loading import make_image_loader

        loader = make_image_loader(
            request["source"],
            Path(request["folder"]),
            tuple(request["image_size"]),
            request["batch_size"],
        )
        self._call = lambda number: loader.batch()
        return {"library": loader.library, "shape": list(loader.batch().shape)}

    def fit(self, request: Reply) -> Reply:
        """Get ready for batches of another size, and run until nothing is done for the first time.

        The peak of memory counts from here.
        """
        start = time.perf_counter()
        self._fit(request["batch_size"])
        for number in range(WARM_CALLS):
            seconds = self._timed(number)
            if number and seconds > LONGEST_CALL:  # the first one may compile
                raise VitkitError(
                    f"a call takes {seconds:.0f} s, and {LONGEST_CALL:.0f} are allowed"
                )
        warm_up = time.perf_counter() - start
        restart_peak()
        self._usual = self._timed(0)
        time.sleep(REST)
        return {"warm_up_seconds": warm_up, "seconds": self._usual}

    def run(self, request: Reply) -> Reply:
        """Run for some seconds, once at least; the reply has the median seconds of a call."""
        if self._usual < SHORT:
            self._timed(self._calls)
        seconds: list[float] = []
        start = time.perf_counter()
        while not seconds or time.perf_counter() - start < request["seconds"]:
            self._calls += 1
            seconds.append(self._timed(self._calls))
        time.sleep(REST)
        return {"seconds": median(seconds), "calls": len(seconds)}

    def memory(self, request: Reply) -> Reply:
        """Answer with the most memory since `fit`."""
        return {"peak_mb": peak_megabytes()}

    def peak(self, request: Reply) -> Reply:
        """Answer with the speed of matrix products."""
        from vitkit.benchmarking.contender_process.matrix_peak import matrix_peak

        return {"products": matrix_peak(request["precision"], request["threads"])}

    def _timed(self, number: int) -> float:
        start = time.perf_counter()
        self._call(number)
        return time.perf_counter() - start


def _task(request: Reply) -> Task:
    from vitkit.benchmarking.contender_process.forward_passes import Task
    from vitkit.spec import ViTSpec

    fields = {name: request[name] for name in Task._fields}
    return Task(**fields | {"spec": ViTSpec.from_json(request["spec"])})


def answer_request(process: ContenderProcess, request: Reply) -> Reply:
    """Answer one request; `refused` has the reason in one line where it cannot be fulfilled."""
    requests: dict[str, Callable[[Reply], Reply]] = {
        "build": process.build,
        "fit": process.fit,
        "run": process.run,
        "memory": process.memory,
        "peak": process.peak,
    }
    try:
        return requests[request["do"]](request)
    except VitkitError as error:
        return {"refused": str(error)}
    except Exception as error:  # noqa: BLE001 - libraries raise whatever they like
        first = str(error).strip().partition("\n")[0]
        return {"refused": f"{type(error).__name__}: {first}"}


def answer_requests() -> None:
    """Answer requests until there are no more."""
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # libraries print where only answers may stand
    process = ContenderProcess()
    for line in sys.stdin:
        reply = answer_request(process, json.loads(line))
        answers.write(json.dumps(reply) + "\n")
        answers.flush()


if __name__ == "__main__":
    answer_requests()
