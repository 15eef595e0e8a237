"""WebDataset shards on a web server: `wds:https://host/train-{000000..000009}.tar`.

Every shard is fetched and indexed once, before the first step, and its images are decoded in
passing. From then on the set is one like any other: counts, labels, class names and fingerprint
are known, bad images are named, and an image is read by its place. What stays is the index; of
the shards themselves only as many bytes as `remote_shards.room`.

A pass over all shards before the start is the price of one epoch's traffic. Lists of counts that
some publishers put beside their shards would spare it, but they tell nothing of labels or of
broken images, and not every set has one; so nothing has to be told by hand, either.

Only the order differs from a folder's: an epoch goes through the shards in an order that is a
function of (seed, epoch), and through the images of each in an order that is one, too
(`randomness.permutation_by_group`). Each shard is thus fetched once an epoch, and any step of a run
can be reached again by fetching the shards that it needs.
"""

from __future__ import annotations

import dataclasses
import hashlib
import re
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import numpy as np

from vitkit.data.datasets.build import Part, assemble
from vitkit.data.datasets.dataset import Dataset
from vitkit.data.datasets.scan import LOOK, scan_split
from vitkit.data.images.decode import escape
from vitkit.data.sources.remote_shards import (
    KIND,
    ROOM_SETTING,
    RemoteShard,
    RemoteTars,
    fetch_ahead,
    room,
    version_of,
)
from vitkit.data.sources.webdataset import (
    PREFIX,
    expanded,
    index_file,
    name_of,
    notes_of,
    part,
    shards_by_split,
)
from vitkit.errors import DataError
from vitkit.io.file_cache import FileCache
from vitkit.io.http import WebError, allowed, offline
from vitkit.io.index_cache import Index, keep_index, kept_index

ASKED_AT_ONCE = 16
"""Shards whose server is asked for their version at the same time."""
SCHEME = re.compile(r"[a-z][a-z0-9+.-]*:", re.IGNORECASE)

Indexed = tuple[RemoteShard, Index]


def is_remote(address: str) -> bool:
    """Whether `wds:...` names a place that is no local file."""
    return bool(SCHEME.match(address.removeprefix(PREFIX)))


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
            samples without image or label, by name; and what `assemble` raises.
        OutputError: the cache cannot be written.
        SettingError: `VITKIT_SHARDS_GB` is no number.
    """
    pattern, where = address.removeprefix(PREFIX), escape(address)
    addresses = _addresses(pattern)
    folder, _, files = pattern.partition("?")[0].rpartition("/")
    name = f"{escape(folder.partition('://')[2])}/{name_of(files)}".rstrip("/")
    indexed = _index_all(addresses, name)
    names = [shard.name for shard, _ in indexed]
    parts = {
        split: _part([indexed[place] for place in chosen])
        for split, chosen in shards_by_split(names, where).items()
    }
    dataset = assemble(
        name,
        where,
        parts,
        ignore_extra_classes=ignore_extra_classes,
        notes=notes_of([index for _, index in indexed]),
    )
    # The order of an epoch depends on which images share a shard; a run may not change that.
    counts = [len(index.texts["keys"]) for _, index in indexed]
    notes = (*dataset.notes, *_notes([index for _, index in indexed], "val" in parts))
    before = dataset.as_before
    return dataclasses.replace(
        dataset,
        fingerprint=_marked(dataset.fingerprint, counts),
        notes=notes,
        as_before=before
        and dataclasses.replace(before, fingerprint=_marked(before.fingerprint, counts)),
    )


def _marked(fingerprint: str, counts: list[int]) -> str:
    return hashlib.sha256(f"{fingerprint} in shards of {counts}".encode()).hexdigest()


def _addresses(pattern: str) -> list[str]:
    """The addresses that a pattern means, all of which may be asked."""
    where = escape(pattern)
    if pattern.lower().startswith("pipe:"):
        raise DataError(f"{where}: no commands are run; expected an https:// address or a path")
    if "*" in pattern:
        raise DataError(
            f"{where}: a web server does not list its files; name the shards as in "
            f"train-{{000000..000009}}.tar"
        )
    addresses = expanded(pattern)
    try:
        for address in addresses:
            allowed(address)
    except WebError as error:
        raise DataError(f"wds:{error}") from None
    return addresses


def _index_all(addresses: Sequence[str], name: str) -> list[Indexed]:
    """Every shard and its index, in order; all servers are asked before a shard is fetched."""
    from rich.console import Console
    from rich.progress import track

    kept = [kept_index(address, KIND) for address in addresses]
    shards = _shards(addresses, kept)
    memory, indexed = FileCache("looks", name, LOOK), []
    try:
        for place in track(
            range(len(shards)), f"{name}: shards indexed", console=Console(stderr=True),
            transient=True, disable=not sys.stderr.isatty(),
        ):  # fmt: skip
            index = kept[place]
            if index is None or index.texts["version"] != [shards[place].version]:
                is_last = place + 1 == len(shards) or kept[place + 1] is not None
                coming = None if is_last else shards[place + 1]
                index = _make_index(shards[place], coming, memory)
            indexed.append((_checked(shards[place], index), index))
    finally:
        memory.save(finished=False)
    return indexed


def _shards(addresses: Sequence[str], kept: Sequence[Index | None]) -> list[RemoteShard]:
    """The shards as they are now; where nobody may be asked, as they were."""
    if not offline():
        with ThreadPoolExecutor(ASKED_AT_ONCE) as pool:
            return [*map(RemoteShard, addresses, pool.map(version_of, addresses))]
    missing = [address for address, index in zip(addresses, kept, strict=True) if index is None]
    if missing:
        raise DataError(f"{missing[0]}: not indexed yet, and HF_HUB_OFFLINE forbids to fetch it")
    versions = [index.texts["version"][0] for index in kept if index is not None]
    return [*map(RemoteShard, addresses, versions)]


def _make_index(shard: RemoteShard, coming: RemoteShard | None, memory: FileCache) -> Index:
    """The index of a shard, fetched for it; its images are looked at while they are here.

    A shard that cannot be indexed does not stay in the cache: the next run asks the server again.
    """
    with shard.open() as file:
        if coming is not None:
            fetch_ahead(coming)
        try:
            found = index_file(file, escape(shard.address))
        except DataError as error:
            shard.forget()
            raise DataError(f"{error}; the next run fetches it again") from None
        file.seek(0)
        digest = hashlib.file_digest(file, "sha256").hexdigest()
        size = np.array(file.tell())
    index = Index(
        {**found.arrays, "size": size},
        {**found.texts, "version": [shard.version], "sha256": [digest]},
    )
    scan_split(_part([(_checked(shard, index), index)]).images, memory)
    keep_index(shard.address, KIND, index)
    return index


def _checked(shard: RemoteShard, index: Index) -> RemoteShard:
    """The shard, which must from now on be what was indexed."""
    return dataclasses.replace(shard, sha256=index.texts["sha256"][0])


def _part(indexed: Sequence[Indexed]) -> Part:
    shards, indexes = [shard for shard, _ in indexed], [index for _, index in indexed]
    digests = np.concatenate([index.arrays["digests"] for index in indexes])
    return part(indexes, partial(RemoteTars, tuple(shards), digests))


def _notes(indexes: Sequence[Index], has_val: bool) -> list[str]:
    size, here = sum(int(index.arrays["size"]) for index in indexes), room()
    notes = [
        f"{len(indexes):,} remote shards of {size / 1e9:.3g} GB: every epoch goes through them in "
        f"an order of its own and mixes the images of each; a run goes on exactly from any step, "
        f"and fetches the shards again that it needs"
    ]
    if size > here:
        notes.append(
            f"{here / 1e9:g} GB of shards stay on the disk ({ROOM_SETTING}), the others are "
            f"fetched again in every epoch"
        )
        if not has_val:
            notes.append(
                "validation images come from all shards, which are fetched once more for them; "
                "shards with val in their names would spare that"
            )
    return notes
