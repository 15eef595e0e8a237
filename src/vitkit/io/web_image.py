"""Images on a web server: one address, one image, with limits."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

import urllib3
from urllib3.exceptions import (
    ConnectTimeoutError,
    HTTPError,
    MaxRetryError,
    NameResolutionError,
    NewConnectionError,
    ProtocolError,
    ReadTimeoutError,
)

from vitkit.errors import ImageError
from vitkit.io.download import AGENT, CHUNK_SIZE, MAX_REDIRECTS, WEB_SCHEMES, connections, offline

TIMEOUT = 20.0
"""Seconds without a byte after which a server counts as hanging."""
LONGEST_DOWNLOAD = 120.0
"""Seconds that one image may take, however many bytes come in between."""
LARGEST_DOWNLOAD = 100_000_000
"""Most bytes of a download; decodable images are smaller in all usual formats."""
BUSY = (429, 500, 502, 503, 504)
"""Status codes after which a second request may succeed."""
LONGEST_PAUSE = 5
"""Seconds to wait at most before the next request, whatever the server asks for."""
NOT_IMAGES = ("text/html", "application/xhtml+xml", "application/json")
"""Types of error and sign-in pages, which are refused before they are downloaded."""


@dataclass(frozen=True)
class WebFile:
    """A downloaded file.

    Attributes:
        content: its bytes.
        media_type: the server's word for its type, such as `image/png`; may be empty or wrong.
    """

    content: bytes
    media_type: str


class _Requests(urllib3.Retry):
    """The attempts for one image; redirections lead to web addresses only."""

    def increment(
        self, method: str | None = None, url: str | None = None, *args: Any, **keywords: Any
    ) -> _Requests:
        """Count an attempt; also called before a redirection is followed.

        Raises:
            _Refusal: a redirection to a file, or to anything else that is not on the web.
        """
        response = keywords.get("response")
        if response is not None:
            response.close()  # urllib3 would read the page that comes with it, however long
        location = (response and response.get_redirect_location()) or ""
        # a relative address has no scheme
        if response is not None and urlsplit(location).scheme not in ("", *WEB_SCHEMES):
            raise _Refusal(f"the server redirects to {location}, which is not on the web; refused")
        return super().increment(method, url, *args, **keywords)


class _Refusal(Exception):
    """A redirection that is not followed."""


def fetch_image(address: str) -> WebFile:
    """Download one image.

    Args:
        address: `http://` or `https://`; redirections to other such addresses are followed.

    Raises:
        ImageError: "missing" if there is no such file, or no answer in time; "not an image" for
            an HTML page or JSON; "too large" above `LARGEST_DOWNLOAD` bytes.
    """
    if offline():
        raise ImageError(address, "missing", "HF_HUB_OFFLINE forbids downloading it")
    end = time.monotonic() + LONGEST_DOWNLOAD
    try:
        if not urlsplit(address).hostname:
            raise ImageError(address, "missing", "the address has no host")
        with connections(address) as pool, closing(_request(pool, address)) as response:
            if response.status >= 400:
                reason = f"{response.status} {response.reason or ''}".strip()
                raise ImageError(address, "missing", f"the server answered {reason}")
            media_type = response.headers.get("Content-Type", "").partition(";")[0].strip().lower()
            if media_type in NOT_IMAGES:
                raise wrong_type(address, media_type)
            return WebFile(b"".join(_chunks(address, response, end)), media_type)
    except (HTTPError, _Refusal, OSError, ValueError) as error:
        raise ImageError(address, "missing", _reason(error)) from None


def _request(pool: urllib3.PoolManager, address: str) -> urllib3.BaseHTTPResponse:
    attempts = _Requests(
        total=None,
        connect=1,
        read=0,
        other=0,
        status=2,
        redirect=MAX_REDIRECTS,
        status_forcelist=BUSY,
        backoff_factor=0.5,
        raise_on_status=False,
        retry_after_max=LONGEST_PAUSE,
    )
    return pool.request(
        "GET", address, headers=AGENT, timeout=TIMEOUT, retries=attempts, preload_content=False
    )


def wrong_type(address: str, media_type: str) -> ImageError:
    """Return the error for a file of another type than an image."""
    return ImageError(address, "not an image", f"the server sent {media_type}, not an image")


def _chunks(address: str, response: urllib3.BaseHTTPResponse, end: float) -> Iterator[bytes]:
    """Yield the bytes of an answer, as long as they stay within the limits."""
    length = response.headers.get("Content-Length", "")
    received = int(length) if length.isdecimal() and len(length) < 19 else 0
    if received > LARGEST_DOWNLOAD:
        raise _too_large(address, f"{received:,} bytes")
    received = 0
    # received bytes are returned at once: a server may send single bytes for hours
    while chunk := response.read1(CHUNK_SIZE, decode_content=True):
        received += len(chunk)
        if received > LARGEST_DOWNLOAD:
            raise _too_large(address, "the file")
        if time.monotonic() > end:
            raise ImageError(
                address,
                "missing",
                f"only {received:,} bytes came within {LONGEST_DOWNLOAD:g} seconds",
            )
        yield chunk


def _too_large(address: str, what: str) -> ImageError:
    return ImageError(
        address, "too large", f"{what}; at most {LARGEST_DOWNLOAD:,} bytes are downloaded"
    )


def _reason(error: BaseException) -> str:
    """Return in a few words why the download failed."""
    if isinstance(error, MaxRetryError) and error.reason is not None:
        error = error.reason
    if isinstance(error, _Refusal):
        return str(error)
    if isinstance(error, NameResolutionError):
        return "the name of the host is unknown, or there is no network"
    if isinstance(error, ReadTimeoutError | TimeoutError):
        return f"the server sent nothing for {TIMEOUT:g} seconds"
    # a connection that is refused is a timeout to urllib3, too
    if isinstance(error, ConnectTimeoutError) and not isinstance(error, NewConnectionError):
        return f"no connection to the server within {TIMEOUT:g} seconds"
    if isinstance(error, ProtocolError) and not isinstance(error.__cause__, OSError):
        return "the connection broke off before the end of the file"
    cause = error.__cause__ if isinstance(error.__cause__, OSError) else error
    return f"cannot be downloaded: {getattr(cause, 'strerror', None) or cause}"
