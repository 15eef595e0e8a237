"""A server on this machine that breaks off, changes its mind, and lies."""

from __future__ import annotations

import hashlib
import http.server
import re
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
from local_server import listening

from vitkit.io import download as resume_download
from vitkit.io.download import cached_path

FIRST, SECOND = (np.random.default_rng(seed).bytes(300_000) for seed in (0, 1))
SHA256 = hashlib.sha256(FIRST).hexdigest()


class Server:
    """One file at every path, and how it is served.

    Attributes:
        content: the file.
        version: its ETag; none where empty.
        ranges: whether parts of it can be had.
        breaks: after how many bytes each coming answer ends too early; then they are whole.
        served: bytes of each answer so far.
        asked: the `Range` of each request.
        pause: seconds before each answer.
        shift: by how much `Content-Range` is wrong.
    """

    def __init__(self) -> None:
        self.content, self.version, self.ranges = FIRST, '"one"', True
        self.breaks: list[int] = []
        self.served: list[int] = []
        self.asked: list[str | None] = []
        self.status, self.location = 200, ""
        self.pause, self.shift = 0.0, 0

    def answer(self, request: http.server.BaseHTTPRequestHandler) -> None:
        wanted = request.headers.get("Range")
        self.asked.append(wanted)
        time.sleep(self.pause)
        if self.status != 200:
            request.send_response(self.status)
            request.send_header("Location", self.location)
            request.send_header("Content-Length", "0")
            request.end_headers()
            return
        same = request.headers.get("If-Range") in (None, self.version)
        start = int(re.findall(r"\d+", wanted)[0]) if wanted and self.ranges and same else 0
        body = self.content[start:]
        request.send_response(206 if start else 200)
        if start:
            total = len(self.content)
            request.send_header("Content-Range", f"bytes {start + self.shift}-{total - 1}/{total}")
        if self.version:
            request.send_header("ETag", self.version)
        request.send_header("Content-Length", str(len(body)))
        body = body[: self.breaks.pop(0)] if self.breaks else body
        self.served.append(len(body))  # before anything is sent: the client may be ahead of this
        request.end_headers()
        request.wfile.write(body)


@contextmanager
def serving(cache: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    """A server at `server.address`, an empty cache, and no proxy between them."""
    state = Server()
    with listening(state.answer) as address:
        state.address = f"{address}/models/vit.npz"
        monkeypatch.setenv("VITKIT_CACHE", str(cache))
        monkeypatch.setenv("no_proxy", "*")
        monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
        monkeypatch.setattr(resume_download, "PAUSE", 0.0)
        yield state


def left_over(address: str) -> set[str]:
    """What lies in the cache beside the file and its lock."""
    place = cached_path(address)
    return {path.name for path in place.parent.iterdir()} - {place.name, f"{place.name}.lock"}
