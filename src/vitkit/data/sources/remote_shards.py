"""Shards on a web server: each is fetched when one of its images is read, and deleted later.

A shard is kept in the user's cache while it is used, whole and checked against the SHA-256 that it
had when it was indexed. While all of them have more bytes than `$VITKIT_SHARDS_GB`, those that were
fetched longest ago are deleted. A deleted shard is fetched again when it is needed, so the contents
of the cache change nothing but time.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import math
import os
import re
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from io import FileIO
from pathlib import Path
from urllib.parse import unquote, urlsplit

import numpy as np
from filelock import FileLock
from jaxtyping import Int64, UInt8, UInt64

from vitkit.data.datasets.build import NamedImages, assemble
from vitkit.data.datasets.dataset import Dataset, Store
from vitkit.data.datasets.scan import SCAN_ROW, scan_split
from vitkit.data.sources.shard_patterns import expand, files_by_split, name_of
from vitkit.data.sources.webdataset import WEBDATASET_PREFIX, ignored_members, index_file, part_of
from vitkit.errors import DataError, ImageError, SettingError, VitkitError
from vitkit.io.caches import (
    FileCache,
    Index,
    cache_folder,
    file_sha256,
    forget_index,
    keep_index,
    kept_index,
)
from vitkit.io.download import (
    Attempts,
    PartFile,
    WebError,
    offline,
    parse_address,
    receive,
    remote_version,
    writing_to_cache,
)
from vitkit.messages import escape, progress_bar

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


def _cache_limit() -> int:
    """Return the bytes of shards that stay on the disk: `$VITKIT_SHARDS_GB` (20) times 10^9."""
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
            _start_fetching(self.tars[later[0]])


_FETCHING: set[Path] = set()
"""Shards that threads of this process are fetching."""


def _start_fetching(shard: RemoteShard) -> None:
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


def _version_of(address: str) -> str:
    """Return the version of a file that the server reports: its tag and its size in bytes."""
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
    excess = sum(size for _, size, _ in shards) - _cache_limit()
    # An open file stays readable after its deletion, so there is no need to wait for readers.
    for _, size, path in sorted(shards)[:-NEVER_DELETED]:
        if excess <= 0:
            return
        path.unlink(missing_ok=True)
        excess -= size


# WebDataset shards on a web server: `wds:https://host/train-{000000..000009}.tar`.
#
# Every shard is fetched and indexed once, before the first step; its images are decoded then. After
# that the dataset is like any other: counts, labels, class names and fingerprint are known, bad
# images are named, and an image is read by its offset. The index is kept; of the shards themselves
# only as many bytes as `remote_shards.cache_limit`.
#
# A pass over all shards before the start is the price of one epoch's traffic. Lists of counts that
# some publishers put beside their shards would spare it, but they have neither labels nor broken
# images, and not every dataset has one; so the user need not give any counts, either.
#
# Only the order differs from a folder's: an epoch goes through the shards in an order that is a
# function of (seed, epoch), and through the images of each in an order that is one, too
# (`randomness.permutation_by_group`). Each shard is thus fetched once an epoch, and any step of a
# run can be reached again by fetching the shards that it needs.

ASKED_AT_ONCE = 16
"""Shards whose server is asked for their version at the same time."""
SCHEME = re.compile(r"[a-z][a-z0-9+.-]*:", re.IGNORECASE)

Indexed = tuple[RemoteShard, Index]


def is_remote(address: str) -> bool:
    """Return True if `wds:...` is an address and no local path."""
    return bool(SCHEME.match(address.removeprefix(WEBDATASET_PREFIX)))


def open_remote_webdataset(address: str, *, ignore_extra_classes: bool = False) -> Dataset:
    """Open shards on a web server; those that are not indexed yet are fetched for it.

    Shards with train, val or test in their names are those splits; a set without such names is cut
    70/10/20.

    Args:
        address: `wds:` and an https address (http of this machine) with `{first..last}` or
            `{one,other}`.
        ignore_extra_classes: leave out classes of val and test that train lacks.

    Raises:
        DataError: an address of another kind; shards that are missing, damaged or out of reach,
            samples without image or label, by name; and the errors of `assemble`.
        OutputError: the cache cannot be written.
        SettingError: `VITKIT_SHARDS_GB` is no number.
    """
    pattern = address.removeprefix(WEBDATASET_PREFIX)
    where = escape(address)
    addresses = _addresses(pattern)
    # A query, such as a signature, is not part of the dataset's name.
    folder, _, files = pattern.partition("?")[0].rpartition("/")
    name = f"{escape(folder.partition('://')[2])}/{name_of(files)}".rstrip("/")
    indexed = _index_all(addresses, name)
    shards, indexes = zip(*indexed, strict=True)
    parts = {}
    for split, chosen in files_by_split([shard.name for shard in shards], where).items():
        parts[split] = _part([indexed[i] for i in chosen])
    dataset = assemble(
        name,
        where,
        parts,
        ignore_extra_classes=ignore_extra_classes,
        notes=ignored_members(indexes),
    )
    # The order of an epoch depends on which images share a shard; a run may not change that.
    counts = [len(index.texts["keys"]) for index in indexes]
    before = dataset.as_before
    return dataclasses.replace(
        _with_counts(dataset, counts),
        notes=(*dataset.notes, *_notes(indexes, "val" in parts)),
        as_before=None if before is None else _with_counts(before, counts),
    )


def _with_counts(dataset: Dataset, counts: list[int]) -> Dataset:
    """Return the dataset with a fingerprint of its images and of the images in each shard."""
    text = f"{dataset.fingerprint} in shards of {counts}"
    return dataclasses.replace(dataset, fingerprint=hashlib.sha256(text.encode()).hexdigest())


def _addresses(pattern: str) -> list[str]:
    """Return the addresses that a pattern means, all of which may be requested."""
    where = escape(pattern)
    if pattern.lower().startswith("pipe:"):
        raise DataError(f"{where}: commands are not run; expected an https:// address or a path")
    if "*" in pattern:
        raise DataError(
            f"{where}: a web server does not list its files; write the shards as a range, such "
            "as train-{000000..000009}.tar"
        )
    addresses = expand(pattern)
    try:
        for address in addresses:
            parse_address(address)
    except WebError as error:
        raise DataError(f"wds:{error}") from None
    return addresses


def _index_all(addresses: Sequence[str], name: str) -> list[Indexed]:
    """Return every shard and its index; all versions are known before a shard is fetched."""
    # The index is kept longer than the shard: only shards without an index are fetched now.
    stored = [kept_index(address, INDEX_KIND) for address in addresses]
    shards = _shards(addresses, stored)
    cache = FileCache("looks", name, SCAN_ROW)
    indexed: list[Indexed] = []
    try:
        with progress_bar(len(shards), f"{name}: shards indexed") as advance:
            for i, (shard, index) in enumerate(zip(shards, stored, strict=True)):
                # A shard that was replaced on the server has another version: it is indexed anew.
                if index is None or index.texts["version"] != [shard.version]:
                    next_is_needed = i + 1 < len(shards) and stored[i + 1] is None
                    upcoming = shards[i + 1] if next_is_needed else None
                    index = _build_index(shard, upcoming, cache)
                indexed.append((_checked(shard, index), index))
                advance(1)
    finally:
        cache.save(finished=False)
    return indexed


def _shards(addresses: Sequence[str], stored: Sequence[Index | None]) -> list[RemoteShard]:
    """Return the shards in the server's version; offline in the version that was indexed."""
    if not offline():
        with ThreadPoolExecutor(ASKED_AT_ONCE) as pool:
            return [*map(RemoteShard, addresses, pool.map(_version_of, addresses))]
    shards = []
    for address, index in zip(addresses, stored, strict=True):
        if index is None:
            raise DataError(
                f"{address}: not indexed yet, and HF_HUB_OFFLINE forbids downloading it"
            )
        shards.append(RemoteShard(address, index.texts["version"][0]))
    return shards


def _build_index(shard: RemoteShard, upcoming: RemoteShard | None, cache: FileCache) -> Index:
    """Return the index of a shard, fetched for it; its images are decoded while they are here.

    A shard that cannot be indexed does not stay in the cache: the next run fetches it again.
    """
    with shard.open() as file:
        if upcoming is not None:
            _start_fetching(upcoming)
        try:
            contents = index_file(file, escape(shard.address))
        except DataError as error:
            shard.forget()
            raise DataError(f"{error}; the next run downloads it again") from None
        file.seek(0)
        digest = file_sha256(file)
        size = np.array(file.tell())
    index = Index(
        {**contents.arrays, "size": size},
        {**contents.texts, "version": [shard.version], "sha256": [digest]},
    )
    # The results go to the cache, where the check before the run finds them.
    scan_split(_part([(_checked(shard, index), index)]).images, cache)
    keep_index(shard.address, INDEX_KIND, index)
    return index


def _checked(shard: RemoteShard, index: Index) -> RemoteShard:
    """Return the shard with the SHA-256 that was indexed, against which it is checked."""
    return dataclasses.replace(shard, sha256=index.texts["sha256"][0])


def _part(indexed: Sequence[Indexed]) -> NamedImages:
    shards, indexes = zip(*indexed, strict=True)
    # (N, 32): the digests identify images while their shard is not on disk
    digests = np.concatenate([index.arrays["digests"] for index in indexes])
    return part_of(indexes, partial(RemoteTarStore, shards, digests))


def _notes(indexes: Sequence[Index], has_val: bool) -> list[str]:
    size = sum(int(index.arrays["size"]) for index in indexes)
    limit = _cache_limit()
    notes = [
        f"{len(indexes):,} remote shards of {size / 1e9:.3g} GB: each epoch reads them "
        "in another order and mixes the images within each shard; a run resumes exactly from "
        "any step, and downloads the shards it needs again"
    ]
    if size > limit:
        notes.append(
            f"{limit / 1e9:g} GB of shards stay on the disk ({LIMIT_SETTING}); the "
            "others are downloaded again in every epoch"
        )
        if not has_val:
            notes.append(
                "validation images come from all shards, which are downloaded once more for "
                "them; shards with val in their names would avoid that"
            )
    return notes
