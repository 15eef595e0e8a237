"""Shards on a web server: each is fetched when an image of it is asked for, and let go again.

A shard lies in the user's cache while it is used, whole and held against the SHA-256 that it had
when it was indexed. While all of them have more bytes than `$VITKIT_SHARDS_GB`, those that were
fetched longest ago are let go; what is asked for again is fetched again, so nothing but time
depends on what happens to be there.
"""

from __future__ import annotations

import contextlib
import hashlib
import math
import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from io import FileIO
from pathlib import Path
from typing import TypeVar
from urllib.parse import unquote, urlsplit

import numpy as np
from filelock import FileLock
from jaxtyping import Int64, UInt8, UInt64

from vitkit.data.images.decode import escape
from vitkit.errors import DataError, ImageError, SettingError, VitkitError
from vitkit.io.cache_folder import cache_folder
from vitkit.io.http import WebError, discard, keep, offline, request, size_of, stamp, writing
from vitkit.io.index_cache import forget_index

KIND = "remote webdataset"
ROOM, ROOM_SETTING = 20.0, "VITKIT_SHARDS_GB"
KEPT = 4
"""Shards that stay in any case: those that are read, and those that are fetched ahead."""
ATTEMPTS = 6
"""How often in a row a server may fail without a byte more having come."""
MEND = f"free some space, lower {ROOM_SETTING}, or set VITKIT_CACHE to a folder elsewhere"
FIRST_WAIT = 1.0
"""Seconds before the second attempt; each later one waits twice as long as the one before."""
LONGEST_WAIT = 120.0
"""Seconds to wait at most where the server says when it wants to be asked again."""
Answer = TypeVar("Answer")


def room() -> int:
    """Bytes of shards that stay on the disk: `$VITKIT_SHARDS_GB`, else 20, times 10^9.

    Raises:
        SettingError: no number.
    """
    said = os.environ.get(ROOM_SETTING, str(ROOM))
    try:
        size = float(said)
    except ValueError:
        size = -1.0
    if not (math.isfinite(size) and size >= 0):
        raise SettingError(f"{ROOM_SETTING}={said}: expected gigabytes, such as {ROOM:g}")
    return int(size * 1e9)


@dataclass(frozen=True)
class RemoteShard:
    """A tar file at a web address."""

    address: str
    version: str
    """What the server says that tells it from what else was or will be at this address."""
    sha256: str = ""
    """What it must be (hex); unchecked where empty."""

    @property
    def name(self) -> str:
        """The name of its file."""
        return escape(unquote(urlsplit(self.address).path).rpartition("/")[2])

    @property
    def place(self) -> Path:
        """Where it lies in the cache, when it does."""
        key = hashlib.sha256(f"{self.address} {self.version}".encode()).hexdigest()[:24]
        return cache_folder() / "shards" / f"{key}.tar"

    def open(self) -> FileIO:
        """The file, fetched if it is not in the cache; it stays readable if it is let go meanwhile.

        Raises:
            DataError: not there, not reachable after several attempts, or not what it was.
            OutputError: the cache cannot be written.
        """
        try:
            return self.place.open("rb", buffering=0)
        except FileNotFoundError:
            pass
        with writing(self.place, MEND), FileLock(self.place.with_suffix(".lock")):
            try:  # another process may have fetched it meanwhile
                return self.place.open("rb", buffering=0)
            except FileNotFoundError:
                return self._fetched()

    def _fetched(self) -> FileIO:
        if offline():
            raise DataError(
                f"{self.address}: not in the cache, and HF_HUB_OFFLINE forbids to fetch it"
            )
        part = self.place.with_suffix(".part")
        patiently(self.address, lambda: self._request(part), lambda: size_of(part))
        file = part.open("rb", buffering=0)
        try:
            if self.sha256 and hashlib.file_digest(file, "sha256").hexdigest() != self.sha256:
                discard(part)
                forget_index(self.address, KIND)
                raise DataError(
                    f"{self.address}: changed since it was indexed, and the run would not be the "
                    f"same any more; bring the old file back, or start afresh"
                )
            os.fsync(file.fileno())
            keep(part, self.place)
        except BaseException:
            file.close()
            raise
        _make_room(self.place.parent)
        return file

    def _request(self, part: Path) -> None:
        """One request; raises `WebError` also where another file comes than the server named."""
        request(self.address, part)
        expected, came = self.version.rpartition(" ")[2], size_of(part)
        if expected.isdecimal() and came != int(expected):
            discard(part)
            raise WebError(
                f"expected {int(expected):,} bytes, got {came:,}; the server may have sent an "
                f"error or sign-in page",
                broken=True,
            )

    def forget(self) -> None:
        """Delete the file from the cache, so that it is fetched again when it is next needed."""
        self.place.unlink(missing_ok=True)


@dataclass(frozen=True, eq=False)
class RemoteTars:
    """Images in tar files on a web server, read by their place."""

    shards: tuple[RemoteShard, ...]
    digests: UInt8[np.ndarray, "N 32"]
    """Each image's SHA-256 (N, 32)."""
    keys: tuple[str, ...]
    """Each image's name in its shard."""
    shard: Int64[np.ndarray, " N"]
    """Each image's shard (N,)."""
    places: Int64[np.ndarray, "N 2"]
    """Each image's offset and size in bytes (N, 2)."""

    def name(self, number: int) -> str:
        return f"{self.shards[self.shard[number]].name}/{self.keys[number]}"

    def encoded(self, number: int) -> bytes:
        """The image's file.

        Raises:
            ImageError: it is empty.
            DataError: its shard cannot be fetched: that is no fault of the image.
        """
        offset, size = self.places[number].tolist()
        if not size:
            raise ImageError(self.name(number), "empty", "expected an image, got 0 bytes")
        with self.shards[self.shard[number]].open() as file:
            return os.pread(file.fileno(), size, offset)


def content_keys(digests: UInt8[np.ndarray, "N 32"]) -> UInt64[np.ndarray, " N"]:
    """The first 64 bits of each SHA-256 (N,)."""
    return np.ascontiguousarray(digests[:, :8]).view(">u8")[:, 0].astype(np.uint64)


_COMING: set[Path] = set()
"""Shards that threads of this process are fetching."""


def fetch_ahead(shard: RemoteShard) -> None:
    """Have a shard fetched while another one is read; what fails is said when it is needed."""
    if shard.place not in _COMING and not shard.place.exists():
        _COMING.add(shard.place)
        threading.Thread(target=_fetch_ahead, args=(shard,), daemon=True).start()


def _fetch_ahead(shard: RemoteShard) -> None:
    try:
        with contextlib.suppress(VitkitError):
            shard.open().close()
    finally:
        _COMING.discard(shard.place)


def version_of(address: str) -> str:
    """What the server says now that tells this file from another one at the same address.

    Raises:
        DataError: not there, or not reachable after several attempts.
    """
    tag, length = patiently(address, lambda: stamp(address))
    return f"{tag} {length}"


def patiently(
    address: str, ask: Callable[[], Answer], came: Callable[[], int] = lambda: 0
) -> Answer:
    """The answer of a server that may fail for a while: half a minute, longer while bytes come.

    A server that says when it wants to be asked again (Retry-After) is not asked before that, but
    for a wait of more than `LONGEST_WAIT` seconds.

    Args:
        address: what is asked for.
        ask: asks for it; raises `WebError`.
        came: how many bytes have come so far.

    Raises:
        DataError: it does not answer, or with a refusal.
    """
    failed, most = 0, came()
    while True:
        try:
            return ask()
        except WebError as error:
            failed = 1 if came() > most else failed + 1
            most = max(most, came())
            if not error.passing:
                raise DataError(str(error)) from None
            if failed >= ATTEMPTS:
                where = f"{address}: " if error.broken else ""
                raise DataError(
                    f"{where}{error}; asked {failed} times; what has come is kept: run it again"
                ) from None
            asked_for = min(error.wait, LONGEST_WAIT)
        time.sleep(max(FIRST_WAIT * 2 ** (failed - 1), asked_for))


def _make_room(folder: Path) -> None:
    """Let go the shards that were fetched longest ago."""
    found = []
    for path in folder.glob("*.tar"):
        with contextlib.suppress(FileNotFoundError):  # another process makes room, too
            about = path.stat()
            found.append((about.st_mtime_ns, about.st_size, path))
    over = sum(size for _, size, _ in found) - room()
    for _, size, path in sorted(found)[:-KEPT]:
        if over <= 0:
            return
        path.unlink(missing_ok=True)
        over -= size
