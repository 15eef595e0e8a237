"""Downloads over http(s): connections, retries, resumed parts, size and hash checks.

`urllib3` sends each request, and its `Retry` counts the attempts and knows the pauses. The requests
themselves are repeated and redirected here: `urllib3` reads the page of an error or a redirection
to its end before the next request, and an endless page would block the run.
"""

from __future__ import annotations

import base64
import errno
import hashlib
import json
import os
import re
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, closing, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import SplitResult, unquote, unquote_to_bytes, urljoin, urlsplit
from urllib.request import getproxies, proxy_bypass

import urllib3
from filelock import FileLock
from urllib3.exceptions import (
    HTTPError,
    InvalidHeader,
    LocationValueError,
    MaxRetryError,
    ProtocolError,
)

from vitkit.errors import CheckpointError, OutputError
from vitkit.io.atomic import sync, sync_folder
from vitkit.io.caches import cache_folder, file_sha256
from vitkit.messages import progress_bar

# Addresses on the web, recognised by their text.

WEB_SCHEMES = ("http", "https")


def is_web_address(text: str) -> bool:
    """Return True for an http or https address.

    >>> is_web_address("https://example.com/a.jpg"), is_web_address("photos/a.jpg")
    (True, False)
    """
    scheme, separator, _ = text.partition("://")
    return bool(separator) and scheme.lower() in WEB_SCHEMES


TIMEOUT = 30.0
"""Seconds without a byte after which a connection counts as broken."""
BACKOFF = 1.0
"""Backoff factor: no pause before the second attempt, twice this before the third, then doubled."""
MAX_REDIRECTS = 10
LOCAL_HOSTS = ("127.0.0.1", "localhost", "::1")
YES = {"1", "ON", "YES", "TRUE"}
WITH_FILE = (200, 206)
"""Status codes of answers that hold a file, or a part of it."""
MAY_PASS = frozenset([408, 429, *range(500, 600)])
"""Status codes after which a later request may succeed."""
RANGE_REFUSED = 416
AGENT = {"User-Agent": "vitkit"}


class WebError(Exception):
    """A file that was not received, or not completely.

    Attributes:
        broken: True if the transfer had begun; the message does not name the address then.
    """

    def __init__(self, message: str, *, broken: bool = False) -> None:
        super().__init__(message)
        self.broken = broken


class Attempts(urllib3.Retry):
    """Attempts for a request, with growing pauses or those that the server asks for."""

    @classmethod
    def of(cls, count: int, longest_pause: float = 0.0) -> Attempts:
        """Allow a number of attempts, and pauses of so many seconds where the server asks."""
        again = count - 1
        return cls(
            total=None,
            connect=again,
            read=again,
            status=again,
            other=again,
            redirect=MAX_REDIRECTS,
            backoff_factor=BACKOFF,
            retry_after_max=int(longest_pause),
        )

    @property
    def note(self) -> str:
        """How often a server was asked, for messages; empty for once."""
        count = 1 + sum(entry.redirect_location is None for entry in self.history)
        return f"; {count} attempts failed" if count > 1 else ""

    def after(
        self, address: str, response: urllib3.BaseHTTPResponse | None, error: Exception | None
    ) -> Attempts | None:
        """Return what is left after an attempt, or a redirection; None where no other may help.

        Args:
            address: address that was asked.
            response: response of the server; None where there was none.
            error: why there was none.
        """
        if response is None:
            may_help = not isinstance(error, LocationValueError)
        else:
            may_help = response.status in MAY_PASS or bool(response.get_redirect_location())
        try:
            return self.increment("GET", address, response, error) if may_help else None
        except MaxRetryError:
            return None

    def parse_retry_after(self, retry_after: str) -> float:
        """Return the seconds to wait; 0 where the header is neither a number nor a date."""
        try:
            return float(super().parse_retry_after(retry_after))
        except (InvalidHeader, ValueError, OverflowError):
            return 0.0


ONCE = Attempts.of(1)


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
        raise WebError(f"{address}: not a valid address: {error}") from None
    # http of this machine is for tests and local mirrors
    secure = parts.scheme == "https" or (parts.scheme == "http" and local)
    if not (secure and parts.hostname):
        raise WebError(f"{address}: expected an https:// address")
    return parts


def connections(address: str) -> urllib3.PoolManager:
    """Return connections to the host of an address, or to the environment's proxy for it.

    Raises:
        urllib3.exceptions.LocationValueError: the proxy's address is not valid.
    """
    parts = urlsplit(address)
    proxy = getproxies().get(parts.scheme)
    # with the port, as `no_proxy` may name it
    if not proxy or proxy_bypass(parts.netloc.rpartition("@")[2]):
        return urllib3.PoolManager()
    if "://" not in proxy:
        proxy = f"http://{proxy}"
    headers = {}
    # urllib3 does not send the name and the password of the address
    if user_info := urllib3.util.parse_url(proxy).auth:
        user, _, password = user_info.partition(":")
        token = base64.b64encode(unquote_to_bytes(f"{user}:{password}")).decode()
        headers["Proxy-Authorization"] = f"Basic {token}"
    return urllib3.ProxyManager(proxy, proxy_headers=headers)


@contextmanager
def _open_address(
    address: str, attempts: Attempts = ONCE, headers: Mapping[str, str] = AGENT
) -> Iterator[urllib3.BaseHTTPResponse]:
    """Yield a server's response, whose body is a file or the requested range of it."""
    with closing(_answer_with_file(address, attempts, headers)) as response:
        yield response


def _answer_with_file(
    address: str, attempts: Attempts, headers: Mapping[str, str]
) -> urllib3.BaseHTTPResponse:
    place = address
    while True:
        parse_address(place)
        response, error = None, None
        try:
            response = connections(place).request(
                "GET",
                place,
                headers=headers,
                timeout=TIMEOUT,
                retries=False,
                redirect=False,
                preload_content=False,
                # checked by the caller, which keeps the received bytes
                enforce_content_length=False,
            )
        except HTTPError as caught:
            error = caught
        else:
            if response.status in WITH_FILE:
                return response
            response.close()
            # the file is shorter than the part received before
            if response.status == RANGE_REFUSED and "Range" in headers:
                headers = AGENT
                continue
        left = attempts.after(place, response, error)
        if left is None:
            raise WebError(f"{address}: {_problem(place, response, error, attempts.note)}")
        attempts = left
        if response is not None and (location := response.get_redirect_location()):
            place = _redirected(place, location)
        else:
            attempts.sleep(response)


def _problem(
    place: str, response: urllib3.BaseHTTPResponse | None, error: HTTPError | None, note: str
) -> str:
    """Return why there is no file, for a message."""
    if response is None:
        reason = getattr(error, "__cause__", None) or error
        problem = f"not in the cache, and {urlsplit(place).hostname} cannot be reached: {reason}"
        if isinstance(error, LocationValueError):  # also of a proxy's address
            return problem
        return f"{problem}{note}; check the network, then run it again"
    if response.get_redirect_location():
        return f"the server redirects more than {MAX_REDIRECTS} times"
    return f"the server answered {response.status} {response.reason}{note}"


def _redirected(place: str, location: str) -> str:
    try:
        return urljoin(place, location)
    except ValueError as error:
        raise WebError(f"{place}: redirected to an address that is not valid: {error}") from None


# A file that is received in parts: the bytes so far, and the version that they belong to.


@dataclass(frozen=True)
class PartFile:
    """The bytes of a file received so far; a `.state` file beside them names their version.

    Attributes:
        path: path of the bytes.
    """

    path: Path

    @property
    def size(self) -> int:
        """The number of bytes received so far."""
        return self.path.stat().st_size if self.path.exists() else 0

    @property
    def state(self) -> dict[str, Any]:
        """The `version` and `length` of the whole file; empty where unknown."""
        try:
            state = json.loads(self._state_path.read_text())
        except (OSError, ValueError):
            return {}
        # a truncated state file, after a power cut, counts as unknown
        return state if isinstance(state, dict) else {}

    @property
    def can_continue(self) -> bool:
        """True if there are bytes, and the server named the version that they belong to."""
        return self.size > 0 and bool(self.state.get("version"))

    @property
    def _state_path(self) -> Path:
        return self.path.with_suffix(".state")

    def begin(self, version: str, length: int | None) -> None:
        """Record version and length before the first byte: without them no transfer can be resumed.

        Raises:
            OSError: it cannot be written, or the disk is too full for the rest.
        """
        self._state_path.write_text(json.dumps({"version": version, "length": length}))
        # a full disk is reported now, not after gigabytes
        needed = (length or 0) - self.size
        free = shutil.disk_usage(self.path.parent).free
        if needed > free:
            raise OSError(errno.ENOSPC, f"{needed / 1e6:.1f} MB needed, {free / 1e6:.1f} MB free")

    def discard(self) -> None:
        """Delete the received bytes."""
        self.path.unlink(missing_ok=True)
        self._state_path.unlink(missing_ok=True)

    def finish(self, path: Path) -> None:
        """Rename the complete file to its final path."""
        os.replace(self.path, path)  # atomic: other processes see all of the file or none
        self._state_path.unlink(missing_ok=True)


# Download files into the cache: each is checked before it is used, and fetched once.
#
# `resume_download` receives the bytes, also after a break. A file is kept under its own name, in a
# folder named after host and address, and only once it is complete and its digest is right. A
# cached file is not hashed again on every load: only a complete, checked file ever gets that name,
# and hashing a ViT-H takes seconds.

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


# Resume a download: receive a file in parts, and continue where a transfer broke off.
#
# Received bytes are appended to a part file. The next request asks for the rest (`Range`, `If-
# Range`: RFC 9110, 13.1.5 and 14.2), and gets the whole file if the server has another version by
# then. `_open_address` repeats what fails before the first byte; `receive` continues what breaks
# off later.

CHUNK_SIZE = 1 << 20
MOST_CONTINUED = 100
"""Most continuations of an interrupted transfer that made progress."""
PAUSE = 1.0
"""Seconds before a transfer is continued."""


def remote_version(address: str, attempts: Attempts = ONCE) -> tuple[str, int | None]:
    """Ask for a file's version (ETag or time of change) and its length in bytes.

    Both are empty or None where the server does not name them. The request is for one byte: not
    every server that serves files answers `HEAD`.

    Raises:
        WebError: no such file, or the server cannot be reached.
    """
    with _open_address(address, attempts, AGENT | {"Range": "bytes=0-0"}) as response:
        _, length = _extent(response, 0)
        return _version(response), length


def receive(
    address: str,
    part: PartFile,
    attempts: Attempts = ONCE,
    *,
    length: int | None = None,
    show_progress: bool = False,
) -> None:
    """Send requests until a file is complete.

    Args:
        address: the file's address.
        part: what came of it; received bytes are appended.
        attempts: for each request, and for transfers in a row that break off without bringing more
            bytes than any before.
        length: the file's length in bytes; that of the answer where None.
        show_progress: show a bar on stderr, where that is a terminal.

    Raises:
        WebError: no such file, server not reachable, or the transfer broke off for good.
        OSError: `part` cannot be written.
    """
    # `most` is the maximum of all attempts: an attempt with more bytes does not count.
    left, most, continued = attempts, part.size, 0
    while True:
        try:
            return _request(address, part, attempts, length, show_progress)
        except WebError as error:
            if not error.broken:
                raise
            # A bad connection needs many attempts; those that make progress do not count.
            if part.size > most and continued < MOST_CONTINUED:
                left, most, continued = attempts, part.size, continued + 1
                time.sleep(PAUSE)
                continue
            remaining = left.after(address, None, ProtocolError(str(error)))
            if remaining is None:
                raise WebError(f"{error}{left.note}", broken=True) from None
        left = remaining
        left.sleep()


def _request(
    address: str, part: PartFile, attempts: Attempts, expected: int | None, show_progress: bool
) -> None:
    """Ask for the rest of a file if it is unchanged, else for all of it."""
    # complete already: an earlier call ended before the file was checked
    if part.size and part.size == part.state.get("length"):
        if expected in (None, part.size):
            return
        part.discard()
    headers = dict(AGENT)
    if part.can_continue:
        headers |= {"Range": f"bytes={part.size}-", "If-Range": part.state["version"]}
    received = part.size
    with _open_address(address, attempts, headers) as response:
        start, length = _extent(response, received)
        if not start:  # another version, a shorter file, or a server without ranges
            part.discard()
        part.begin(_version(response), length)
        bar: AbstractContextManager[Callable[[int], object]] = nullcontext(lambda count: None)
        if show_progress:
            bar = progress_bar(length, part.path.stem, done=start, in_bytes=True)
        with part.path.open("ab") as file, bar as advance:
            for chunk in _chunks(response):
                file.write(chunk)
                advance(len(chunk))
    # shorter is a break, and continued; longer is another file
    received = part.size
    if received < (1 if length is None else length):
        raise WebError("the server closed the connection", broken=True)
    expected = length if expected is None else expected
    if expected is not None and received != expected:
        part.discard()
        raise WebError(
            f"expected {expected:,} bytes, got {received:,}; the server may have sent an error or "
            f"sign-in page",
            broken=True,
        )


def _extent(response: urllib3.BaseHTTPResponse, received: int) -> tuple[int, int | None]:
    """Return the offset of the first byte of the body, and the length of the whole file."""
    if response.status == 206:
        extent = response.headers.get("Content-Range", "")
        match = re.fullmatch(r"bytes (\d{1,18})-\d+/(\d{1,18})", extent)
        if match and int(match[1]) == received:
            return received, int(match[2])
        raise WebError("the server continues at another position than requested", broken=True)
    length = response.headers.get("Content-Length", "")
    return 0, int(length) if re.fullmatch(r"\d{1,18}", length) else None


def _version(response: urllib3.BaseHTTPResponse) -> str:
    """Return a value for `If-Range`: a strong ETag, else the time of change, else nothing."""
    tag = response.headers.get("ETag", "")
    if tag and not tag.startswith("W/"):  # a weak tag does not promise equal bytes
        return tag
    return response.headers.get("Last-Modified", "")


def _chunks(response: urllib3.BaseHTTPResponse) -> Iterator[bytes]:
    while True:
        try:
            # `read` would lose the bytes received before a reset
            chunk = response.read1(CHUNK_SIZE, decode_content=False)
        except (HTTPError, OSError) as error:
            raise WebError(str(error) or type(error).__name__, broken=True) from None
        if not chunk:
            return
        yield chunk
