"""Arrays and JSON through a pipe between two processes; nothing that is read is run."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, BinaryIO

import numpy as np

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
