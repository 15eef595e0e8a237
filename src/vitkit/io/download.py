"""Files from the web into a cache: continued where they broke off, and checked before they count.

A file lies in the cache under its own name, in a folder named after host and address, and is there
only once it is whole and its digest is right. Until then `.part` holds what has come, and `.state`
which version of the file it is of. A cached file is not hashed again on every load: a ViT-H would
cost seconds each time, and nothing but a whole, checked file ever gets that name.
"""

from __future__ import annotations

import hashlib
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import unquote

from vitkit.errors import CheckpointError
from vitkit.io.atomic import sync, sync_folder
from vitkit.io.cache_folder import cache_folder
from vitkit.io.http import (
    WebError,
    allowed,
    discard,
    keep,
    offline,
    request,
    size_of,
    state_of,
    writing,
)

MEND = (
    "free some space or set VITKIT_CACHE to a folder elsewhere; what was fetched stays and is "
    "continued"
)
ATTEMPTS = 4
"""How often one call takes a broken download up again."""


def cached_path(address: str) -> Path:
    """Where the file of this address lies, or will lie. A `.tar` after `.pth` is left out.

    Raises:
        CheckpointError: no address that is fetched.
    """
    with _fetching():
        parts = allowed(address)
    name = unquote(parts.path).rpartition("/")[2].removesuffix(".tar")
    if not re.fullmatch(r"[\w+-][\w.+ -]*", name):
        raise CheckpointError(f"{address}: names no file")
    digest = hashlib.sha256(address.encode()).hexdigest()[:12]
    return cache_folder() / f"{parts.hostname}-{digest}" / name


def download(address: str, *, sha256: str = "") -> Path:
    """The file at a web address, from the cache or fetched into it.

    Args:
        address: `https://...`; `http://` for this machine alone.
        sha256: leading hex digits that its SHA-256 must have; unchecked where empty.

    Raises:
        CheckpointError: not there, not reachable, not whole, or not the file expected.
        OutputError: the cache cannot be written.
    """
    place = cached_path(address)
    if place.is_file():
        return place
    if offline():
        raise CheckpointError(f"{address}: not in the cache, and HF_HUB_OFFLINE forbids to fetch")
    part = place.with_name(f"{place.name}.part")
    with writing(part, MEND), _alone(place):
        if not place.is_file():  # another process may have fetched it meanwhile
            with _fetching():
                _complete(address, part)
            _check(address, part, sha256)
            sync(part)
            keep(part, place)
            sync_folder(place.parent)
    return place


def file_sha256(path: Path) -> str:
    """The SHA-256 of a file, in 64 hex digits."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


@contextmanager
def _fetching() -> Iterator[None]:
    """Every trouble with the web as an error of ours."""
    try:
        yield
    except WebError as error:
        raise CheckpointError(str(error)) from None


def _complete(address: str, part: Path) -> None:
    """Bring `part` to its full length, in as many requests as that takes."""
    for attempt in range(1, ATTEMPTS + 1):
        before = size_of(part)
        try:
            request(address, part, _bar)
            return
        except WebError as broken:
            if not broken.broken:
                raise
            came = size_of(part)
            if attempt == ATTEMPTS or came <= before:
                total = state_of(part).get("length")
                known = f" of {total}" if total else ""
                raise CheckpointError(
                    f"{address}: broke off after {came}{known} bytes: {broken}; run it again"
                ) from None


def _check(address: str, part: Path, sha256: str) -> None:
    """Hold the whole file against its length and digest; one that is wrong is deleted."""
    length, found = state_of(part).get("length"), size_of(part)
    if length is not None and found != length:
        discard(part)
        raise CheckpointError(f"{address}: expected {length} bytes, got {found}; run it again")
    if sha256 and not (digest := file_sha256(part)).startswith(sha256.lower()):
        discard(part)
        raise CheckpointError(
            f"{address}: expected SHA-256 {sha256}, got {digest[: max(len(sha256), 16)]}; "
            f"the file is deleted"
        )


@contextmanager
def _alone(place: Path) -> Iterator[None]:
    """One process at a time; the others wait, and then find the file."""
    from filelock import FileLock

    with FileLock(place.with_name(f"{place.name}.lock")):
        yield


@contextmanager
def _bar(name: str, start: int, length: int | None) -> Iterator[Callable[[int], Any]]:
    """A bar on stderr where that is a terminal; takes the bytes that have come since."""
    if not sys.stderr.isatty():
        yield lambda count: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TimeRemainingColumn

    columns = ("{task.description}", BarColumn(), DownloadColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bars:
        task = bars.add_task(name, total=length, completed=start)
        yield lambda count: bars.advance(task, count)
