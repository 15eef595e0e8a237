"""Servers that answer oddly or without end, and the proxies that the environment names."""

from __future__ import annotations

import base64
import http.server
import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from image_files import refusal
from local_server import listening

from vitkit.errors import CheckpointError
from vitkit.io import download as connections
from vitkit.io import download as resume_download
from vitkit.io.download import PartFile, cached_path, download, receive

pytestmark = pytest.mark.allow_hosts(["127.0.0.1"])
ELSEWHERE = "http://localhost:9/models/vit.npz"
"""An address that only a proxy can fetch: nothing listens there."""

Request = http.server.BaseHTTPRequestHandler


@pytest.fixture(autouse=True)
def _own_network(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An empty cache, no proxy, and no pauses."""
    for name in ("http_proxy", "https_proxy", "no_proxy", "all_proxy"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)
    monkeypatch.setenv("VITKIT_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    monkeypatch.setattr(connections, "BACKOFF", 0.0)
    monkeypatch.setattr(resume_download, "PAUSE", 0.0)


def answer(request: Request, status: int, body: bytes = b"", **headers: str) -> None:
    request.send_response(status)
    for name, value in headers.items():
        request.send_header(name.replace("_", "-"), value)
    request.send_header("Content-Length", str(len(body)))
    request.end_headers()
    request.wfile.write(body)


@pytest.mark.parametrize("status", [203, 204, 300, 302, 304, 399])
def test_a_page_that_is_not_the_file_is_never_stored_as_it(status: int) -> None:
    """An answer of 3xx without a `Location` is no redirection, and its body is no file."""

    def page(request: Request) -> None:
        answer(request, status, b"" if status in (204, 304) else b"<html>sign in</html>")

    with listening(page) as address:
        place = f"{address}/m.pth"
        with pytest.raises(CheckpointError, match=rf"m\.pth: the server answered {status} "):
            download(place)
        assert {path.name for path in cached_path(place).parent.iterdir()} == {"m.pth.lock"}


@pytest.fixture
def proxy(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[str, list[tuple[str, str | None]]]]:
    """A proxy that wants a name and a password, its host and port, and what it was asked."""
    asked: list[tuple[str, str | None]] = []

    def ask(request: Request) -> None:
        given = request.headers.get("Proxy-Authorization")
        asked.append((f"{request.command} {request.path}", given))
        answer(request, 200 if given else 407, b"weights" if given else b"")

    with listening(ask) as address:
        yield address.removeprefix("http://"), asked


@pytest.mark.parametrize(
    ("user", "sent"),
    [
        ("user:secret", b"user:secret"),
        ("us%40er:s%C3%A4cret%3A", "us@er:säcret:".encode()),
        ("token", b"token:"),
    ],
)
def test_a_proxy_gets_its_name_and_password(
    proxy: tuple[str, list[tuple[str, str | None]]],
    monkeypatch: pytest.MonkeyPatch,
    user: str,
    sent: bytes,
) -> None:
    host, asked = proxy
    monkeypatch.setenv("http_proxy", f"http://{user}@{host}")
    assert download(ELSEWHERE).read_bytes() == b"weights"
    expected = f"Basic {base64.b64encode(sent).decode()}"
    assert asked == [(f"GET {ELSEWHERE}", expected)]
    # https goes through a tunnel, which is asked for with the same header
    monkeypatch.setenv("https_proxy", f"http://{user}@{host}")
    with pytest.raises(CheckpointError, match=r"example\.org cannot be reached"):
        download("https://example.org/vit.npz")
    assert asked[1:] == [("CONNECT example.org:443", expected)]


def test_a_proxy_without_a_password_or_scheme(monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[str | None] = []

    def ask(request: Request) -> None:
        given.append(request.headers.get("Proxy-Authorization"))
        answer(request, 200, b"weights")

    with listening(ask) as address:
        monkeypatch.setenv("http_proxy", address.removeprefix("http://"))
        assert download(ELSEWHERE).read_bytes() == b"weights"
        monkeypatch.setenv("http_proxy", f"{address}/")
        assert download(ELSEWHERE.replace("vit", "other")).read_bytes() == b"weights"
    assert given == [None, None]


@pytest.mark.parametrize("proxy", ["socks5://127.0.0.1:9", "http://[::1", "127.0.0.1:port"])
def test_a_proxy_that_cannot_be_used_is_named(monkeypatch: pytest.MonkeyPatch, proxy: str) -> None:
    monkeypatch.setenv("http_proxy", proxy)
    with pytest.raises(CheckpointError, match=r"localhost cannot be reached: .*(?i:proxy|parse)"):
        download(ELSEWHERE)


def test_hosts_without_proxy_are_named_with_or_without_port(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with listening(lambda request: answer(request, 200, b"direct")) as address:
        host = address.removeprefix("http://")
        monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
        for number, without in enumerate((host, "127.0.0.1", f"other.org, {host}")):
            monkeypatch.setenv("no_proxy", without)
            assert download(f"{address}/{number}.npz").read_bytes() == b"direct"
        monkeypatch.setenv("no_proxy", "127.0.0.1:1")
        with pytest.raises(CheckpointError, match=r"127\.0\.0\.1 cannot be reached"):
            download(f"{address}/3.npz")


def test_a_redirection_may_need_another_proxy(
    proxy: tuple[str, list[tuple[str, str | None]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    host, asked = proxy
    monkeypatch.setenv("http_proxy", f"http://user:secret@{host}")
    with listening(lambda request: answer(request, 302, Location=ELSEWHERE)) as address:
        monkeypatch.setenv("no_proxy", "127.0.0.1")
        assert download(f"{address}/vit.npz").read_bytes() == b"weights"
    assert [what for what, _ in asked] == [f"GET {ELSEWHERE}"]


def endless(sent: list[int], status: int, **headers: str) -> Callable[[Request], None]:
    """An answer whose body has no end; `sent` counts its megabytes."""

    def write(request: Request) -> None:
        request.send_response(status)
        for name, value in headers.items():
            request.send_header(name, value)
        request.end_headers()
        for _ in range(200):
            try:
                request.wfile.write(bytes(1 << 20))
            except OSError:
                return
            sent.append(1)

    return write


def test_the_page_of_an_error_is_not_read_to_its_end() -> None:
    sent: list[int] = []
    with listening(endless(sent, 503)) as address:
        message = refusal(f"wds:{address}/train-{{0..0}}.tar")
    assert "the server answered 503 Service Unavailable" in message
    assert len(sent) < 100  # what the buffers of a connection hold


def test_the_page_of_a_redirection_is_not_read_to_its_end() -> None:
    sent: list[int] = []
    with (
        listening(endless(sent, 302, Location="/again")) as address,
        pytest.raises(CheckpointError, match="redirects more than 10 times"),
    ):
        download(f"{address}/vit.npz")
    assert len(sent) < 1000


def test_an_answer_without_a_byte_is_no_file() -> None:
    def close(request: Request) -> None:
        request.send_response(200)
        request.end_headers()

    with (
        listening(close) as address,
        pytest.raises(CheckpointError, match="closed the connection"),
    ):
        download(f"{address}/vit.npz")
    assert not cached_path(f"{address}/vit.npz").exists()


def drip(asked: list[int], content: bytes) -> Callable[[Request], None]:
    """A server that closes after every four bytes."""

    def write(request: Request) -> None:
        start = int((request.headers.get("Range") or "bytes=0-")[6:-1])
        asked.append(start)
        request.send_response(206 if start else 200)
        request.send_header("ETag", '"one"')
        end = len(content)
        request.send_header("Content-Range", f"bytes {start}-{end - 1}/{end}")
        request.send_header("Content-Length", str(end - start))
        request.end_headers()
        request.wfile.write(content[start : start + 4])

    return write


def test_a_transfer_that_breaks_off_again_and_again_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each attempt brings bytes; all the same there is a pause and an end."""
    pauses: list[float] = []
    monkeypatch.setattr(resume_download, "PAUSE", 1.0)
    monkeypatch.setattr(time, "sleep", pauses.append)
    asked: list[int] = []
    content = bytes(range(256)) * 4
    with listening(drip(asked, content)) as address:
        with pytest.raises(CheckpointError, match=r"after 404 of 1024 bytes: .*run it again to co"):
            download(f"{address}/vit.npz")
        assert asked == list(range(0, 404, 4))
        assert pauses.count(1.0) == resume_download.MOST_CONTINUED
        asked.clear()
        monkeypatch.setattr(resume_download, "MOST_CONTINUED", 1000)
        assert download(f"{address}/vit.npz").read_bytes() == content
    assert asked[0] == 404


def test_a_part_that_is_complete_is_compared_with_the_length_that_is_expected(
    tmp_path: Path,
) -> None:
    """A process may end between the last byte of a wrong file and its comparison."""
    part = PartFile(tmp_path / "shard.part")
    part.path.write_bytes(b"hello")
    part.path.with_suffix(".state").write_text(json.dumps({"version": '"old"', "length": 5}))
    asked: list[str | None] = []

    def send(request: Request) -> None:
        asked.append(request.headers.get("Range"))
        answer(request, 200, b"the shard")

    with listening(send) as address:
        receive(f"{address}/shard.tar", part, length=9)
        assert part.path.read_bytes() == b"the shard"
        receive(f"{address}/shard.tar", part, length=9)
    assert asked == [None]


@pytest.mark.parametrize("version", ['"one"', ""])
def test_only_what_was_kept_is_called_kept(version: str) -> None:
    """Bytes without a version cannot be continued, and a file of another length is deleted."""

    def breaks(request: Request) -> None:
        goes_on = "Range" in request.headers
        request.send_response(206 if goes_on else 200)
        if version:
            request.send_header("ETag", version)
        if goes_on:
            request.send_header("Content-Range", "bytes 13-999/1000")
        request.send_header("Content-Length", "987" if goes_on else "1000")
        request.end_headers()
        request.wfile.write(b"" if goes_on else bytes(13))

    with listening(breaks) as address, pytest.raises(CheckpointError) as weights:
        download(f"{address}/vit.npz")
    assert ("run it again to continue" in str(weights.value)) == bool(version)
    assert "run it again" in str(weights.value)
