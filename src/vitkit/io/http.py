"""One HTTP request for a file: all of it, or the bytes that an earlier request did not get.

Received bytes are appended to a `.part` file; a `.state` file beside it holds the version that they
belong to. The next request asks for the rest (`Range`, `If-Range`: RFC 9110, 13.1.5 and 14.2), and
gets the whole file if the server has another version by then. Retrying and checking the complete
file are up to the callers.
"""

from __future__ import annotations

import errno
import http.client
import json
import os
import re
import shutil
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from pathlib import Path
from typing import Any
from urllib.parse import SplitResult, urlsplit

from vitkit.errors import OutputError
from vitkit.io.progress import progress_bar

CHUNK_SIZE = 1 << 20
TIMEOUT = 30.0
"""Seconds without a byte after which a connection counts as broken."""
LOCAL_HOSTS = ("127.0.0.1", "localhost", "::1")
YES = {"1", "ON", "YES", "TRUE"}
OVERLOADED = (408, 429)
"""Status codes below 500 after which a later request may succeed."""
AGENT = {"User-Agent": "vitkit"}


class WebError(Exception):
    """A file that was not received, or not completely.

    Attributes:
        passing: True if another request may succeed; received bytes are kept.
        broken: True if the transfer had begun.
        wait: seconds after which the server asks to be tried again; 0 if it names none.
    """

    def __init__(
        self, message: str, *, passing: bool = False, broken: bool = False, wait: float = 0.0
    ) -> None:
        super().__init__(message)
        self.passing = passing or broken
        self.broken = broken
        self.wait = wait


def offline() -> bool:
    """Return True if `HF_HUB_OFFLINE` forbids network access; read at each call."""
    return os.environ.get("HF_HUB_OFFLINE", "").upper() in YES


def parse_address(address: str) -> SplitResult:
    """Split an address that may be fetched: `https://`, or `http://` of this machine.

    Raises:
        WebError: any other address.
    """
    try:
        parts = urlsplit(address)
        local = parts.hostname in LOCAL_HOSTS
    except ValueError as error:
        raise WebError(f"{address}: no address: {error}") from None
    secure = parts.scheme == "https" or (parts.scheme == "http" and local)
    if not (secure and parts.hostname):
        raise WebError(f"{address}: expected an https:// address; nothing else is fetched")
    return parts


def remote_version(address: str) -> tuple[str, int | None]:
    """Ask for a file's version (ETag or time of change) and its length in bytes.

    Both are empty or None where the server does not name them. The request is for one byte: not
    every server that serves files answers `HEAD`.

    Raises:
        WebError: no such file, or the server cannot be reached.
    """
    with _open(address, AGENT | {"Range": "bytes=0-0"}) as response:
        _, length = _extent(response, 0)
        return _version(response.headers), length


def request(address: str, part: Path, *, show_progress: bool = False) -> None:
    """Send one request: for the rest of `part` if the file is unchanged, else for all of it.

    Args:
        address: the file's address.
        part: where received bytes are appended.
        show_progress: show a bar on stderr, where that is a terminal.

    Raises:
        WebError: no such file, server not reachable, or the transfer broke off.
        OSError: `part` cannot be written.
    """
    state = part_state(part)
    received = part_size(part)
    if received and received == state.get("length"):
        return
    headers = dict(AGENT)
    if received and state.get("version"):
        headers |= {"Range": f"bytes={received}-", "If-Range": state["version"]}
    with _open(address, headers, part) as response:
        start, length = _extent(response, received)
        if not start:  # another version, or a server without ranges
            discard_part(part)
        state = {"version": _version(response.headers), "length": length}
        # before the first byte: bytes without a version could not be continued
        _state_file(part).write_text(json.dumps(state))
        needed = (length or 0) - start
        free = shutil.disk_usage(part.parent).free
        if needed > free:
            raise OSError(errno.ENOSPC, f"{needed / 1e6:.1f} MB needed, {free / 1e6:.1f} MB free")
        bar = (
            progress_bar(length, part.stem, done=start, in_bytes=True)
            if show_progress
            else nullcontext(lambda count: None)
        )
        with part.open("ab") as file, bar as advance:
            for chunk in _chunks(response):
                file.write(chunk)
                advance(len(chunk))
    if length is not None and part_size(part) < length:
        raise WebError("the server closed the connection", broken=True)


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


def part_state(part: Path) -> dict[str, Any]:
    """Return `version` and `length` of the file of `part`; an empty dict where unknown."""
    try:
        state = json.loads(_state_file(part).read_text())
    except (OSError, ValueError):
        return {}
    return state if isinstance(state, dict) else {}


def part_size(part: Path) -> int:
    """Return the number of bytes received so far."""
    return part.stat().st_size if part.exists() else 0


def discard_part(part: Path) -> None:
    """Delete what was received."""
    part.unlink(missing_ok=True)
    _state_file(part).unlink(missing_ok=True)


def finish_part(part: Path, path: Path) -> None:
    """Rename a complete file to its final path."""
    os.replace(part, path)
    _state_file(part).unlink(missing_ok=True)


class _Redirects(urllib.request.HTTPRedirectHandler):
    """Redirection that never leaves https."""

    def redirect_request(
        self, req: Any, fp: Any, code: int, msg: str, headers: Any, newurl: str
    ) -> urllib.request.Request | None:
        parse_address(newurl)
        return super().redirect_request(req, fp, code, msg, headers, newurl)


def _open(address: str, headers: dict[str, str], part: Path | None = None) -> Any:
    """Return the open response; start afresh where the server refuses to continue `part`."""
    parse_address(address)
    opener = urllib.request.build_opener(_Redirects)
    try:
        return opener.open(urllib.request.Request(address, headers=headers), timeout=TIMEOUT)
    except urllib.error.HTTPError as error:
        error.close()
        # 416: the file is shorter than `part` by now
        if error.code == 416 and "Range" in headers:
            if part is not None:
                discard_part(part)
            return _open(address, AGENT, part)
        raise WebError(
            f"{address}: the server answers {error.code} {error.reason}",
            passing=error.code >= 500 or error.code in OVERLOADED,
            wait=_retry_after(error.headers),
        ) from None
    except (urllib.error.URLError, http.client.HTTPException, OSError) as error:
        host = urlsplit(address).hostname
        reason = getattr(error, "reason", error)
        raise WebError(
            f"{address}: not in the cache, and {host} cannot be reached: {reason}", passing=True
        ) from None


def _extent(response: Any, received: int) -> tuple[int, int | None]:
    """Return the offset of the first byte of the body, and the length of the whole file."""
    if response.status == 206:
        extent = response.headers.get("Content-Range", "")
        match = re.fullmatch(r"bytes (\d{1,18})-\d+/(\d{1,18})", extent)
        if match and int(match[1]) == received:
            return received, int(match[2])
        raise WebError("the server continues at another place than asked for", broken=True)
    length = response.headers.get("Content-Length", "")
    return 0, int(length) if re.fullmatch(r"\d{1,18}", length) else None


def _version(headers: Any) -> str:
    """Return a value for `If-Range`: a strong ETag, else the time of change, else nothing."""
    tag: str = headers.get("ETag", "")
    if tag and not tag.startswith("W/"):  # a weak tag does not promise equal bytes
        return tag
    return headers.get("Last-Modified", "")


def _retry_after(headers: Any) -> float:
    """Return the seconds to wait, given as a number or as a date (RFC 9110, 10.2.3)."""
    value: str = headers.get("Retry-After", "").strip()
    if re.fullmatch(r"\d{1,9}", value):
        return float(value)
    try:
        wait = parsedate_to_datetime(value).astimezone(UTC) - datetime.now(UTC)
    except (ValueError, OverflowError):
        return 0.0
    return max(0.0, wait.total_seconds())


def _chunks(response: Any) -> Iterator[bytes]:
    while True:
        try:
            chunk = response.read1(CHUNK_SIZE)  # `read` would lose what came before a reset
        except (http.client.HTTPException, OSError) as error:
            raise WebError(str(error) or type(error).__name__, broken=True) from None
        if not chunk:
            return
        yield chunk


def _state_file(part: Path) -> Path:
    return part.with_suffix(".state")
