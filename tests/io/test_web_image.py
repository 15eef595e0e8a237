"""Images at web addresses, from a server of this machine that misbehaves in every way."""

from __future__ import annotations

import gzip
import io
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler

import numpy as np
import pytest
from local_server import listening
from PIL import Image

import vitkit
from vitkit.errors import ImageError
from vitkit.io import web_image

pytestmark = pytest.mark.allow_hosts(["127.0.0.1"])

PIXELS = np.random.default_rng(0).integers(0, 256, (20, 30, 3), dtype=np.uint8)


def _png() -> bytes:
    stream = io.BytesIO()
    Image.fromarray(PIXELS).save(stream, "PNG")
    return stream.getvalue()


PNG = _png()


class Server:
    """What it answers to each path, and the requests that came."""

    def __init__(self) -> None:
        self.requests: list[str] = []
        self.sent = 0
        self.leave = threading.Event()

    def answer(self, request: BaseHTTPRequestHandler) -> None:
        self.requests.append(request.path)
        getattr(self, request.path.strip("/").partition(".")[0], self.missing)(request)

    def send(
        self, request: BaseHTTPRequestHandler, content: bytes, code: int = 200, **headers: str
    ) -> None:
        request.send_response(code)
        headers = {"Content_Length": str(len(content)), **headers}
        for name, value in headers.items():
            request.send_header(name.replace("_", "-"), value)
        request.end_headers()
        request.wfile.write(content)

    def missing(self, request: BaseHTTPRequestHandler) -> None:
        self.send(request, b"<html>", 404)

    def good(self, request: BaseHTTPRequestHandler) -> None:
        self.send(request, PNG, Content_Type="image/png")

    def wrong_type(self, request: BaseHTTPRequestHandler) -> None:
        self.send(request, PNG, Content_Type="text/plain")

    def packed(self, request: BaseHTTPRequestHandler) -> None:
        self.send(request, gzip.compress(PNG), Content_Encoding="gzip")

    def on(self, request: BaseHTTPRequestHandler) -> None:
        self.send(request, b"", 302, Location="/good.png")

    def to_file(self, request: BaseHTTPRequestHandler) -> None:
        self.send(request, b"", 302, Location="file:///etc/passwd")

    def loop(self, request: BaseHTTPRequestHandler) -> None:
        self.send(request, b"", 302, Location="/loop")

    def page(self, request: BaseHTTPRequestHandler) -> None:
        self.send(request, b"<html></html>", Content_Type="text/html; charset=utf-8")

    def words(self, request: BaseHTTPRequestHandler) -> None:
        self.send(request, b"only words", Content_Type="text/plain")

    def huge(self, request: BaseHTTPRequestHandler) -> None:
        self.send(request, PNG, Content_Length="10000000000")

    def endless(self, request: BaseHTTPRequestHandler) -> None:
        request.send_response(200)
        request.end_headers()
        request.wfile.write(PNG * 20)

    def endless_page(self, request: BaseHTTPRequestHandler) -> None:
        code = 503 if len(self.requests) % 2 else 302
        request.send_response(code)
        request.send_header("Location", "/endless_page")
        request.end_headers()
        while not self.leave.is_set():  # ends with the connection
            self.sent += request.wfile.write(bytes(100_000))

    def cut(self, request: BaseHTTPRequestHandler) -> None:
        self.send(request, PNG, Content_Length=str(len(PNG) + 1))

    def hang(self, request: BaseHTTPRequestHandler) -> None:
        self.leave.wait(100)

    def drip(self, request: BaseHTTPRequestHandler) -> None:
        request.send_response(200)
        request.end_headers()
        while not self.leave.wait(0.02):
            request.wfile.write(b"x")

    def busy(self, request: BaseHTTPRequestHandler) -> None:
        code = 503 if len(self.requests) == 1 else 200
        self.send(request, PNG if code == 200 else b"", code)


@pytest.fixture
def server() -> Iterator[Server]:
    server = Server()
    with listening(server.answer) as server.address:
        yield server
        server.leave.set()


@pytest.fixture
def predictor() -> vitkit.Predictor:
    preprocess = vitkit.Preprocess(image_size=8)
    return vitkit.Predictor(lambda images: images.mean(dim=(2, 3)), preprocess)


@pytest.mark.parametrize("path", ["good.png", "wrong_type.png", "packed", "on", "good.png?a=/b"])
def test_an_image_is_the_same_from_the_web(server, predictor, path):
    address = f"{server.address}/{path}"
    (found,) = predictor([address])
    assert found.top == predictor([PIXELS])[0].top
    assert found.image == address
    assert (predictor.logits(address) == predictor.logits([PIXELS])).all()


@pytest.mark.parametrize(
    ("path", "reason", "detail"),
    [
        ("nothing.png", "missing", "the server answered 404 Not Found"),
        ("to_file", "missing", "the server redirects to file:///etc/passwd, which is not on"),
        ("loop", "missing", "too many redirects"),
        ("page.png", "not an image", "the server sent text/html, not an image"),
        ("words.png", "not an image", "the server sent text/plain, not an image"),
        ("huge.png", "too large", "10,000,000,000 bytes; at most 100,000,000 bytes are downloaded"),
        ("cut.png", "missing", "the connection broke off before the end of the file"),
    ],
)
def test_what_is_no_image_is_named_with_its_reason(server, predictor, path, reason, detail):
    address = f"{server.address}/{path}"
    (error,) = predictor.stream([address])
    assert isinstance(error, ImageError)
    assert (error.name, error.reason) == (address, reason)
    assert detail in error.detail


def test_a_server_that_hangs_or_drips_is_left(server, predictor, monkeypatch):
    monkeypatch.setattr(web_image, "TIMEOUT", 0.2)
    (error,) = predictor.stream([f"{server.address}/hang"])
    assert error.detail == "the server sent nothing for 0.2 seconds"
    monkeypatch.setattr(web_image, "TIMEOUT", 60)
    monkeypatch.setattr(web_image, "LONGEST_DOWNLOAD", 0.2)
    (error,) = predictor.stream([f"{server.address}/drip"])
    assert error.detail.endswith("bytes came within 0.2 seconds")


def test_a_file_without_a_length_ends_at_the_limit(server, predictor, monkeypatch):
    monkeypatch.setattr(web_image, "LARGEST_DOWNLOAD", 10 * len(PNG))
    (error,) = predictor.stream([f"{server.address}/endless"])
    assert error.reason == "too large"


def test_pages_of_errors_and_redirections_are_not_read(server, predictor):
    with pytest.raises(ImageError, match=r"the server answered|redirect"):
        predictor([f"{server.address}/endless_page"])
    assert len(server.requests) > 2
    assert server.sent < 20_000_000 * len(server.requests)  # what fits into the sockets' buffers


def test_a_busy_server_is_asked_again(server, predictor):
    assert predictor([f"{server.address}/busy"])[0].top == predictor([PIXELS])[0].top
    assert server.requests == ["/busy", "/busy"]


@pytest.mark.parametrize(
    ("address", "detail"),
    [
        ("http://127.0.0.1:9/a.png", "Connection refused"),
        ("http:///a.png", "the address has no host"),
        ("http://[::1/a.png", "Invalid IPv6 URL"),
    ],
)
def test_an_address_without_a_server(predictor, address, detail):
    (error,) = predictor.stream([address])
    assert detail in error.detail


def test_nothing_is_downloaded_offline(server, predictor, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    (error,) = predictor.stream([f"{server.address}/good.png"])
    assert "HF_HUB_OFFLINE" in error.detail
    assert server.requests == []
