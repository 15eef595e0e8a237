"""A file that is received in parts: the bytes so far, and the version that they belong to."""

from __future__ import annotations

import errno
import json
import os
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class PartFile:
    """The bytes of a file received so far; a `.state` file beside them names their version.

    Attributes:
        path: path of the bytes.
    """

    path: Path

    @property
    def size(self) -> int:
        """The number of bytes received so far."""
        return self.path.stat().st_size if self.path.exists() else 0

    @property
    def state(self) -> dict[str, Any]:
        """The `version` and `length` of the whole file; empty where unknown."""
        try:
            state = json.loads(self._state_path.read_text())
        except (OSError, ValueError):
            return {}
        # a truncated state file, after a power cut, counts as unknown
        return state if isinstance(state, dict) else {}

    @property
    def can_continue(self) -> bool:
        """True if there are bytes, and the server named the version that they belong to."""
        return self.size > 0 and bool(self.state.get("version"))

    @property
    def _state_path(self) -> Path:
        return self.path.with_suffix(".state")

    def begin(self, version: str, length: int | None) -> None:
        """Record version and length before the first byte: without them no transfer can be resumed.

        Raises:
            OSError: it cannot be written, or the disk is too full for the rest.
        """
        self._state_path.write_text(json.dumps({"version": version, "length": length}))
        # a full disk is reported now, not after gigabytes
        needed = (length or 0) - self.size
        free = shutil.disk_usage(self.path.parent).free
        if needed > free:
            raise OSError(errno.ENOSPC, f"{needed / 1e6:.1f} MB needed, {free / 1e6:.1f} MB free")

    def discard(self) -> None:
        """Delete the received bytes."""
        self.path.unlink(missing_ok=True)
        self._state_path.unlink(missing_ok=True)

    def finish(self, path: Path) -> None:
        """Rename the complete file to its final path."""
        os.replace(self.path, path)  # atomic: other processes see all of the file or none
        self._state_path.unlink(missing_ok=True)
