"""Images that could not be read during a run: named once, counted by the epoch."""

from __future__ import annotations

from collections.abc import Callable, Sequence


class FailedImages:
    """Names each image that could not be read once, and counts how often that was so.

    Args:
        say: is given the lines.
    """

    def __init__(self, say: Callable[[str], object]) -> None:
        self._say = say
        self._named: set[str] = set()
        self._count = 0

    def __call__(self, failed: Sequence[str]) -> None:
        """Take the lines of a batch, one for each image that failed."""
        self._count += len(failed)
        for line in dict.fromkeys(failed):
            if line not in self._named:
                self._say(f"{line}; another image of its class takes its place")
                self._named.add(line)

    def take_count(self) -> int:
        """Return how many failed since the last call."""
        count, self._count = self._count, 0
        return count
