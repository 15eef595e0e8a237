"""Download files into the cache: each is checked before it is used, and fetched once.

`resume_download` receives the bytes, also after a break. A file is kept under its own name, in a
folder named after host and address, and only once it is complete and its digest is right. A cached
file is not hashed again on every load: only a complete, checked file ever gets that name, and
hashing a ViT-H takes seconds.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import unquote

from filelock import FileLock

from vitkit.errors import CheckpointError, OutputError
from vitkit.io.atomic import sync, sync_folder
from vitkit.io.cache_folder import cache_folder
from vitkit.io.digests import file_sha256
from vitkit.io.web.connections import WebError, offline, parse_address
from vitkit.io.web.part_file import PartFile
from vitkit.io.web.resume_download import receive

CACHE_ADVICE = (
    "free some space, or set VITKIT_CACHE to another folder; what was downloaded is kept, and "
    "the next run continues it"
)


@contextmanager
def writing_to_cache(path: Path, advice: str) -> Iterator[None]:
    """Create the folder of `path`; turn system errors of the block into one line.

    Args:
        path: a file in the cache that the block writes.
        advice: how the user can mend it.

    Raises:
        OutputError: the disk is full, read-only, or otherwise refuses.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        yield
    except OSError as error:
        raise OutputError(f"cannot write {path}: {error.strerror or error}; {advice}") from None


def cached_path(address: str) -> Path:
    """Return the path of an address in the cache, fetched or not. `.tar` after `.pth` is dropped.

    Raises:
        CheckpointError: not an address that may be fetched.
    """
    try:
        parts = parse_address(address)
    except WebError as error:
        raise CheckpointError(str(error)) from None
    name = unquote(parts.path).rpartition("/")[2].removesuffix(".tar")
    if not re.fullmatch(r"[\w+-][\w.+ -]*", name):
        raise CheckpointError(f"{address}: expected an address that ends in the name of a file")
    # so that files of the same name do not collide
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
        raise CheckpointError(
            f"{address}: not in the cache, and HF_HUB_OFFLINE forbids downloading it"
        )
    part = PartFile(path.with_name(f"{path.name}.part"))
    # Other processes wait for the lock, and then find the file.
    with writing_to_cache(part.path, CACHE_ADVICE), FileLock(path.with_name(f"{path.name}.lock")):
        if not path.is_file():
            try:
                receive(address, part, show_progress=True)
            except WebError as error:
                raise CheckpointError(_not_whole(address, part, error)) from None
            _check_digest(address, part, sha256)
            # synced before the rename: a power cut leaves no damaged file
            sync(part.path)
            part.finish(path)
            sync_folder(path.parent)
    return path


def _not_whole(address: str, part: PartFile, error: WebError) -> str:
    """Return the message for an incomplete download, with the bytes received."""
    if not error.broken:
        return str(error)
    if not part.size:
        return f"{address}: {error}; run it again"
    received = f"{part.size}"
    if total := part.state.get("length"):
        received += f" of {total}"
    message = f"{address}: interrupted after {received} bytes: {error}; run it again"
    return f"{message} to continue" if part.can_continue else message


def _check_digest(address: str, part: PartFile, sha256: str) -> None:
    """Compare the digest of a complete file; delete a wrong one."""
    digest = file_sha256(part.path) if sha256 else ""
    if not digest.startswith(sha256.lower()):
        part.discard()
        raise CheckpointError(
            f"{address}: expected SHA-256 {sha256}, got {digest[: max(len(sha256), 16)]}; "
            f"the file was deleted"
        )
