"""Downloads, against a server on this machine that breaks off, changes its mind, and lies."""

from __future__ import annotations

import io
import os
import resource
import shutil
import sys
from pathlib import Path

import pytest
from download_server import FIRST, SHA256, left_over, serving
from processes import forked, wait_until

from vitkit.errors import CheckpointError, OutputError
from vitkit.io import download as downloads
from vitkit.io.caches import cache_folder
from vitkit.io.download import cached_path, download
from vitkit.weights.catalogue import find
from vitkit.weights.download_weights import fetch

pytestmark = pytest.mark.allow_hosts(["127.0.0.1"])


@pytest.fixture
def server(tmp_path, monkeypatch):
    with serving(tmp_path / "cache", monkeypatch) as state:
        yield state


def test_a_file_is_fetched_once(server, monkeypatch):
    path = download(server.address, sha256=SHA256)
    assert path.read_bytes() == FIRST
    assert path.name == "vit.npz"
    assert cache_folder() in path.parents
    assert left_over(server.address) == set()
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert download(server.address) == path
    assert server.served == [len(FIRST)]


def test_a_wrong_digest_leaves_nothing(server):
    with pytest.raises(CheckpointError, match=f"expected SHA-256 0000aaaa, got {SHA256[:8]}"):
        download(server.address, sha256="0000aaaa")
    assert not cached_path(server.address).exists()
    assert left_over(server.address) == set()
    assert download(server.address, sha256=SHA256.upper()).exists()


def test_a_truncated_answer_is_never_taken_for_the_file(server):
    server.ranges, server.breaks = False, [299_999] * 4
    with pytest.raises(CheckpointError, match="interrupted after 299999 of 300000 bytes"):
        download(server.address)
    assert not cached_path(server.address).exists()


@pytest.mark.parametrize("status", [404, 403, 500])
def test_a_refusal_is_an_error(server, status):
    server.status = status
    with pytest.raises(CheckpointError, match=rf"vit\.npz: the server answered {status} "):
        download(server.address)
    assert left_over(server.address) == set()


def test_no_redirection_leaves_https(server):
    server.status, server.location = 302, "http://example.org/vit.npz"
    with pytest.raises(CheckpointError, match=r"http://example.org/vit.npz: expected an https://"):
        download(server.address)


def test_offline_and_unreachable_are_errors(server, monkeypatch):
    closed = "http://127.0.0.1:9/vit.npz"
    with pytest.raises(
        CheckpointError, match=r"not in the cache, and 127\.0\.0\.1 cannot be reach"
    ):
        download(closed)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(CheckpointError, match="not in the cache, and HF_HUB_OFFLINE forbids"):
        download(server.address)
    assert server.asked == []


def test_where_the_cache_is_follows_the_environment(monkeypatch):
    monkeypatch.setenv("VITKIT_CACHE", "/a")
    monkeypatch.setenv("XDG_CACHE_HOME", "/b")
    monkeypatch.setenv("HOME", "/c")
    assert cache_folder() == Path("/a")
    monkeypatch.delenv("VITKIT_CACHE")
    assert cache_folder() == Path("/b/vitkit")
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert cache_folder() == Path("/c/.cache/vitkit")


@pytest.mark.parametrize(
    "address",
    [
        "http://example.org/vit.npz",
        "ftp://example.org/vit.npz",
        "file:///etc/vit.npz",
        "https:///x",
    ],
)
def test_only_https_is_fetched(address):
    with pytest.raises(CheckpointError, match="expected an https:// address"):
        download(address)


def test_a_name_does_not_leave_the_cache(monkeypatch):
    monkeypatch.setenv("VITKIT_CACHE", "/cache")
    for address in ("https://a.org/..", "https://a.org/x/%2e%2e", "https://a.org/"):
        with pytest.raises(
            CheckpointError, match="expected an address that ends in the name of a file"
        ):
            cached_path(address)
    one, other = (cached_path(f"https://a.org/{folder}/vit.pth.tar") for folder in "xy")
    assert one.name == other.name == "vit.pth"
    assert one != other


def test_a_full_disk_is_an_error_before_anything_is_fetched(server, monkeypatch):
    usage = type("Usage", (), {"free": 1000})
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage)
    with pytest.raises(
        OutputError, match=r"0\.3 MB needed, 0\.0 MB free; free some space, or set V"
    ):
        download(server.address)


def test_a_disk_that_fills_keeps_what_came(server):
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, hard))
    try:
        with pytest.raises(
            OutputError, match="File too large; free some space, or set VITKIT_CACHE"
        ):
            download(server.address)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    server.served.clear()
    assert download(server.address, sha256=SHA256).read_bytes() == FIRST
    assert server.served == [250_000]


def test_a_terminal_sees_a_bar_on_stderr_alone(server, monkeypatch, capsys):
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    monkeypatch.setattr(sys, "stderr", Terminal())
    download(server.address)
    assert "vit.npz" in sys.stderr.getvalue()
    assert capsys.readouterr().out == ""
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    download(server.address.replace("vit", "other"))
    assert sys.stderr.getvalue() == ""


def test_a_cache_that_cannot_be_written_is_an_error(server, monkeypatch, tmp_path):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("VITKIT_CACHE", str(tmp_path / "file"))
    with pytest.raises(OutputError, match="set VITKIT_CACHE to another folder"):
        download(server.address)


def test_processes_at_once_fetch_it_once(server, tmp_path):
    def fetch_when_asked() -> int:
        (tmp_path / f"ready-{os.getpid()}").touch()
        wait_until((tmp_path / "go").exists)
        print(download(server.address, sha256=SHA256).read_bytes()[:4].hex())  # noqa: T201
        return 0

    server.pause = 1.0
    with forked(fetch_when_asked, tmp_path) as one, forked(fetch_when_asked, tmp_path) as two:
        wait_until(lambda: len([*tmp_path.glob("ready-*")]) == 2)
        (tmp_path / "go").touch()
        assert [(process.wait(), process.stderr) for process in (one, two)] == [(0, "")] * 2
        assert {one.stdout.strip(), two.stdout.strip()} == {FIRST[:4].hex()}
    assert server.served == [len(FIRST)]


def test_a_pickle_waits_for_trust_and_the_catalogue_knows_digests(server, monkeypatch):
    with pytest.raises(CheckpointError, match="is a pickle, and loading"):
        fetch(server.address.replace(".npz", ".pth"))
    with pytest.raises(CheckpointError, match="expected a name that ends in one of"):
        fetch(server.address.replace(".npz", ".zip"))
    assert server.asked == []
    assert fetch(server.address) == cached_path(server.address)
    # as the Hub's links to files end
    assert fetch(f"{server.address}?download=true").read_bytes() == FIRST
    with pytest.raises(CheckpointError, match="expected a name that ends in one of"):
        fetch(f"{server.address.replace('.npz', '.zip')}?name=a.npz")
    assert fetch(server.address.replace(".npz", ".pth"), trust_pickle=True).suffix == ".pth"
    given = []

    def noted(address: str, sha256: str) -> Path:
        given.append(sha256)
        return Path(address)

    monkeypatch.setattr(downloads, "download", noted)
    fetch(find("deit/deit_tiny_patch16_224").address, trust_pickle=True)
    fetch(find("google/sam/ViT-B_16").address)
    assert given == ["a1311bcf", ""]


def test_the_proxy_of_the_environment_is_asked(server, monkeypatch):
    """A proxy gets the whole address in the request; this one answers by itself."""
    host = server.address.partition("/models")[0]
    monkeypatch.setenv("http_proxy", host)
    monkeypatch.setenv("no_proxy", "")
    path = download("http://localhost:9/models/vit.npz", sha256=SHA256)
    assert path.read_bytes() == FIRST
    monkeypatch.setenv("no_proxy", "localhost")
    with pytest.raises(CheckpointError, match="localhost cannot be reached"):
        download("http://localhost:9/models/other.npz")
