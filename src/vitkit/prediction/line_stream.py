"""Lines of a stream written by another program, each as soon as it arrives."""

from __future__ import annotations

import os
import select
from collections import deque
from collections.abc import Iterator

CHUNK_SIZE = 1 << 16


class LineStream:
    """The lines of a file descriptor, without empty ones and line breaks.

    If a zero byte comes with the first separator, as `find -print0` writes them, it separates the
    lines.

    Args:
        descriptor: open for reading.
    """

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._complete: deque[bytes] = deque()
        self._rest = b""
        self._separator = b""
        self._ended = False

    def __iter__(self) -> Iterator[str]:
        while self.wait():
            yield os.fsdecode(self._complete.popleft())

    def wait(self) -> bool:
        """Wait for the next line; return False at the end of the stream."""
        while not self._complete and not self._ended:
            self._read()
        return bool(self._complete)

    @property
    def is_waiting(self) -> bool:
        """True if the next line has not come yet, so that `wait` would wait for it."""
        while not self._complete and not self._ended:
            try:
                ready, _, _ = select.select([self._descriptor], [], [], 0)
            except (OSError, ValueError):
                return False  # `select` does not support every kind of file
            if not ready:
                return True
            self._read()
        return False

    def _read(self) -> None:
        chunk = os.read(self._descriptor, CHUNK_SIZE)
        self._ended = not chunk
        if not self._separator:
            # a name may have a line break, but no zero byte
            self._separator = next((byte for byte in (b"\0", b"\n") if byte in chunk), b"")
        *lines, self._rest = (self._rest + chunk).split(self._separator or b"\n")
        if self._ended:
            lines.append(self._rest)  # the last line may have no end
            self._rest = b""
        # lines of other systems end in "\r\n"
        stripped = (line.removesuffix(b"\r") for line in lines)
        self._complete += (line for line in stripped if line.strip())
