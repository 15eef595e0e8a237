"""Shards on a web server: each is fetched when one of its images is read, and deleted later.

A shard is kept in the user's cache while it is used, whole and checked against the SHA-256 that it
had when it was indexed. While all of them have more bytes than `$VITKIT_SHARDS_GB`, those that were
fetched longest ago are deleted. A deleted shard is fetched again when it is needed, so the contents
of the cache change nothing but time.
"""

from __future__ import annotations

import contextlib
import hashlib
import math
import os
import threading
from dataclasses import dataclass
from io import FileIO
from pathlib import Path
from urllib.parse import unquote, urlsplit

import numpy as np
from filelock import FileLock
from jaxtyping import Int64, UInt8, UInt64

from vitkit.data.datasets.dataset import Store
from vitkit.errors import DataError, ImageError, SettingError, VitkitError
from vitkit.io.cache_folder import cache_folder
from vitkit.io.digests import file_sha256
from vitkit.io.index_cache import forget_index
from vitkit.io.web.connections import Attempts, WebError, offline
from vitkit.io.web.download import writing_to_cache
from vitkit.io.web.part_file import PartFile
from vitkit.io.web.resume_download import receive, remote_version
from vitkit.messages import escape

INDEX_KIND = "remote webdataset"
"""Kind of the index of a remote shard in the cache."""
DEFAULT_GB, LIMIT_SETTING = 20.0, "VITKIT_SHARDS_GB"
NEVER_DELETED = 4
"""Shards that are never deleted: the ones being read, and the ones fetched ahead."""
SERVER_ATTEMPTS = 6
"""Failures in a row without any new byte before giving up, after half a minute."""
LONGEST_PAUSE = 120.0
"""Seconds that an overloaded server may ask to wait."""
HOW_TO_MAKE_SPACE = (
    f"free some space, lower {LIMIT_SETTING}, or set VITKIT_CACHE to a folder elsewhere"
)


def cache_limit() -> int:
    """Return the bytes of shards that stay on the disk: `$VITKIT_SHARDS_GB`, else 20, times 10^9.

    Raises:
        SettingError: no number.
    """
    setting = os.environ.get(LIMIT_SETTING, str(DEFAULT_GB))
    try:
        gigabytes = float(setting)
    except ValueError:
        gigabytes = -1.0
    if not (math.isfinite(gigabytes) and gigabytes >= 0):
        raise SettingError(
            f"{LIMIT_SETTING}={setting!r}: expected a number of gigabytes, such as {DEFAULT_GB:g}"
        )
    return int(gigabytes * 1e9)


@dataclass(frozen=True)
class RemoteShard:
    """A tar file at a web address."""

    address: str
    version: str
    """The server's version of the file (ETag or time), which changes with its content."""
    sha256: str = ""
    """Its expected SHA-256 (hex); unchecked where empty."""

    @property
    def name(self) -> str:
        """The name of its file."""
        return escape(unquote(urlsplit(self.address).path).rpartition("/")[2])

    @property
    def path(self) -> Path:
        """The path of its file in the cache."""
        key = hashlib.sha256(f"{self.address} {self.version}".encode()).hexdigest()[:24]
        return cache_folder() / "shards" / f"{key}.tar"

    def open(self) -> FileIO:
        """Open the file, fetched if it is not in the cache; it stays readable if it is deleted.

        Raises:
            DataError: not there, not reachable after several attempts, or changed.
            OutputError: the cache cannot be written.
        """
        with contextlib.suppress(FileNotFoundError):
            return self.path.open("rb", buffering=0)
        # The lock keeps several workers from fetching the same gigabytes.
        lock = FileLock(self.path.with_suffix(".lock"))
        with writing_to_cache(self.path, HOW_TO_MAKE_SPACE), lock:
            # another process may have fetched it meanwhile
            with contextlib.suppress(FileNotFoundError):
                return self.path.open("rb", buffering=0)
            return self._fetch()

    def _fetch(self) -> FileIO:
        if offline():
            raise DataError(
                f"{self.address}: not in the cache, and HF_HUB_OFFLINE forbids downloading it"
            )
        part = PartFile(self.path.with_suffix(".part"))
        length = self.version.rpartition(" ")[2]
        try:
            expected = int(length) if length.isdecimal() else None
            receive(self.address, part, _attempts(), length=expected)
        except WebError as error:
            raise _data_error(self.address, error, kept=part.can_continue) from None
        file = part.path.open("rb", buffering=0)
        try:
            if self.sha256 and file_sha256(file) != self.sha256:
                part.discard()
                forget_index(self.address, INDEX_KIND)
                raise DataError(
                    f"{self.address}: changed since it was indexed, so the run would not be the "
                    "same; restore the old file, or start afresh"
                )
            # Synced before it is renamed: after a crash there is no damaged shard.
            os.fsync(file.fileno())
            part.finish(self.path)
            _delete_oldest(self.path.parent)
        except BaseException:  # also Ctrl-C: only a complete shard is returned open
            file.close()
            raise
        return file

    def forget(self) -> None:
        """Delete the file from the cache, so that it is fetched again when it is next needed."""
        self.path.unlink(missing_ok=True)


@dataclass(frozen=True, eq=False)
class RemoteTarStore(Store):
    """Images in tar files on a web server, read by their offset."""

    tars: tuple[RemoteShard, ...]
    digests: UInt8[np.ndarray, "N 32"]
    """Each image's SHA-256 (N, 32)."""
    keys: tuple[str, ...]
    """Each image's name in its shard."""
    shard: Int64[np.ndarray, " N"]
    """Each image's shard (N,)."""
    places: Int64[np.ndarray, "N 2"]
    """Each image's offset and size in bytes (N, 2)."""

    @property
    def is_remote(self) -> bool:
        return True

    def name(self, number: int) -> str:
        return f"{self.tars[self.shard[number]].name}/{self.keys[number]}"

    def encoded(self, number: int) -> bytes:
        """Return the image's file.

        Raises:
            ImageError: it is empty.
            DataError: its shard cannot be fetched: that is no fault of the image.
        """
        offset, size = self.places[number].tolist()
        if not size:
            raise ImageError(self.name(number), "empty", "expected an image, got 0 bytes")
        with self.tars[self.shard[number]].open() as file:
            return os.pread(file.fileno(), size, offset)

    def cache_keys(self, numbers: Int64[np.ndarray, " M"]) -> UInt64[np.ndarray, " M"]:
        """Return the first 64 bits of each SHA-256 (M,): no shard is fetched for them."""
        first_bytes = np.ascontiguousarray(self.digests[numbers][:, :8])
        return first_bytes.view(">u8")[:, 0].astype(np.uint64)

    def shards(self, numbers: Int64[np.ndarray, " M"]) -> Int64[np.ndarray, " M"]:
        return self.shard[numbers]

    def prefetch(self, numbers: Int64[np.ndarray, " M"]) -> None:
        """Start to fetch the first shard that these images need after that of the first one."""
        shards = self.shard[numbers]
        later = shards[shards != shards[0]]
        if len(later):
            start_fetching(self.tars[later[0]])


_FETCHING: set[Path] = set()
"""Shards that threads of this process are fetching."""


def start_fetching(shard: RemoteShard) -> None:
    """Fetch a shard in a thread while another one is read; errors are raised when it is opened."""
    # Only one thread of a process fetches a shard; other processes wait for its lock.
    if shard.path not in _FETCHING and not shard.path.exists():
        _FETCHING.add(shard.path)
        threading.Thread(target=_fetch_quietly, args=(shard,), daemon=True).start()


def _fetch_quietly(shard: RemoteShard) -> None:
    try:
        with contextlib.suppress(VitkitError):
            shard.open().close()
    finally:
        _FETCHING.discard(shard.path)


def version_of(address: str) -> str:
    """Return the version of a file that the server reports: its tag and its size in bytes.

    Raises:
        DataError: not there, or not reachable after several attempts.
    """
    try:
        tag, length = remote_version(address, _attempts())
    except WebError as error:
        raise _data_error(address, error, kept=False) from None
    return f"{tag} {length}"


def _attempts() -> Attempts:
    return Attempts.of(SERVER_ATTEMPTS, LONGEST_PAUSE)


def _data_error(address: str, error: WebError, *, kept: bool) -> DataError:
    if error.broken:
        again = "what was downloaded is kept, so run it again" if kept else "run it again"
        return DataError(f"{address}: {error}; {again}")
    return DataError(str(error))


def _delete_oldest(folder: Path) -> None:
    """Delete the shards that were fetched longest ago, until the rest is within the limit."""
    # By mtime, which is the time of the download: reading does not change it.
    shards = []
    for path in folder.glob("*.tar"):
        with contextlib.suppress(FileNotFoundError):  # another process deletes some, too
            status = path.stat()
            shards.append((status.st_mtime_ns, status.st_size, path))
    excess = sum(size for _, size, _ in shards) - cache_limit()
    # An open file stays readable after its deletion, so there is no need to wait for readers.
    for _, size, path in sorted(shards)[:-NEVER_DELETED]:
        if excess <= 0:
            return
        path.unlink(missing_ok=True)
        excess -= size
