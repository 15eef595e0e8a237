"""The child process of the check, which has the exported file alone and no network.

It has no network, sees nothing but the artefact, and answers messages on its standard input.
"""

from __future__ import annotations

import ctypes
import json
import os
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any, BinaryIO

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
    from vitkit.exporting.exported_model import open_artefact

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


# Arrays and JSON through a pipe between two processes; nothing that is read is run.

MAX_HEADER = 1_000_000
"""Most bytes of a message's header; a longer one is invalid."""


def send_message(
    stream: BinaryIO, values: Mapping[str, Any], arrays: Sequence[np.ndarray] = ()
) -> None:
    """Write a message: a line of JSON, then the numbers of the arrays.

    Args:
        stream: the pipe.
        values: JSON values.
        arrays: arrays of numbers.
    """
    shapes = [{"dtype": array.dtype.str, "shape": array.shape} for array in arrays]
    stream.write(json.dumps({"values": dict(values), "arrays": shapes}).encode() + b"\n")
    for array in arrays:
        stream.write(np.ascontiguousarray(array).tobytes())
    stream.flush()


def receive_message(stream: BinaryIO) -> tuple[dict[str, Any], list[np.ndarray]]:
    """Read a message that `send_message` wrote.

    Raises:
        EOFError: the other process has closed the pipe.
        ValueError: something else than a message.
    """
    line = stream.readline(MAX_HEADER)
    if not line.endswith(b"\n"):
        raise EOFError("the pipe is closed")
    header = json.loads(line)
    arrays = []
    for entry in header["arrays"]:
        dtype = np.dtype(entry["dtype"])
        size = int(np.prod(entry["shape"], dtype=np.int64)) * dtype.itemsize
        content = stream.read(size)
        if len(content) < size:
            raise EOFError("the pipe is closed")
        arrays.append(np.frombuffer(content, dtype).reshape(entry["shape"]))
    return header["values"], arrays


# A process without network, for running an exported model alone.

NEW_USERS = 0x10000000
NEW_NETWORK = 0x40000000
"""Flags of unshare(2): CLONE_NEWUSER and CLONE_NEWNET."""
EVENTS = (
    "socket.connect",
    "socket.sendto",
    "socket.sendmsg",
    "socket.getaddrinfo",
    "socket.gethostbyname",
    "socket.gethostbyaddr",
)
"""Audit events of Python's sockets for connections to other machines or processes."""


def cut_off_network() -> str:
    """Cut this process off from the network; it must be single-threaded.

    Linux gives it a network of its own with nothing in it, where that is allowed; in any case an
    audit hook refuses Python's sockets, but not those of native code.

    Returns:
        How it was done: `namespace` or `audit hook`.
    """
    sys.addaudithook(_refuse_sockets)
    return "namespace" if _own_network() else "audit hook"


def _refuse_sockets(event: str, arguments: tuple[object, ...]) -> None:
    if event in EVENTS:
        raise PermissionError(f"no network here: {event}")


def _own_network() -> bool:
    """Return True where Linux has moved the process into an empty network."""
    if not sys.platform.startswith("linux"):
        return False
    flags = NEW_NETWORK
    # other users need a user namespace for it, in which root would lose rights on files
    if os.geteuid() != 0:
        flags |= NEW_USERS
    try:
        return bool(ctypes.CDLL(None).unshare(flags) == 0)
    except (AttributeError, OSError):  # a C library without `unshare`
        return False


if __name__ == "__main__":
    answer_runs(sys.argv[1:])
