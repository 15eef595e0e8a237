"""One request for a file on the web: its beginning, or what is missing of it.

What has come of a file is kept in a `.part`; a `.state` beside it holds which version of the file
that is of, so that the next request asks for the rest (`Range`, `If-Range`: RFC 9110, 13.1.5 and
14.2) and gets the whole file where the server has another one by now. How often to ask, and what
to make of a file that is whole, is for the callers to say.
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
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from pathlib import Path
from typing import Any
from urllib.parse import SplitResult, urlsplit

from vitkit.errors import OutputError

CHUNK = 1 << 20
TIMEOUT = 30.0
"""Seconds without a byte after which a connection counts as broken."""
LOCAL = ("127.0.0.1", "localhost", "::1")
YES = {"1", "ON", "YES", "TRUE"}
OVERLOADED = (408, 429)
"""Answers below 500 that may be another one a little later."""
AGENT = {"User-Agent": "vitkit"}

Bar = Callable[[str, int, int | None], AbstractContextManager[Callable[[int], Any]]]
"""Name, first byte, bytes in all if known -> what takes the number of bytes that have come."""


class WebError(Exception):
    """A file that did not come, or not to its end.

    Attributes:
        passing: whether another request may have an answer; what has come is kept.
        broken: whether it had begun to come.
        wait: seconds after which the server wants to be asked again; 0 if it did not say.
    """

    def __init__(
        self, said: str, *, passing: bool = False, broken: bool = False, wait: float = 0.0
    ) -> None:
        super().__init__(said)
        self.passing, self.broken, self.wait = passing or broken, broken, wait


def offline() -> bool:
    """Whether `HF_HUB_OFFLINE` forbids asking the network, as it is now."""
    return os.environ.get("HF_HUB_OFFLINE", "").upper() in YES


def allowed(address: str) -> SplitResult:
    """The parts of an address that may be asked: `https://`, or `http://` of this machine.

    Raises:
        WebError: any other one.
    """
    try:
        parts = urlsplit(address)
        local = parts.hostname in LOCAL
    except ValueError as error:
        raise WebError(f"{address}: no address: {error}") from None
    secure = parts.scheme == "https" or (parts.scheme == "http" and local)
    if not (secure and parts.hostname):
        raise WebError(f"{address}: expected an https:// address; nothing else is fetched")
    return parts


def stamp(address: str) -> tuple[str, int | None]:
    """(what tells this version of a file from another, its length), empty or None if not said.

    One byte is asked for: not every server that gives files answers to `HEAD`.

    Raises:
        WebError: not there, or not reachable.
    """
    with _open(address, AGENT | {"Range": "bytes=0-0"}) as answer:
        _, length = _extent(answer, 0)
        return _version(answer.headers), length


def request(address: str, part: Path, bar: Bar = lambda *about: nullcontext(_unheard)) -> None:
    """One request: the rest of `part` where the server still has the same file, else all of it.

    Raises:
        WebError: not there, not reachable, or broken off.
        OSError: `part` cannot be written.
    """
    state, have = state_of(part), size_of(part)
    if have and have == state.get("length"):
        return
    headers = dict(AGENT)
    if have and state.get("version"):
        headers |= {"Range": f"bytes={have}-", "If-Range": state["version"]}
    with _open(address, headers, part) as answer:
        start, length = _extent(answer, have)
        if not start:
            discard(part)
        state = {"version": _version(answer.headers), "length": length}
        _state_file(part).write_text(json.dumps(state))
        needed = (length or 0) - start
        if needed > (free := shutil.disk_usage(part.parent).free):
            raise OSError(errno.ENOSPC, f"{needed / 1e6:.1f} MB needed, {free / 1e6:.1f} MB free")
        with part.open("ab") as file, bar(part.stem, start, length) as advance:
            for chunk in _chunks(answer):
                file.write(chunk)
                advance(len(chunk))
    if length is not None and size_of(part) < length:
        raise WebError("the server closed the connection", broken=True)


@contextmanager
def writing(place: Path, mend: str) -> Iterator[None]:
    """The folder of a place in the cache, and every trouble with writing there in one line.

    Args:
        place: of a file that is written in the block.
        mend: what to do about it.

    Raises:
        OutputError: the disk is full, read-only, or otherwise refuses.
    """
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
        yield
    except OSError as error:
        raise OutputError(f"cannot write {place}: {error.strerror or error}; {mend}") from None


def state_of(part: Path) -> dict[str, Any]:
    """What was said about the file of `part`: its `version` and `length`; empty where unknown."""
    try:
        state = json.loads(_state_file(part).read_text())
    except (OSError, ValueError):
        return {}
    return state if isinstance(state, dict) else {}


def size_of(part: Path) -> int:
    """How many bytes have come."""
    return part.stat().st_size if part.exists() else 0


def discard(part: Path) -> None:
    """Forget what has come."""
    part.unlink(missing_ok=True)
    _state_file(part).unlink(missing_ok=True)


def keep(part: Path, place: Path) -> None:
    """Give a whole file its name."""
    os.replace(part, place)
    _state_file(part).unlink(missing_ok=True)


class _Redirects(urllib.request.HTTPRedirectHandler):
    """Follows no redirection that leaves https."""

    def redirect_request(self, req: Any, fp: Any, code: int, msg: str, headers: Any, newurl: str
                         ) -> urllib.request.Request | None:  # fmt: skip
        allowed(newurl)
        return super().redirect_request(req, fp, code, msg, headers, newurl)


def _open(address: str, headers: dict[str, str], part: Path | None = None) -> Any:
    """The open response; where the server refuses to continue `part`, that to a fresh start."""
    allowed(address)
    opener = urllib.request.build_opener(_Redirects)
    try:
        return opener.open(urllib.request.Request(address, headers=headers), timeout=TIMEOUT)
    except urllib.error.HTTPError as error:
        error.close()
        if error.code == 416 and "Range" in headers:
            if part is not None:
                discard(part)
            return _open(address, AGENT, part)
        passing = error.code >= 500 or error.code in OVERLOADED
        said = f"{address}: the server answers {error.code} {error.reason}"
        raise WebError(said, passing=passing, wait=_retry_after(error.headers)) from None
    except (urllib.error.URLError, http.client.HTTPException, OSError) as error:
        host, reason = urlsplit(address).hostname, getattr(error, "reason", error)
        raise WebError(
            f"{address}: not in the cache, and {host} cannot be reached: {reason}", passing=True
        ) from None


def _extent(answer: Any, have: int) -> tuple[int, int | None]:
    """Where the bytes that come begin, and the length of the whole file if it is said."""
    if answer.status == 206:
        found = re.fullmatch(
            r"bytes (\d{1,18})-\d+/(\d{1,18})", answer.headers.get("Content-Range", "")
        )
        if found and int(found[1]) == have:
            return have, int(found[2])
        raise WebError("the server continues at another place than asked for", broken=True)
    length = answer.headers.get("Content-Length", "")
    return 0, int(length) if re.fullmatch(r"\d{1,18}", length) else None


def _version(headers: Any) -> str:
    """What `If-Range` can name: a strong ETag, else the time of the last change, else nothing."""
    tag: str = headers.get("ETag", "")
    return tag if tag and not tag.startswith("W/") else headers.get("Last-Modified", "")


def _retry_after(headers: Any) -> float:
    """Seconds that the server asks to wait, given as such or as a date (RFC 9110, 10.2.3)."""
    said: str = headers.get("Retry-After", "").strip()
    if re.fullmatch(r"\d{1,9}", said):
        return float(said)
    try:
        wait = parsedate_to_datetime(said).astimezone(UTC) - datetime.now(UTC)
    except (ValueError, OverflowError):
        return 0.0
    return max(0.0, wait.total_seconds())


def _chunks(answer: Any) -> Iterator[bytes]:
    while True:
        try:
            chunk = answer.read1(CHUNK)  # `read` would lose what came just before a reset
        except (http.client.HTTPException, OSError) as error:
            raise WebError(str(error) or type(error).__name__, broken=True) from None
        if not chunk:
            return
        yield chunk


def _state_file(part: Path) -> Path:
    return part.with_suffix(".state")


def _unheard(count: int) -> None:
    """Nobody wants to know how many bytes have come."""
