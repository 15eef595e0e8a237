"""A web server on this machine that gives files, in parts too, and can be made to fail."""

from __future__ import annotations

import hashlib
import http.server
import re
import socket
import struct
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

from local_server import listening


class ShardServer:
    """Files by name.

    Attributes:
        address: where they are, `http://127.0.0.1:PORT/set`.
        files: the files.
        tagged: whether it sends their versions.
        ranges: whether parts of them can be had.
        breaks: name -> after how many bytes each coming answer ends too early.
        fails: name -> what the coming answers are instead (an HTTP status).
        instead: name -> what the coming requests for the whole file get, without a length.
        resets: name -> after how many bytes each coming answer ends with a reset.
        wait: what answers that fail say under Retry-After.
        lengths: what is sent under Content-Length, where that is not to be true.
        fetched: name -> how often it was asked for from its beginning.
        went_on: (name, first byte) of each request for the rest of a file.
    """

    def __init__(self) -> None:
        self.address = ""
        self.files: dict[str, bytes] = {}
        self.tagged, self.ranges = True, True
        self.breaks: dict[str, list[int]] = {}
        self.fails: dict[str, list[int]] = {}
        self.instead: dict[str, list[bytes]] = {}
        self.resets: dict[str, list[int]] = {}
        self.wait, self.lengths = "", ""
        self.fetched: Counter[str] = Counter()
        self.went_on: list[tuple[str, int]] = []

    def answer(self, request: http.server.BaseHTTPRequestHandler) -> None:
        name = request.path.rpartition("/")[2]
        fails = self.fails.get(name)
        if fails or name not in self.files:
            request.send_response(fails.pop(0) if fails else 404)
            if self.wait:
                request.send_header("Retry-After", self.wait)
            request.end_headers()
            return
        content, wanted = self.files[name], request.headers.get("Range", "")
        if not wanted and (instead := self.instead.get(name)):
            request.send_response(200)
            request.end_headers()
            request.wfile.write(instead.pop(0))
            return
        version = f'"{hashlib.sha256(content).hexdigest()}"'
        same = request.headers.get("If-Range") in (None, version)
        found = re.fullmatch(r"bytes=(\d+)-(\d*)", wanted) if same and self.ranges else None
        start = int(found[1]) if found else 0
        end = int(found[2]) + 1 if found and found[2] else len(content)
        request.send_response(206 if found else 200)
        if found:
            request.send_header("Content-Range", f"bytes {start}-{end - 1}/{len(content)}")
        if self.tagged:
            request.send_header("ETag", version)
        request.send_header("Content-Length", self.lengths or str(end - start))
        request.end_headers()
        if wanted.endswith("=0-0"):
            request.wfile.write(content[start:end])
            return
        if start:
            self.went_on.append((name, start))
        else:
            self.fetched[name] += 1
        body = content[start:end]
        if resets := self.resets.get(name):
            request.wfile.write(body[: resets.pop(0)])
            request.wfile.flush()
            # To close with lingering off, for 0 seconds, sends a reset instead of an end.
            request.connection.setsockopt(
                socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0)
            )
            time.sleep(0.05)  # a reset overtakes what was sent before
            request.connection.close()
            return
        breaks = self.breaks.get(name)
        request.wfile.write(body[: breaks.pop(0)] if breaks else body)


@contextmanager
def serving() -> Iterator[ShardServer]:
    """A server that runs inside."""
    state = ShardServer()
    with listening(state.answer) as address:
        state.address = f"{address}/set"
        yield state
