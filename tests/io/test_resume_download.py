"""Downloads that break off and are taken up, from a server that may change the file or lie."""

from __future__ import annotations

import pytest
from download_server import FIRST, SECOND, SHA256, serving

from vitkit.errors import CheckpointError
from vitkit.io.download import cached_path, download

pytestmark = pytest.mark.allow_hosts(["127.0.0.1"])


@pytest.fixture
def server(tmp_path, monkeypatch):
    with serving(tmp_path / "cache", monkeypatch) as state:
        yield state


def test_a_break_is_taken_up_where_it_was(server):
    server.breaks = [100_000, 50_000]
    assert download(server.address, sha256=SHA256[:8]).read_bytes() == FIRST
    assert server.asked == [None, "bytes=100000-", "bytes=150000-"]
    assert server.served == [100_000, 50_000, 150_000]


def test_another_call_takes_it_up_too(server):
    server.breaks = [100_000, 0, 0]
    with pytest.raises(CheckpointError, match="interrupted after 100000 of 300000 bytes"):
        download(server.address)
    assert not cached_path(server.address).exists()
    server.breaks, server.served = [], []
    assert download(server.address, sha256=SHA256).read_bytes() == FIRST
    assert server.served == [200_000]


def test_a_server_without_ranges_starts_over(server):
    server.ranges, server.breaks = False, [100_000]
    assert download(server.address, sha256=SHA256).read_bytes() == FIRST
    assert server.served == [100_000, 300_000]


def test_a_server_that_names_no_version_is_not_asked_to_go_on(server):
    server.version, server.breaks = "", [100_000]
    assert download(server.address).read_bytes() == FIRST
    assert server.asked == [None, None]


def test_a_server_that_goes_on_elsewhere_is_not_believed(server):
    server.breaks, server.shift = [100_000], 1
    with pytest.raises(CheckpointError, match="continues at another position than requested"):
        download(server.address)
    server.shift = 0
    assert download(server.address, sha256=SHA256).read_bytes() == FIRST


def test_a_file_that_changed_is_fetched_anew(server):
    server.breaks = [100_000, 0]
    with pytest.raises(CheckpointError, match="interrupted"):
        download(server.address)
    server.breaks, server.content, server.version = [], SECOND, '"two"'
    assert download(server.address).read_bytes() == SECOND


def test_a_file_that_became_shorter_is_fetched_anew(server):
    server.breaks = [100_000, 0]
    with pytest.raises(CheckpointError, match="interrupted"):
        download(server.address)
    place = cached_path(server.address)
    part = place.with_name(f"{place.name}.part")
    part.write_bytes(FIRST + FIRST)
    server.breaks = []
    with pytest.raises(CheckpointError, match="expected 300,000 bytes, got 600,000"):
        download(server.address)
    assert download(server.address, sha256=SHA256).read_bytes() == FIRST
