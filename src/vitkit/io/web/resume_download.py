"""Resume a download: receive a file in parts, and continue where a transfer broke off.

Received bytes are appended to a part file. The next request asks for the rest (`Range`, `If-Range`:
RFC 9110, 13.1.5 and 14.2), and gets the whole file if the server has another version by then.
`open_address` repeats what fails before the first byte; `receive` continues what breaks off later.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext

import urllib3
from urllib3.exceptions import HTTPError, ProtocolError

from vitkit.io.progress import progress_bar
from vitkit.io.web.connections import AGENT, ONCE, Attempts, WebError, open_address
from vitkit.io.web.part_file import PartFile

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
    with open_address(address, attempts, AGENT | {"Range": "bytes=0-0"}) as response:
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
    with open_address(address, attempts, headers) as response:
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
