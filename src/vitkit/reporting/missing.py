"""`Missing`: the data that a section of the report needs and the run folder lacks."""

from __future__ import annotations


class Missing(Exception):
    """A section cannot be shown; the report says why, and how to change that.

    Args:
        reason: what is missing, a sentence.
        command: the command that makes it; empty where there is none.
    """

    def __init__(self, reason: str, command: str = "") -> None:
        super().__init__(reason)
        self.reason, self.command = reason, command
