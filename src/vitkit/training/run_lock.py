"""One process group per run folder: a second one is told whose it is."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from vitkit.errors import OutputError
from vitkit.io.atomic import output_error

LOCK, OWNER = ".lock", ".owner.json"


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Hold a run folder while the block runs; the system lets go of it when the process ends.

    Raises:
        OutputError: another process has it, with its number and host; or nothing can be written
            there.
    """
    from filelock import FileLock, Timeout

    lock = FileLock(folder / LOCK)
    try:
        lock.acquire(timeout=0)
    except Timeout:
        raise OutputError(
            f"{folder} is in use by {_owner(folder)}; wait for it, stop it, or choose another "
            f"--output"
        ) from None
    except OSError as error:
        raise output_error(folder / LOCK, error) from error
    try:
        _say_whose(folder)
        yield
    finally:
        (folder / OWNER).unlink(missing_ok=True)
        lock.release()


def _say_whose(folder: Path) -> None:
    owner = {"pid": os.getpid(), "host": socket.gethostname()}
    try:
        (folder / OWNER).write_text(json.dumps(owner))
    except OSError as error:
        raise output_error(folder / OWNER, error) from error


def _owner(folder: Path) -> str:
    try:
        said = json.loads((folder / OWNER).read_text())
        return f"process {said['pid']} on {said['host']}"
    except (OSError, ValueError, LookupError, TypeError):
        return "another process"
