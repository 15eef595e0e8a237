"""Downloads of weights and images, from servers of this machine that break off, lie and hang."""

import base64
import hashlib
import io
import resource
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler
from pathlib import Path

import numpy as np
import pytest
from local_server import listening
from PIL import Image

import vitkit
from vitkit.io import download as downloads
from vitkit.io.caches import cache_folder
from vitkit.prediction import images as web_image

pytestmark = pytest.mark.allow_hosts(["127.0.0.1"])

CONTENT = np.random.default_rng(0).bytes(300_000)
SHA256 = hashlib.sha256(CONTENT).hexdigest()
ELSEWHERE = "http://localhost:9/models/vit.npz"
"""An address that only a proxy can fetch: nothing listens there."""
PIXELS = np.random.default_rng(0).integers(0, 256, (20, 30, 3), dtype=np.uint8)
Request = BaseHTTPRequestHandler


def _png() -> bytes:
    stream = io.BytesIO()
    Image.fromarray(PIXELS).save(stream, "PNG")
    return stream.getvalue()


PNG = _png()


@pytest.fixture(autouse=True)
def _own_network(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An empty cache, and no proxy."""
    for name in ("http_proxy", "https_proxy", "no_proxy", "all_proxy"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)
    monkeypatch.setenv("VITKIT_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)


def send(request: Request, body: bytes = CONTENT, status: int = 200, **headers: str) -> None:
    request.send_response(status)
    for name, value in {"Content_Length": str(len(body)), **headers}.items():
        request.send_header(name.replace("_", "-"), value)
    request.end_headers()
    request.wfile.write(body)


class Server:
    """A server that answers each path by the method of that name."""

    def __init__(self) -> None:
        self.requests: list[str] = []
        self.sent = 0
        self.leave = threading.Event()

    def answer(self, request: Request) -> None:
        self.requests.append(request.path)
        name = request.path.strip("/").partition(".")[0]
        getattr(self, name, lambda request: send(request, b"<html>", 404))(request)

    def vit(self, request: Request) -> None:
        send(request)

    def image(self, request: Request) -> None:
        send(request, PNG, Content_Type="image/png")

    def wrong_type(self, request: Request) -> None:
        send(request, PNG, Content_Type="text/plain")

    def on(self, request: Request) -> None:
        send(request, b"", 302, Location="/image.png")

    def to_file(self, request: Request) -> None:
        send(request, b"", 302, Location="file:///etc/passwd")

    def to_http(self, request: Request) -> None:
        send(request, b"", 302, Location="http://example.org/vit.npz")

    def loop(self, request: Request) -> None:
        send(request, b"", 302, Location="/loop.npz")

    def page(self, request: Request) -> None:
        send(request, b"<html></html>", Content_Type="text/html; charset=utf-8")

    def empty(self, request: Request) -> None:
        send(request, b"")

    def huge(self, request: Request) -> None:
        send(request, PNG, Content_Length="10000000000")

    def endless(self, request: Request) -> None:
        request.send_response(200)
        request.end_headers()
        request.wfile.write(PNG * 20)

    def cut(self, request: Request) -> None:
        send(request, PNG, Content_Length=str(len(PNG) + 1))

    def long_page(self, request: Request) -> None:
        request.send_response(302 if len(self.requests) < 3 else 503)
        request.send_header("Location", "/long_page.npz")
        request.end_headers()
        while not self.leave.is_set():  # ends with the connection
            self.sent += request.wfile.write(bytes(100_000))

    def hang(self, request: Request) -> None:
        self.leave.wait(100)

    def drip(self, request: Request) -> None:
        request.send_response(200)
        request.end_headers()
        while not self.leave.wait(0.02):
            request.wfile.write(b"x")


@pytest.fixture
def server() -> Iterator[Server]:
    server = Server()
    with listening(server.answer) as server.address:
        yield server
        server.leave.set()


def test_a_file_is_downloaded_once_and_checked_when_it_is_opened(server, monkeypatch):
    address = f"{server.address}/vit.npz"
    path = downloads.download(address, size=len(CONTENT), sha256=SHA256[:8].upper())
    assert path.read_bytes() == CONTENT
    assert (path.name, path.parents[1]) == ("vit.npz", cache_folder())
    assert sorted(file.name for file in path.parent.iterdir()) == ["vit.npz", "vit.npz.sha256"]
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert downloads.download(address) == path
    path.write_bytes(CONTENT[:-1] + b"?")
    with pytest.raises(vitkit.CheckpointError, match=r"npz: HF_HUB_OFFLINE forbids downloading it"):
        downloads.download(address)
    monkeypatch.delenv("HF_HUB_OFFLINE")
    assert downloads.download(address).read_bytes() == CONTENT
    assert len(server.requests) == 2
    with pytest.raises(vitkit.CheckpointError, match="expected SHA-256 0000, got"):
        downloads.download(address, sha256="0000")  # the file in the cache is another one
    assert len(server.requests) == 3


@pytest.mark.parametrize(
    ("path", "checks", "message"),
    [
        ("vit.npz", {"sha256": "0000aaaa"}, f"expected SHA-256 0000aaaa, got {SHA256[:16]}$"),
        ("vit.npz", {"size": 9}, "expected 9 bytes, got 300,000"),
        ("cut.npz", {}, "expected [0-9,]+ bytes, got .*; the connection broke off"),
        ("empty.npz", {}, "the server sent no byte"),
        ("other.npz", {}, "the server answered 404 Not Found"),
        ("to_http.npz", {}, r"http://example\.org/vit\.npz: expected an https:// address"),
        ("to_file.npz", {}, "Redirection to url 'file:///etc/passwd' is not allowed"),
        ("loop.npz", {}, "answered 302 The HTTP server returned a redirect error"),
        ("long_page.npz", {}, "the server answered 503 Service Unavailable"),
    ],
)
def test_what_is_not_the_whole_file_is_refused_and_not_kept(server, path, checks, message):
    address = f"{server.address}/{path}"
    with pytest.raises(vitkit.CheckpointError, match=message) as caught:
        downloads.download(address, **checks)
    assert str(caught.value).startswith(f"{address}: ")
    assert "\n" not in str(caught.value)
    assert [*downloads.cached_path(address).parent.iterdir()] == []
    assert server.sent < 60_000_000  # what fits into the sockets' buffers


@pytest.mark.parametrize("status", [203, 204, 300, 302, 304, 399])
def test_a_page_that_is_not_the_file_is_never_kept_as_it(status):
    """An answer of 3xx without a `Location` is no redirection, and its body is no file."""
    body = b"" if status in (204, 304) else b"<html>sign in</html>"
    with (
        listening(lambda request: send(request, body, status)) as address,
        pytest.raises(vitkit.CheckpointError, match=f"the server answered {status} "),
    ):
        downloads.download(f"{address}/m.pth")


@pytest.mark.parametrize(
    ("address", "message"),
    [
        ("http://example.org/vit.npz", "expected an https:// address"),
        ("http://192.168.0.1/vit.npz", "expected an https:// address"),
        ("ftp://example.org/vit.npz", "expected an https:// address"),
        ("file:///etc/vit.npz", "expected an https:// address"),
        ("https:///x", "the address has no host"),
        ("https://[::1/a.npz", "not a valid address: Invalid IPv6 URL"),
        ("https://a.org/..", "expected an address that ends in the name of a file"),
        ("https://a.org/x/%2e%2e", "expected an address that ends in the name of a file"),
        ("https://a.org/", "expected an address that ends in the name of a file"),
        ("http://127.0.0.1:9/vit.npz", "cannot be downloaded: Connection refused"),
    ],
)
def test_an_address_that_is_not_fetched(address, message):
    with pytest.raises(vitkit.CheckpointError, match=message):
        downloads.download(address)


def test_no_redirection_leads_into_a_private_network():
    request = downloads.Request("https://example.org/a.png")
    redirections = downloads._Redirections(plain_http=True)
    hosts = ("169.254.169.254", "10.0.0.1", "localhost", "localhost.", "127.1", "2130706433")
    for address in (f"http://{host}/a" for host in hosts):
        with pytest.raises(downloads.WebError, match="in a private network; refused"):
            redirections.redirect_request(request, io.BytesIO(), 302, "Found", {}, address)


def test_where_the_cache_is_follows_the_environment(monkeypatch):
    monkeypatch.setenv("VITKIT_CACHE", "/a")
    monkeypatch.setenv("XDG_CACHE_HOME", "/b")
    monkeypatch.setenv("HOME", "/c")
    assert cache_folder() == Path("/a")
    monkeypatch.delenv("VITKIT_CACHE")
    assert cache_folder() == Path("/b/vitkit")
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert cache_folder() == Path("/c/.cache/vitkit")


def test_a_cache_that_cannot_be_written_is_one_line(server, monkeypatch, tmp_path):
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, hard))
    try:
        with pytest.raises(vitkit.OutputError, match="would be larger than the limit allows"):
            downloads.download(f"{server.address}/vit.npz")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("VITKIT_CACHE", str(tmp_path / "file"))
    with pytest.raises(vitkit.OutputError, match=r"cannot write .*vit\.npz"):
        downloads.download(f"{server.address}/vit.npz")


@pytest.mark.parametrize(
    ("user", "sent"), [("", None), ("user:secret@", b"user:secret"), ("us%40er:x@", b"us@er:x")]
)
def test_the_proxy_of_the_environment_is_asked(monkeypatch, user, sent):
    """A proxy gets the whole address in the request; https goes through a tunnel."""
    asked: list[tuple[str, str | None]] = []

    def ask(request: Request) -> None:
        given = request.headers.get("Proxy-Authorization")
        asked.append((f"{request.command} {request.path}", given))
        send(request, CONTENT, 407 if request.command == "CONNECT" else 200)

    expected = sent and f"Basic {base64.b64encode(sent).decode()}"
    with listening(ask) as address:
        for name in ("http_proxy", "https_proxy"):
            monkeypatch.setenv(name, address.replace("//", f"//{user}"))
        assert downloads.download(ELSEWHERE).read_bytes() == CONTENT
        with pytest.raises(vitkit.CheckpointError, match=r"cannot be downloaded: .*407"):
            downloads.download("https://example.org/vit.npz")
    assert asked == [(f"GET {ELSEWHERE}", expected), ("CONNECT example.org:443", expected)]
    monkeypatch.setenv("no_proxy", "localhost")
    with pytest.raises(vitkit.CheckpointError, match="cannot be downloaded"):
        downloads.download(f"{ELSEWHERE}?again")


# Images.


@pytest.fixture
def predictor() -> vitkit.Predictor:
    preprocess = vitkit.Preprocess(image_size=8)
    return vitkit.Predictor(lambda images: images.mean(dim=(2, 3)), preprocess)


@pytest.mark.parametrize("path", ["image.png", "wrong_type.png", "on", "image.png?a=/b c"])
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
        ("page.png", "not an image", "the server sent text/html, not an image"),
        ("huge.png", "too large", "10,000,000,000 bytes; at most "),
        ("endless", "too large", "bytes; at most "),
        ("cut.png", "missing", "the connection broke off"),
        ("hang", "missing", "the server sent nothing for 0.2 seconds"),
        ("drip", "missing", "bytes came within 0.5 seconds"),
        ("http://", "missing", "the address has no host"),
    ],
)
def test_what_is_no_image_is_named_with_its_reason(
    server, predictor, monkeypatch, path, reason, detail
):
    monkeypatch.setattr(downloads, "TIMEOUT", 0.2)
    monkeypatch.setattr(web_image, "LONGEST_DOWNLOAD", 0.5)
    monkeypatch.setattr(web_image, "LARGEST_DOWNLOAD", 10 * len(PNG))
    address = path if "://" in path else f"{server.address}/{path}"
    (error,) = predictor.stream([address])
    assert isinstance(error, vitkit.ImageError)
    assert (error.name, error.reason) == (address, reason)
    assert detail in error.detail


def test_no_image_is_downloaded_offline(server, predictor, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    (error,) = predictor.stream([f"{server.address}/image.png"])
    assert "HF_HUB_OFFLINE" in error.detail
    assert server.requests == []
