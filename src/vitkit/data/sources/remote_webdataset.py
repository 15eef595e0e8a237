"""WebDataset shards on a web server: `wds:https://host/train-{000000..000009}.tar`.

Every shard is fetched and indexed once, before the first step; its images are decoded then. After
that the dataset is like any other: counts, labels, class names and fingerprint are known, bad
images are named, and an image is read by its offset. The index is kept; of the shards themselves
only as many bytes as `remote_shards.cache_limit`.

A pass over all shards before the start is the price of one epoch's traffic. Lists of counts that
some publishers put beside their shards would spare it, but they have neither labels nor broken
images, and not every dataset has one; so the user need not give any counts, either.

Only the order differs from a folder's: an epoch goes through the shards in an order that is a
function of (seed, epoch), and through the images of each in an order that is one, too
(`randomness.permutation_by_group`). Each shard is thus fetched once an epoch, and any step of a run
can be reached again by fetching the shards that it needs.
"""

from __future__ import annotations

import dataclasses
import hashlib
import re
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import numpy as np

from vitkit.data.datasets.build import NamedImages, assemble
from vitkit.data.datasets.dataset import Dataset
from vitkit.data.datasets.scan import SCAN_ROW, scan_split
from vitkit.data.sources.remote_shards import (
    INDEX_KIND,
    LIMIT_SETTING,
    RemoteShard,
    RemoteTarStore,
    cache_limit,
    start_fetching,
    version_of,
)
from vitkit.data.sources.shard_patterns import expand, files_by_split, name_of
from vitkit.data.sources.webdataset import WEBDATASET_PREFIX, ignored_members, index_file, part_of
from vitkit.errors import DataError
from vitkit.io.digests import file_sha256
from vitkit.io.file_cache import FileCache
from vitkit.io.index_cache import Index, keep_index, kept_index
from vitkit.io.progress import progress_bar
from vitkit.io.web.connections import WebError, offline, parse_address
from vitkit.messages import escape

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
            return [*map(RemoteShard, addresses, pool.map(version_of, addresses))]
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
            start_fetching(upcoming)
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
    limit = cache_limit()
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
