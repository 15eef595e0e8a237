"""A limit on the memory that several threads use at once."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager

PIXELS_AT_ONCE = 50_000_000
"""Pixels that all threads decode at once: as many as one image may have, some 600 MB."""


class MemoryLimit:
    """A counting lock: threads hold amounts whose sum stays below a limit.

    Args:
        size: the limit. A single amount above it is admitted while no other is held.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self.held = 0
        self._changed = threading.Condition()

    @contextmanager
    def taken(self, amount: int) -> Iterator[None]:
        """Hold an amount inside the block; wait until it fits below the limit."""
        with self._changed:
            # Without the first condition, one image above the limit would wait forever.
            self._changed.wait_for(lambda: not self.held or self.held + amount <= self.size)
            self.held += amount
        try:
            yield
        finally:
            with self._changed:
                self.held -= amount
                self._changed.notify_all()

    @contextmanager
    def admission(self) -> Iterator[Callable[[int], object]]:
        """Give a function that takes an amount, which is held until the end of the block."""
        with ExitStack() as held:
            yield lambda amount: held.enter_context(self.taken(amount))
