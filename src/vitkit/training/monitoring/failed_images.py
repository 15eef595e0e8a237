"""Images that could not be read during a run: each is named once, and all are counted."""

from __future__ import annotations

from collections.abc import Callable, Sequence


class FailedImages:
    """A counter of images that could not be read, which names each of them once.

    Args:
        log: called with a line for each image.
    """

    def __init__(self, log: Callable[[str], object]) -> None:
        self._log = log
        self._named: set[str] = set()
        self._count = 0

    def __call__(self, failed: Sequence[str]) -> None:
        """Count the images of a batch that failed, from a line for each."""
        self._count += len(failed)
        # An image may fail twice in a batch, and again in every epoch.
        for line in dict.fromkeys(failed):
            if line not in self._named:
                self._log(f"{line}; another image of its class is used instead")
                self._named.add(line)

    def take_count(self) -> int:
        """Return the number of failures since the last call."""
        count = self._count
        self._count = 0
        return count
