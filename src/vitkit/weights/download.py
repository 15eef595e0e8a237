"""Files from the web into a cache: continued where they broke off, and checked before they count.

A file lies in the cache under its own name, in a folder named after host and address, and is there
only once it is whole and its digest is right. Until then `.part` holds what has come, and `.state`
which version of the file it is of. A cached file is not hashed again on every load: a ViT-H would
cost seconds each time, and nothing but a whole, checked file ever gets that name.
"""

from __future__ import annotations

import errno
import hashlib
import http.client
import json
import os
import re
import shutil
import sys
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from vitkit.errors import CheckpointError, OutputError
from vitkit.places import cache_folder
from vitkit.weights.files import sync, sync_folder

CHUNK = 1 << 20
TIMEOUT = 30.0
"""Seconds without a byte after which a connection counts as broken."""
ATTEMPTS = 4
"""How often one call takes a broken download up again."""
LOCAL = ("127.0.0.1", "localhost", "::1")
YES = {"1", "ON", "YES", "TRUE"}


class _Broken(Exception):
    """The connection went away; what has come is kept."""


def offline() -> bool:
    """Whether `HF_HUB_OFFLINE` forbids asking the network, as it is now."""
    return os.environ.get("HF_HUB_OFFLINE", "").upper() in YES


def cached_path(address: str) -> Path:
    """Where the file of this address lies, or will lie. A `.tar` after `.pth` is left out.

    Raises:
        CheckpointError: no address that is fetched.
    """
    parts = _allowed(address)
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
    with _writing(part), _alone(place):
        if not place.is_file():  # another process may have fetched it meanwhile
            _complete(address, part)
            _check(address, part, sha256)
            sync(part)
            os.replace(part, place)
            _state_of(part).unlink(missing_ok=True)
            sync_folder(place.parent)
    return place


def file_sha256(path: Path) -> str:
    """The SHA-256 of a file, in 64 hex digits."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _allowed(address: str) -> Any:
    parts = urlsplit(address)
    secure = parts.scheme == "https" or (parts.scheme == "http" and parts.hostname in LOCAL)
    if not (secure and parts.hostname):
        raise CheckpointError(f"{address}: expected an https:// address; nothing else is fetched")
    return parts


class _Redirects(urllib.request.HTTPRedirectHandler):
    """Follows no redirection that leaves https."""

    def redirect_request(self, req: Any, fp: Any, code: int, msg: str, headers: Any, newurl: str
                         ) -> urllib.request.Request | None:  # fmt: skip
        _allowed(newurl)
        return super().redirect_request(req, fp, code, msg, headers, newurl)


def _complete(address: str, part: Path) -> None:
    """Bring `part` to its full length, in as many requests as that takes."""
    for attempt in range(1, ATTEMPTS + 1):
        before = _size(part)
        try:
            _request(address, part)
            return
        except _Broken as broken:
            came = _size(part)
            if attempt == ATTEMPTS or came <= before:
                total = _state(part).get("length")
                known = f" of {total}" if total else ""
                raise CheckpointError(
                    f"{address}: broke off after {came}{known} bytes: {broken}; run it again"
                ) from None


def _request(address: str, part: Path) -> None:
    """One request: the rest of `part` where the server still has the same file, else all of it."""
    state, have = _state(part), _size(part)
    if have and have == state.get("length"):
        return
    headers = {"User-Agent": "vitkit"}
    if have and state.get("version"):
        headers |= {"Range": f"bytes={have}-", "If-Range": state["version"]}
    with _open(address, headers, part) as answer:
        start, length = _extent(answer, have)
        if not start:
            _discard(part)
        state = {"version": _version(answer.headers), "length": length}
        _state_of(part).write_text(json.dumps(state))
        needed = (length or 0) - start
        if needed > (free := shutil.disk_usage(part.parent).free):
            raise OSError(errno.ENOSPC, f"{needed / 1e6:.1f} MB needed, {free / 1e6:.1f} MB free")
        with part.open("ab") as file, _bar(part.stem, start, length) as advance:
            for chunk in _chunks(answer):
                file.write(chunk)
                advance(len(chunk))
    if length is not None and _size(part) < length:
        raise _Broken("the server closed the connection")


def _open(address: str, headers: dict[str, str], part: Path) -> Any:
    """The open response; where the server refuses to continue `part`, that to a fresh start."""
    opener = urllib.request.build_opener(_Redirects)
    try:
        return opener.open(urllib.request.Request(address, headers=headers), timeout=TIMEOUT)
    except urllib.error.HTTPError as error:
        error.close()
        if error.code == 416 and "Range" in headers:
            _discard(part)
            return _open(address, {"User-Agent": headers["User-Agent"]}, part)
        raise CheckpointError(
            f"{address}: the server answers {error.code} {error.reason}"
        ) from None
    except (urllib.error.URLError, http.client.HTTPException, OSError) as error:
        raise CheckpointError(
            f"{address}: not in the cache, and {urlsplit(address).hostname} cannot be reached: "
            f"{getattr(error, 'reason', error)}"
        ) from None


def _extent(answer: Any, have: int) -> tuple[int, int | None]:
    """Where the bytes that come begin, and the length of the whole file if it is said."""
    if answer.status == 206:
        found = re.fullmatch(r"bytes (\d+)-\d+/(\d+)", answer.headers.get("Content-Range", ""))
        if found and int(found[1]) == have:
            return have, int(found[2])
        raise _Broken("the server continues at another place than asked for")
    length = answer.headers.get("Content-Length")
    return 0, int(length) if length else None


def _version(headers: Any) -> str:
    """What `If-Range` can name: a strong ETag, else the time of the last change, else nothing."""
    tag = headers.get("ETag", "")
    return tag if tag and not tag.startswith("W/") else headers.get("Last-Modified", "")


def _chunks(answer: Any) -> Iterator[bytes]:
    while True:
        try:
            chunk = answer.read(CHUNK)
        except (http.client.HTTPException, OSError) as error:
            raise _Broken(str(error) or type(error).__name__) from None
        if not chunk:
            return
        yield chunk


def _check(address: str, part: Path, sha256: str) -> None:
    """Hold the whole file against its length and digest; one that is wrong is deleted."""
    length, found = _state(part).get("length"), _size(part)
    if length is not None and found != length:
        _discard(part)
        raise CheckpointError(f"{address}: expected {length} bytes, got {found}; run it again")
    if sha256 and not (digest := file_sha256(part)).startswith(sha256.lower()):
        _discard(part)
        raise CheckpointError(
            f"{address}: expected SHA-256 {sha256}, got {digest[: max(len(sha256), 16)]}; "
            f"the file is deleted"
        )


def _state_of(part: Path) -> Path:
    return part.with_suffix(".state")


def _state(part: Path) -> dict[str, Any]:
    try:
        state = json.loads(_state_of(part).read_text())
    except (OSError, ValueError):
        return {}
    return state if isinstance(state, dict) else {}


def _size(part: Path) -> int:
    return part.stat().st_size if part.exists() else 0


def _discard(part: Path) -> None:
    part.unlink(missing_ok=True)
    _state_of(part).unlink(missing_ok=True)


@contextmanager
def _writing(part: Path) -> Iterator[None]:
    """The cache's folder, and every trouble with writing there in one line."""
    try:
        part.parent.mkdir(parents=True, exist_ok=True)
        yield
    except OSError as error:
        raise OutputError(
            f"cannot write {part}: {error.strerror or error}; free some space or set VITKIT_CACHE "
            f"to a folder elsewhere; what was fetched stays and is continued"
        ) from None


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
