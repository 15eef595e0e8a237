"""Requests to web servers by `urllib3`: proxies, redirections and repeated attempts.

`urllib3` sends each request, and its `Retry` counts the attempts and knows the pauses. The requests
themselves are repeated and redirected here: `urllib3` reads the page of an error or a redirection
to its end before the next request, and an endless page would block the run.
"""

from __future__ import annotations

import base64
import os
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from urllib.parse import SplitResult, unquote_to_bytes, urljoin, urlsplit
from urllib.request import getproxies, proxy_bypass

import urllib3
from urllib3.exceptions import HTTPError, InvalidHeader, LocationValueError, MaxRetryError

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
def open_address(
    address: str, attempts: Attempts = ONCE, headers: Mapping[str, str] = AGENT
) -> Iterator[urllib3.BaseHTTPResponse]:
    """Yield a server's response, whose body is a file or the requested range of it.

    Args:
        address: address of the file; redirections from it are followed.
        attempts: how often a server is asked if it cannot be reached or is overloaded.
        headers: of the request. Where the server refuses its `Range`, the whole file is requested.

    Raises:
        WebError: no such file, a page that is not the file, or the server cannot be reached.
    """
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
