"""Where vitkit keeps what it can find out or fetch again: one folder of the user's."""

from __future__ import annotations

import os
from pathlib import Path


def cache_folder() -> Path:
    """`$VITKIT_CACHE`, else `$XDG_CACHE_HOME/vitkit`, else `~/.cache/vitkit`, as it is now."""
    if given := os.environ.get("VITKIT_CACHE"):
        return Path(given).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "vitkit"
