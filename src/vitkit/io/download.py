"""Download files into the cache: resumed after a break, and checked before they are used.

A file lies in the cache under its own name, in a folder named after host and address, and only once
it is complete and its digest is right. Until then `.part` holds the received bytes, and `.state`
the version of the file that they belong to. A cached file is not hashed again on every load: only a
complete, checked file ever gets that name, and hashing a ViT-H takes seconds.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import unquote

from vitkit.errors import CheckpointError
from vitkit.io.atomic import sync, sync_folder
from vitkit.io.cache_folder import cache_folder
from vitkit.io.digests import file_sha256
from vitkit.io.http import (
    WebError,
    discard_part,
    finish_part,
    offline,
    parse_address,
    part_size,
    part_state,
    request,
    writing_to_cache,
)

CACHE_ADVICE = (
    "free some space or set VITKIT_CACHE to a folder elsewhere; what was fetched stays and is "
    "continued"
)
MAX_REQUESTS = 4
"""Requests for one file in one call, as long as each of them brings new bytes."""


def cached_path(address: str) -> Path:
    """Return the path of an address in the cache, fetched or not. `.tar` after `.pth` is dropped.

    Raises:
        CheckpointError: not an address that may be fetched.
    """
    with _web_errors():
        parts = parse_address(address)
    name = unquote(parts.path).rpartition("/")[2].removesuffix(".tar")
    if not re.fullmatch(r"[\w+-][\w.+ -]*", name):
        raise CheckpointError(f"{address}: names no file")
    digest = hashlib.sha256(address.encode()).hexdigest()[:12]
    return cache_folder() / f"{parts.hostname}-{digest}" / name


def download(address: str, *, sha256: str = "") -> Path:
    """Return the file at a web address, from the cache or fetched into it.

    Args:
        address: `https://...`; `http://` for this machine alone.
        sha256: leading hex digits that its SHA-256 must have; unchecked where empty.

    Raises:
        CheckpointError: not there, not reachable, not whole, or not the file expected.
        OutputError: the cache cannot be written.
    """
    path = cached_path(address)
    if path.is_file():
        return path
    if offline():
        raise CheckpointError(f"{address}: not in the cache, and HF_HUB_OFFLINE forbids to fetch")
    part = path.with_name(f"{path.name}.part")
    with writing_to_cache(part, CACHE_ADVICE), _locked(path):
        if not path.is_file():  # another process may have fetched it meanwhile
            with _web_errors():
                _complete(address, part)
            _check(address, part, sha256)
            sync(part)
            finish_part(part, path)
            sync_folder(path.parent)
    return path


@contextmanager
def _web_errors() -> Iterator[None]:
    """Raise a `WebError` of the block as a `CheckpointError`."""
    try:
        yield
    except WebError as error:
        raise CheckpointError(str(error)) from None


def _complete(address: str, part: Path) -> None:
    """Send requests until `part` is complete."""
    for attempt in range(1, MAX_REQUESTS + 1):
        before = part_size(part)
        try:
            request(address, part, show_progress=True)
            return
        except WebError as error:
            if not error.broken:
                raise
            received = part_size(part)
            if attempt == MAX_REQUESTS or received <= before:
                total = part_state(part).get("length")
                of_total = f" of {total}" if total else ""
                raise CheckpointError(
                    f"{address}: broke off after {received}{of_total} bytes: {error}; run it again"
                ) from None


def _check(address: str, part: Path, sha256: str) -> None:
    """Compare length and digest of a complete file; delete a wrong one."""
    length = part_state(part).get("length")
    received = part_size(part)
    if length is not None and received != length:
        discard_part(part)
        raise CheckpointError(f"{address}: expected {length} bytes, got {received}; run it again")
    if not sha256:
        return
    digest = file_sha256(part)
    if not digest.startswith(sha256.lower()):
        discard_part(part)
        raise CheckpointError(
            f"{address}: expected SHA-256 {sha256}, got {digest[: max(len(sha256), 16)]}; "
            f"the file is deleted"
        )


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Hold a lock on `path` over all processes; the others wait, and then find the file."""
    from filelock import FileLock

    with FileLock(path.with_name(f"{path.name}.lock")):
        yield
