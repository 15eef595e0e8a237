"""The user's cache folder: everything in it can be computed or fetched again."""

from __future__ import annotations

import os
from pathlib import Path


def cache_folder() -> Path:
    """Return `$VITKIT_CACHE`, else `$XDG_CACHE_HOME/vitkit`, else `~/.cache/vitkit`.

    The environment is read at each call.
    """
    # an empty variable counts as none, as the XDG specification has it
    if own := os.environ.get("VITKIT_CACHE"):
        return Path(own).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "vitkit"
