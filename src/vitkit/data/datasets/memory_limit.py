"""A bound on what several threads hold at once."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager

PIXELS_AT_ONCE = 50_000_000
"""Pixels that all threads decode at once: as many as one image may have, some 600 MB."""


class Room:
    """So much of something may be held at once; who wants more waits.

    Args:
        size: how much. A single demand above it is met while nobody else holds any.
    """

    def __init__(self, size: int) -> None:
        self.size, self.held = size, 0
        self._changed = threading.Condition()

    @contextmanager
    def taken(self, amount: int) -> Iterator[None]:
        """Hold an amount; waits until there is room for it."""
        with self._changed:
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
