"""The fresh process that runs an exported model: `python -m vitkit.exporting.gate.gate_child PATH`.

It has no network, sees nothing but the artefact, and answers messages on its standard input.
"""

from __future__ import annotations

import os
import sys
import time
from typing import TYPE_CHECKING, Any, BinaryIO

from vitkit.exporting.gate.no_network import cut_off_network

if TYPE_CHECKING:
    import numpy as np


def answer_runs(arguments: list[str]) -> None:
    """Open the artefact, then answer each message until the pipe closes.

    Args:
        arguments: the artefact's path.
    """
    # runtimes may print to stdout: answers use a separate pipe
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    network = cut_off_network()
    # imported after that: numpy and others start threads, which would keep the network
    from vitkit.errors import VitkitError
    from vitkit.exporting.files.open_artefact import open_artefact
    from vitkit.exporting.gate.array_pipe import receive_message, send_message

    try:
        artefact = open_artefact(arguments[0], trust_code=True)
    except VitkitError as error:
        send_message(answers, {"error": str(error)})
        return
    session = artefact.session
    send_message(answers, {"network": network, "layers": dict(session.layers)})
    requests: BinaryIO = sys.stdin.buffer
    while True:
        try:
            values, arrays = receive_message(requests)
        except EOFError:
            return
        try:
            outputs, seconds = _timed(session.run, arrays[0], values["times"])
        except VitkitError as error:
            send_message(answers, {"error": str(error)})
            return
        send_message(answers, {"seconds": seconds}, outputs)


def _timed(run: Any, images: np.ndarray, times: int) -> tuple[list[np.ndarray], list[float]]:
    """Return the outputs, and the seconds of each of several runs."""
    seconds = []
    for _ in range(times):
        start = time.perf_counter()
        outputs = run(images)
        seconds.append(time.perf_counter() - start)
    return outputs, seconds


if __name__ == "__main__":
    answer_runs(sys.argv[1:])
