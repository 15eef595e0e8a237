"""Download files by `urllib3`: resumed after a break, and checked before they are used.

Received bytes are appended to a part file. The next request asks for the rest (`Range`, `If-Range`:
RFC 9110, 13.1.5 and 14.2), and gets the whole file if the server has another version by then.
`urllib3` retries what fails before the first byte; `receive` continues what breaks off later.

`download` keeps a file in the cache under its own name, in a folder named after host and address,
and only once it is complete and its digest is right. A cached file is not hashed again on every
load: only a complete, checked file ever gets that name, and hashing a ViT-H takes seconds.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Iterator
from contextlib import closing, contextmanager, nullcontext
from pathlib import Path
from typing import Any
from urllib.parse import SplitResult, unquote, urljoin, urlsplit
from urllib.request import getproxies, proxy_bypass

import urllib3
from filelock import FileLock
from urllib3.exceptions import HTTPError, InvalidHeader, MaxRetryError, ProtocolError

from vitkit.errors import CheckpointError, OutputError
from vitkit.io.atomic import sync, sync_folder
from vitkit.io.cache_folder import cache_folder
from vitkit.io.digests import file_sha256
from vitkit.io.part_file import PartFile
from vitkit.io.progress import progress_bar

CACHE_ADVICE = (
    "free some space, or set VITKIT_CACHE to another folder; what was downloaded is kept, and "
    "the next run continues it"
)
CHUNK_SIZE = 1 << 20
TIMEOUT = 30.0
"""Seconds without a byte after which a connection counts as broken."""
BACKOFF = 1.0
"""Half the seconds before the third attempt; the second follows at once, later ones by doubling."""
MAX_REDIRECTS = 10
LOCAL_HOSTS = ("127.0.0.1", "localhost", "::1")
YES = {"1", "ON", "YES", "TRUE"}
MAY_PASS = frozenset([408, 429, *range(500, 600)])
"""Status codes after which a later request may succeed."""
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
            status_forcelist=MAY_PASS,
            backoff_factor=BACKOFF,
            raise_on_status=False,  # the last answer's status is a better message
            retry_after_max=int(longest_pause),
        )

    @property
    def note(self) -> str:
        """How often a server was asked, for messages; empty for once."""
        count = 1 + sum(entry.redirect_location is None for entry in self.history)
        return f"; {count} attempts failed" if count > 1 else ""

    def parse_retry_after(self, retry_after: str) -> float:
        """Return the seconds to wait; 0 where the header is neither a number nor a date."""
        try:
            return float(super().parse_retry_after(retry_after))
        except (InvalidHeader, ValueError, OverflowError):
            return 0.0

    def increment(
        self, method: str | None = None, url: str | None = None, *args: Any, **keywords: Any
    ) -> Attempts:
        """Count an attempt. Raises `WebError` for a redirection that leaves https."""
        # urllib3 also calls this before it follows a redirection
        response = keywords.get("response")
        if response is not None and (location := response.get_redirect_location()):
            parse_address(urljoin(url or "", location))
        return super().increment(method, url, *args, **keywords)


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


def remote_version(address: str, attempts: Attempts = ONCE) -> tuple[str, int | None]:
    """Ask for a file's version (ETag or time of change) and its length in bytes.

    Both are empty or None where the server does not name them. The request is for one byte: not
    every server that serves files answers `HEAD`.

    Raises:
        WebError: no such file, or the server cannot be reached.
    """
    with _open(address, AGENT | {"Range": "bytes=0-0"}, attempts) as response:
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
    left = attempts
    most = part.size
    while True:
        try:
            return _request(address, part, attempts, length, show_progress)
        except WebError as error:
            if not error.broken:
                raise
            # A large file over a bad line needs many attempts; those that bring bytes are free.
            if part.size > most:
                most = part.size
                left = attempts
                continue
            try:
                left = left.increment("GET", address, error=ProtocolError(str(error)))
            except MaxRetryError:
                raise WebError(f"{error}{left.note}", broken=True) from None
        left.sleep()


def _request(
    address: str, part: PartFile, attempts: Attempts, expected: int | None, show_progress: bool
) -> None:
    """Ask for the rest of a file if it is unchanged, else for all of it."""
    state = part.state
    received = part.size
    # complete since an earlier call, which ended before the file was checked
    if received and received == state.get("length"):
        return
    headers = dict(AGENT)
    if received and state.get("version"):
        headers |= {"Range": f"bytes={received}-", "If-Range": state["version"]}
    with _open(address, headers, attempts, part) as response:
        start, length = _extent(response, received)
        if not start:  # another version, or a server without ranges
            part.discard()
        part.begin(_version(response), length)
        bar = (
            progress_bar(length, part.path.stem, done=start, in_bytes=True)
            if show_progress
            else nullcontext(lambda count: None)
        )
        with part.path.open("ab") as file, bar as advance:
            for chunk in _chunks(response):
                file.write(chunk)
                advance(len(chunk))
    # shorter is a break, and continued; longer is another file
    received = part.size
    if length is not None and received < length:
        raise WebError("the server closed the connection", broken=True)
    expected = length if expected is None else expected
    if expected is not None and received != expected:
        part.discard()
        raise WebError(
            f"expected {expected:,} bytes, got {received:,}; the server may have sent an error or "
            f"sign-in page",
            broken=True,
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
    # files of one name at several addresses do not meet
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
            # bytes first, then the name: a power cut leaves no damaged file under it
            sync(part.path)
            part.finish(path)
            sync_folder(path.parent)
    return path


def _not_whole(address: str, part: PartFile, error: WebError) -> str:
    """Return the message of a file that did not come, with what has come of it."""
    if not error.broken:
        return str(error)
    if not part.size:
        return f"{address}: {error}; run it again"
    total = part.state.get("length")
    of_total = f" of {total}" if total else ""
    return (
        f"{address}: interrupted after {part.size}{of_total} bytes: {error}; run it again to "
        f"continue"
    )


def _check_digest(address: str, part: PartFile, sha256: str) -> None:
    """Compare the digest of a complete file; delete a wrong one."""
    digest = file_sha256(part.path) if sha256 else ""
    if not digest.startswith(sha256.lower()):
        part.discard()
        raise CheckpointError(
            f"{address}: expected SHA-256 {sha256}, got {digest[: max(len(sha256), 16)]}; "
            f"the file was deleted"
        )


def connections(address: str) -> urllib3.PoolManager:
    """Return connections to the host of an address, or to the environment's proxy for it."""
    parts = urlsplit(address)
    proxy = getproxies().get(parts.scheme)
    if proxy and not proxy_bypass(parts.hostname or ""):
        return urllib3.ProxyManager(proxy)
    return urllib3.PoolManager()


@contextmanager
def _open(
    address: str, headers: dict[str, str], attempts: Attempts, part: PartFile | None = None
) -> Iterator[urllib3.BaseHTTPResponse]:
    """Yield the open response; start afresh where the server refuses to continue `part`."""
    host = parse_address(address).hostname
    try:
        # its length is checked by `_request`, which keeps what has come
        response = connections(address).request(
            "GET", address, headers=headers, timeout=TIMEOUT, retries=attempts,
            preload_content=False, enforce_content_length=False,
        )  # fmt: skip
    except HTTPError as error:
        reason = error.reason if isinstance(error, MaxRetryError) else error
        reason = getattr(reason, "__cause__", None) or reason
        raise WebError(
            f"{address}: not in the cache, and {host} cannot be reached: {reason}"
        ) from None
    with closing(response):
        # 416: the file is shorter than `part` by now
        if response.status == 416 and "Range" in headers:
            if part is not None:
                part.discard()
            with _open(address, AGENT, attempts) as whole:
                yield whole
            return
        if response.status >= 400:
            note = response.retries.note if isinstance(response.retries, Attempts) else ""
            raise WebError(
                f"{address}: the server answered {response.status} {response.reason}{note}"
            )
        yield response


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
            # `read` would lose what came before a reset
            chunk = response.read1(CHUNK_SIZE, decode_content=False)
        except (HTTPError, OSError) as error:
            raise WebError(str(error) or type(error).__name__, broken=True) from None
        if not chunk:
            return
        yield chunk
