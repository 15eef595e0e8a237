"""Delete old states: all but the newest two.

A folder is renamed before it is deleted, so that a folder that looks complete never lacks a file.
"""

from __future__ import annotations

import os
import shutil
import threading
from collections.abc import Sequence
from pathlib import Path

from vitkit.training.state.manifest import step_of

KEPT = 2
"""Newest states that are kept: if one is damaged, the run resumes from the other."""
DELETED = ".trash-"
"""First letters of the names of folders that are being deleted."""


def delete_older_states(states: Sequence[Path], step: int) -> None:
    """Delete all states older than that of `step`, which was just written, and the one before.

    Later states do not count: the run would have resumed from them if they were intact.

    Args:
        states: all states of a folder, the oldest first.
        step: step of the newest state.
    """
    earlier = [state for state in states if step_of(state) <= step]
    for state in earlier[:-KEPT]:
        delete_state(state)


def delete_state(state: Path) -> None:
    """Rename a state out of the way, and delete it while the run continues."""
    renamed = state.with_name(f"{DELETED}{state.name}-{os.getpid()}")
    # It may be there from a process with the same number that was killed.
    shutil.rmtree(renamed, ignore_errors=True)
    state.rename(renamed)
    # Freeing a gigabyte can take the file system seconds.
    threading.Thread(target=shutil.rmtree, args=(renamed, True)).start()
