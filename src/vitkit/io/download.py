"""Files and images at plain web addresses: one function receives them all, with limits.

Files of the Hugging Face Hub are downloaded by `huggingface_hub`. A download that fails is begun
again by the next call; nothing is resumed.
"""

import hashlib
import io
import ipaddress
import os
import re
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from http.client import HTTPException, HTTPResponse
from pathlib import Path
from socket import gaierror
from typing import Any
from urllib.error import HTTPError, URLError
from urllib.parse import quote, unquote, urlsplit
from urllib.request import HTTPRedirectHandler, Request, build_opener

from vitkit import errors, messages
from vitkit.io import atomic, caches

WEB_SCHEMES = ("http", "https")
TIMEOUT = 30.0
"""Seconds without a byte after which a server counts as hanging."""
CHUNK_SIZE = 1 << 20
UNCHANGED = "!#$%&'()*+,/:;=?@[]~"
"""Characters of an address that are sent as they are; others are sent as `%` and their bytes."""
AGENT = {"User-Agent": "vitkit"}
YES = ("1", "ON", "YES", "TRUE")
"""Values of `HF_HUB_OFFLINE` that forbid downloads."""


class WebError(Exception):
    """A file that was not received, or not completely; the message does not name the address."""


class TooLarge(WebError):
    """A file with more bytes than are received."""


def is_web_address(text: str) -> bool:
    """Return True for an http or https address.

    >>> is_web_address("https://example.com/a.jpg"), is_web_address("photos/a.jpg")
    (True, False)
    """
    scheme, separator, _ = text.partition("://")
    return bool(separator) and scheme.lower() in WEB_SCHEMES


def download(
    address: str,
    *,
    size: int | None = None,
    sha256: str = "",
    rehash: bool = True,
    error: type[errors.VitkitError] = errors.CheckpointError,
) -> Path:
    """Return the file at a web address, from the user's cache or downloaded into it.

    Args:
        address: `https://...`, also `http://` of this machine.
        size: its size in bytes; unchecked where None.
        sha256: leading hex digits that its SHA-256 must have; unchecked where empty.
        rehash: also compare the SHA-256 of a file in the cache, not its size alone.
        error: the exception to raise for a file that is not there or not the one expected.

    Raises:
        CheckpointError: or `error`: not there, not reachable, not whole, not the file expected, or
            `HF_HUB_OFFLINE` forbids to fetch it.
        OutputError: the cache cannot be written.
    """
    try:
        path = cached_path(address)
        if caches.is_whole(path, rehash=rehash, sha256=sha256):
            return path
        with caches.caching(path.parent) as folder:
            temporary = folder / path.name
            with temporary.open("wb") as file:
                receive(address, file, size=size, title=path.name)
            digest = caches.file_sha256(temporary)
            if not digest.startswith(sha256.lower()):
                raise WebError(f"expected SHA-256 {sha256}, got {digest[: max(len(sha256), 16)]}")
    except WebError as problem:
        raise error(f"{address}: {problem}") from None
    except OSError as problem:
        raise atomic.output_error(path, problem) from None
    return path


def cached_path(address: str) -> Path:
    """Return the path of an address in the cache, fetched or not. `.tar` after `.pth` is dropped.

    Raises:
        WebError: not an address that may be fetched.
    """
    _check(address)
    parts = urlsplit(address)
    name = unquote(parts.path).rpartition("/")[2].removesuffix(".tar")
    if not re.fullmatch(r"[\w+-][\w.+ -]*", name):
        raise WebError("expected an address that ends in the name of a file")
    # so that files of the same name do not collide
    digest = hashlib.sha256(address.encode()).hexdigest()[:12]
    return caches.cache_folder() / f"{parts.hostname}-{digest}" / name


def receive(
    address: str,
    file: io.BufferedIOBase,
    *,
    size: int | None = None,
    most_bytes: int | None = None,
    seconds: float | None = None,
    plain_http: bool = False,
    title: str = "",
) -> str:
    """Write the file at an address into an open file; redirections are followed.

    Args:
        address: `https://...`, also `http://` of this machine.
        file: receives the bytes.
        size: its size in bytes; that of the server's answer where None.
        most_bytes: the most bytes that are received; no limit where None.
        seconds: the longest time that it may take, however many bytes come in between.
        plain_http: allow `http://` of other machines, too.
        title: name beside a progress bar on stderr, where that is a terminal; none where empty.

    Returns:
        The server's word for its type, such as `image/png`; may be empty or wrong.

    Raises:
        WebError: no such file, another size, or the server cannot be reached; `TooLarge`.
        OSError: `file` cannot be written.
    """
    if os.environ.get("HF_HUB_OFFLINE", "").upper() in YES:
        raise WebError("HF_HUB_OFFLINE forbids downloading it")
    end = None if seconds is None else time.monotonic() + seconds
    bar: AbstractContextManager[Callable[[int], object]] = nullcontext(lambda count: None)
    received = 0
    with _opened(address, plain_http) as response:
        length = response.length
        _compare(length, size)
        if title:
            bar = messages.progress_bar(length, title, in_bytes=True)
        with bar as advance:
            for chunk in _chunks(response):
                received += len(chunk)
                if most_bytes is not None and max(received, length or 0) > most_bytes:
                    raise TooLarge(
                        f"{max(received, length or 0):,} bytes; at most {most_bytes:,} bytes are "
                        "downloaded"
                    )
                if end is not None and time.monotonic() > end:
                    raise WebError(f"only {received:,} bytes came within {seconds:g} seconds")
                file.write(chunk)
                advance(len(chunk))
        _compare(received, size if length is None else length)
        if not received:
            raise WebError("the server sent no byte")
        return response.headers.get("Content-Type", "").partition(";")[0].strip().lower()


def _compare(received: int | None, expected: int | None) -> None:
    if None not in (received, expected) and received != expected:
        raise WebError(
            f"expected {expected:,} bytes, got {received:,}; the connection broke off, or the "
            "server sent an error or sign-in page; run it again"
        )


class _Redirections(HTTPRedirectHandler):
    """Follows redirections to allowed addresses, without reading the pages that come with them."""

    def __init__(self, plain_http: bool) -> None:
        self._plain_http = plain_http

    def redirect_request(
        self, req: Request, fp: Any, code: int, msg: str, headers: Any, newurl: str
    ) -> Request | None:
        fp.close()  # urllib reads the page to its end, and it may have none
        _check(newurl, self._plain_http, before=req.full_url)
        return super().redirect_request(req, fp, code, msg, headers, newurl)


def _opened(address: str, plain_http: bool) -> HTTPResponse:
    """Return the answer to a request for a whole file."""
    _check(address, plain_http)
    try:
        # by the proxies of the environment
        opener = build_opener(_Redirections(plain_http))
        request = Request(quote(address, safe=UNCHANGED), headers=AGENT)
        response: HTTPResponse = opener.open(request, timeout=TIMEOUT)
    except HTTPError as error:
        error.close()
        # urllib explains a circle of redirections in three lines
        reason = str(error.reason).partition("\n")[0]
        raise WebError(f"the server answered {error.code} {reason}") from None
    except (OSError, HTTPException, ValueError) as error:
        raise WebError(_reason(error)) from None
    if response.status != 200:  # such as 204: no content
        response.close()
        raise WebError(f"the server answered {response.status} {response.reason}")
    return response


def _check(address: str, plain_http: bool = False, before: str = "") -> None:
    """Raise `WebError` for an address that may not be fetched, or not be redirected to."""
    problem = ""
    try:
        parts = urlsplit(address)
        host = parts.hostname or ""
    except ValueError as error:
        raise WebError(f"not a valid address: {error}") from None
    # http of this machine is for tests and local mirrors
    plain_http = plain_http or _network(host) == "here"
    leaves = bool(before) and _network(urlsplit(before).hostname or "") == "public"
    if parts.scheme != "https" and not (parts.scheme == "http" and plain_http):
        problem = f"{address}: expected an https:// address"
    elif not host:
        problem = "the address has no host"
    elif leaves and _network(host) != "public":
        problem = f"the server redirects to {address}, in a private network; refused"
    if problem:
        raise WebError(problem)


def _network(host: str) -> str:
    """Return where a host is, as far as its text tells: `here`, `private` or `public`."""
    host = host.rstrip(".").lower()
    if host == "localhost" or host.endswith(".localhost"):
        return "here"
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        try:  # 127.1 and 2130706433 are addresses, too
            address = ipaddress.ip_address(socket.inet_aton(host))
        except OSError:
            return "public"
    if address.is_loopback:
        return "here"
    if address.is_global:
        return "public"
    return "private"


def _chunks(response: HTTPResponse) -> Iterator[bytes]:
    while True:
        try:
            # received bytes are returned at once: a server may send single bytes for hours
            chunk = response.read1(CHUNK_SIZE)
        except (OSError, HTTPException) as error:
            raise WebError(_reason(error)) from None
        if not chunk:
            return
        yield chunk


def _reason(error: Exception) -> str:
    """Return in a few words why a download failed."""
    cause = error.reason if isinstance(error, URLError) else error
    if isinstance(cause, gaierror):
        return "the name of the host is unknown, or there is no network"
    if isinstance(cause, TimeoutError):
        return f"the server sent nothing for {TIMEOUT:g} seconds; run it again"
    if isinstance(cause, HTTPException) and not isinstance(cause, OSError):
        return f"the connection broke off ({type(cause).__name__}); run it again"
    return f"cannot be downloaded: {getattr(cause, 'strerror', None) or cause}"
