"""WebDataset shards, local or on a web server: tar files in which a sample is a run of members.

`dir/000017.jpg` and `dir/000017.cls` are one sample, `dir/000017`. A remote shard is downloaded
whole, once, and read like a local one. Each shard is indexed once and every image hashed; after
that images are read by their offset, in any order, like files of a folder.
"""

import glob
import hashlib
import io
import itertools
import json
import os
import re
import tarfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import NamedTuple
from urllib.parse import unquote, urlsplit

import numpy as np
from jaxtyping import Int64, UInt64

from vitkit.data.datasets.dataset import SPLIT_WORDS, Dataset, Store, StoredSplit
from vitkit.data.datasets.splitting import POOL, NamedImages, assemble, is_hidden
from vitkit.data.images.integrity import IMAGE_ENDINGS
from vitkit.errors import DataError, ImageError
from vitkit.io.caches import Index, cache_folder, cached_index, file_stamp
from vitkit.io.download import download
from vitkit.messages import escape, nearest_parent

WEBDATASET_PREFIX = "wds:"
SCHEME = re.compile(r"[a-z][a-z0-9+.-]*:", re.IGNORECASE)
"""The beginning of an address; anything else after the prefix is a path."""
LABELS = ("cls", "json", "txt")
"""Endings of the label's member, in order of preference."""
LONGEST_LABEL = 1 << 20
LONGEST_IMAGE = 1 << 30
"""Bytes of the longest member that is read, more than any decodable image has."""


def open_webdataset(address: str, *, ignore_extra_classes: bool = False) -> Dataset:
    """Open shards, such as `wds:shards/*.tar` or `wds:https://host/train-{0000..0099}.tar`.

    Remote shards that are not in the cache are downloaded. Shards with train, val or test in their
    names are those splits; a set without such names is cut 70/10/20.

    Args:
        address: `wds:` and a path or an https address with `{first..last}` or `{one,other}`; a path
            may have the wildcards * and ?.
        ignore_extra_classes: leave out classes of val and test that train lacks.

    Raises:
        DataError: shards that are missing, damaged or out of reach, samples without image or label,
            by name; and the errors of `assemble`.
        OutputError: a remote shard cannot be written to the cache.
    """
    pattern = address.removeprefix(WEBDATASET_PREFIX)
    where = escape(address)
    notes = []
    if SCHEME.match(pattern):
        # A query, such as a signature, is no part of a name.
        folder, _, files = pattern.partition("?")[0].rpartition("/")
        name = f"{escape(folder.partition('://')[2])}/{name_of(files)}".rstrip("/")
        shards = _downloaded(pattern)
        size = sum(shard.stamp[0] for shard in shards)
        notes.append(
            f"{len(shards):,} remote shards of {size / 1e9:.3g} GB are kept in {cache_folder()}"
        )
    else:
        shards = [_indexed(path, escape(path), path.name) for path in find_shards(pattern)]
        folder = escape(shards[0].path.absolute().parent.name)
        name = name_of(pattern) or folder or "shards"
    parts = {}
    for split, chosen in files_by_split([shard.name for shard in shards], where).items():
        parts[split] = _part([shards[i] for i in chosen])
    ignored = itertools.chain(*(shard.contents.texts["ignored"] for shard in shards))
    skipped = sum(kind != "folders" for kind in ignored)
    if skipped:
        notes.append(f"skipped in the shards: {skipped:,} links, devices and the like")
    return assemble(name, where, parts, ignore_extra_classes=ignore_extra_classes, notes=notes)


class Shard(NamedTuple):
    """A tar file and its index."""

    name: str
    path: Path
    stamp: tuple[int, int]
    """Its size and time of change when it was indexed."""
    contents: Index


def _downloaded(pattern: str) -> list[Shard]:
    """Download the shards that a pattern of addresses means, and index them."""
    if "*" in pattern:
        raise DataError(
            f"{escape(pattern)}: a web server does not list its files; write the shards as a "
            "range, such as train-{000000..000009}.tar"
        )
    shards = []
    for address in expand(pattern):
        path = download(address, rehash=False, error=DataError)
        name = unquote(urlsplit(address).path).rpartition("/")[2]
        try:
            shards.append(_indexed(path, escape(address), name))
        except DataError as error:
            if tarfile.is_tarfile(path):
                raise
            path.unlink()  # such as the page of a network's login
            raise DataError(f"{error}; the next run downloads it again") from None
    return shards


def _indexed(path: Path, where: str, name: str) -> Shard:
    # The stamp is taken first: a shard that is replaced from now on is refused, not misread.
    try:
        stamp = file_stamp(path)
        return Shard(name, path, stamp, cached_index(path, "shard", partial(_index, where)))
    except OSError as error:
        raise DataError(f"{where}: cannot be read: {error.strerror}") from None


def _index(where: str, path: Path) -> Index:
    """Return the offset and SHA-256 of each image of a shard, and its class.

    Raises:
        DataError: a sample without image or label, or with two images.
    """
    keys: list[str] = []
    labels: list[str] = []
    places: list[tuple[int, int]] = []
    digests: list[bytes] = []
    members, ignored = read_members(path, where)
    with path.open("rb") as file:
        for key, group in itertools.groupby(members, _key):
            image, label = _image_and_label(f"{where}: sample {escape(key)!r}", [*group])
            keys.append(key)
            file.seek(label.offset_data)
            labels.append(_class_name(f"{where}: {escape(label.name)}", file.read(label.size)))
            places.append((image.offset_data, image.size))
            file.seek(image.offset_data)
            digests.append(hashlib.sha256(file.read(image.size)).digest())
    arrays: dict[str, np.ndarray] = {
        "places": np.array(places, np.int64).reshape(-1, 2),
        "digests": np.frombuffer(b"".join(digests), np.uint8).reshape(-1, 32),
    }
    return Index(arrays, {"keys": keys, "labels": labels, "ignored": ignored})


@dataclass(frozen=True, eq=False)
class TarStore(Store):
    """Images in tar files, read by their offset."""

    shards: tuple[Shard, ...]
    shard: Int64[np.ndarray, " N"]
    """Each image's shard (N,)."""
    row: Int64[np.ndarray, " N"]
    """Each image's row in the index of its shard (N,)."""

    def name(self, number: int) -> str:
        shard = self.shards[self.shard[number]]
        return f"{shard.name}/{shard.contents.texts['keys'][self.row[number]]}"

    def encoded(self, number: int) -> bytes:
        shard = self.shards[self.shard[number]]
        offset, size = shard.contents.arrays["places"][self.row[number]].tolist()
        reason = "the shard was changed after it was opened"
        try:
            # Opened for each image: it takes microseconds, and no file is shared between threads.
            with shard.path.open("rb", buffering=0) as file:
                if file_stamp(file.fileno()) == shard.stamp:
                    # No seek: only the file's content decides what is read.
                    return os.pread(file.fileno(), size, offset)
        except OSError as error:
            reason = str(error.strerror)
        raise ImageError(self.name(number), "missing", reason)

    def cache_keys(self, numbers: Int64[np.ndarray, " M"]) -> UInt64[np.ndarray, " M"]:
        # The first 64 bits of each SHA-256: no shard is read for them.
        digests = np.concatenate([shard.contents.arrays["digests"] for shard in self.shards])
        return digests[numbers, :8].copy().view(">u8")[:, 0].astype(np.uint64)


def _part(shards: Sequence[Shard]) -> NamedImages:
    labels: list[str] = []
    digests: list[bytes] = []
    rows: list[np.ndarray] = []
    for shard in shards:
        labels += shard.contents.texts["labels"]
        digests += map(bytes, shard.contents.arrays["digests"])
        rows.append(np.arange(len(shard.contents.texts["keys"])))
    numbers = np.repeat(np.arange(len(rows)), [*map(len, rows)])
    store = TarStore(tuple(shards), numbers, np.concatenate(rows))
    # The labels are numbered by `assemble`, when the classes of all shards are known.
    images = StoredSplit(store, np.zeros(len(labels), np.int64), np.arange(len(labels)))
    return NamedImages(images, labels, digests)


def _key(member: tarfile.TarInfo) -> str:
    """Return the name of a member's sample: all up to the first dot of the file's name."""
    folder, slash, name = member.name.rpartition("/")
    return folder + slash + name.partition(".")[0]


def _ending(member: tarfile.TarInfo) -> str:
    return member.name.rpartition("/")[2].partition(".")[2].lower()


def _image_and_label(
    where: str, group: Sequence[tarfile.TarInfo]
) -> tuple[tarfile.TarInfo, tarfile.TarInfo]:
    """Return the two members that make a sample: its image, and that of the first of `LABELS`."""
    endings = [*map(_ending, group)]
    images = [member for member in group if f".{_ending(member)}" in IMAGE_ENDINGS]
    labels = [group[endings.index(ending)] for ending in LABELS if ending in endings]
    if len(images) != 1 or not labels:
        raise DataError(
            f"{where}: expected one image and a label (.cls, .json or .txt), got "
            f"{escape(', '.join(endings))[:100]}"
        )
    for member, most in ((images[0], LONGEST_IMAGE), (labels[0], LONGEST_LABEL)):
        if member.size > most:
            raise DataError(f"{where}: a member of {member.size:,} bytes; at most {most:,}")
    return images[0], labels[0]


def _class_name(where: str, content: bytes) -> str:
    """Return the class in a label member: its text, or `label` of its JSON."""
    try:
        label: object = content.decode("utf-8").strip()
        if where.lower().endswith(".json"):
            label = json.loads(str(label))
    except (ValueError, RecursionError) as error:
        raise DataError(f"{where}: cannot be read: {error}") from None
    if isinstance(label, dict):
        label = label.get("label")
    # JSON's true and false are no class names, although Python counts them as ints.
    if isinstance(label, bool) or not isinstance(label, str | int) or label == "":
        raise DataError(f"{where}: expected a class name or number, got {label!r}")
    return str(label)


class _Headers(io.FileIO):
    """A tar of which only headers are read, none into more memory than a label may take."""

    def read(self, size: int | None = -1) -> bytes:
        if size is None or not 0 <= size <= LONGEST_LABEL:
            raise tarfile.ReadError(f"an extended header of {size} bytes")
        return super().read(size)


def read_members(path: Path, where: str) -> tuple[list[tarfile.TarInfo], list[str]]:
    """Return the files in an uncompressed tar that may belong to samples, in order.

    Nothing is ever extracted.

    Args:
        path: the tar; only headers are read.
        where: its name for messages.

    Returns:
        The files, and the types of links, devices and the like, which are ignored.

    Raises:
        DataError: not a tar, compressed, damaged, shorter than its headers claim, with sparse
            files, or with more after its end than zeros.
        OSError: it cannot be read.
    """
    members: list[tarfile.TarInfo] = []
    ignored: list[str] = []
    try:
        with (
            _Headers(path) as file,
            tarfile.open(
                fileobj=file, mode="r:", encoding="utf-8", errors="backslashreplace"
            ) as tar,
        ):
            for member in tar:
                if member.size < 0 or member.issparse():
                    raise tarfile.ReadError(f"{escape(member.name)} is sparse or below 0 bytes")
                if not member.isfile():
                    ignored += [] if member.isdir() else [str(member.type)]
                elif _ending(member) and not is_hidden(member.name.rpartition("/")[2]):
                    members.append(member)
            # `tarfile` takes a damaged header for the end, and the samples after it would be lost.
            file.seek(tar.offset)
            block = file.read(tarfile.BLOCKSIZE)
            is_cut = len(block) < tarfile.BLOCKSIZE
            while block and not any(block):
                block = file.read(LONGEST_LABEL)
            if is_cut or block:
                raise tarfile.ReadError(
                    f"expected zeros from byte {tar.offset:,} to the end; if tars were joined by "
                    "cat, join them by tar --concatenate"
                )
    except (tarfile.TarError, ValueError, LookupError, OverflowError, RecursionError) as error:
        raise DataError(f"{where}: damaged, or not an uncompressed tar: {error}") from None
    return members, ignored


# File names of shards: `train-{0000..0099}.tar` and wildcards, and the split in a name.

MOST_SHARDS = 100_000
SPLIT = re.compile(rf"(?:^|[-_.])({'|'.join(SPLIT_WORDS)})(?=[-_.])", re.IGNORECASE)
"""A split in the name of a file, such as `train` in `flowers-train-0001.tar`."""
BRACES = re.compile(r"\{([^{}]*)\}")
RANGE = re.compile(r"([0-9]{1,18})\.\.([0-9]{1,18})")


def find_shards(pattern: str) -> list[Path]:
    """Return the files that a pattern means, in order.

    Args:
        pattern: a path with `{first..last}`, `{one,other}` or the wildcards `*`, `?` and `[...]`.

    Raises:
        DataError: none, or one of a `{first..last}` that is not there.
    """
    shards: list[Path] = []
    folder, rest = literal_folder(os.path.expanduser(pattern))
    for text in expand(rest):
        path = folder / text
        found = []
        # A file whose name has a wildcard in it is meant literally.
        if not os.path.isfile(path):
            found = [folder / name for name in glob.glob(text, root_dir=folder)]
        shards += sorted(found) or [path]
    missing = [shard for shard in shards if not os.path.isfile(shard)]
    if not missing:
        return shards
    first = escape(missing[0])
    problem = f"no such file; {nearest_parent(missing[0])}"
    if os.path.isdir(missing[0]):
        problem = f"a folder; name the shards in it, such as wds:{first}/*.tar"
    raise DataError(f"{first}: {problem} ({len(missing):,} of {len(shards):,} shards missing)")


def literal_folder(pattern: str) -> tuple[Path, str]:
    """Return the longest beginning of a pattern that is a folder, and the rest.

    Its name may have braces and wildcards, which are meant literally.
    """
    folder, rest = Path(), Path(pattern).parts
    while rest and os.path.isdir(folder / rest[0]):
        folder, rest = folder / rest[0], rest[1:]
    return folder, os.path.join("", *rest)


def expand(pattern: str) -> list[str]:
    """Return the pattern with every `{...}` replaced by each of its alternatives, in order.

    >>> expand("{a,b}-{08..10}.tar")[:4]
    ['a-08.tar', 'a-09.tar', 'a-10.tar', 'b-08.tar']

    Raises:
        DataError: none, or more than `MOST_SHARDS`.
    """
    # One more than the limit shows that there are too many.
    texts = list(itertools.islice(_expand(pattern), MOST_SHARDS + 1))
    if not 0 < len(texts) <= MOST_SHARDS:
        raise DataError(
            f"{escape(pattern)}: expected 1 to {MOST_SHARDS:,} shards; in a range such as "
            "{0000..0099} the first number comes first"
        )
    return list(dict.fromkeys(texts))


def _expand(pattern: str) -> Iterator[str]:
    match = BRACES.search(pattern)
    if match is None:
        yield pattern
        return
    choices: Iterator[str] = iter(match[1].split(","))
    numbers = RANGE.fullmatch(match[1])
    if numbers is not None:
        # Leading zeros of the first number give the width of all.
        width = len(numbers[1]) * numbers[1].startswith("0")
        choices = (str(n).zfill(width) for n in range(int(numbers[1]), int(numbers[2]) + 1))
    for choice in choices:
        yield from _expand(pattern[: match.start()] + choice + pattern[match.end() :])


def name_of(pattern: str) -> str:
    """Return the name of a set of shards: the common beginning of their file names, maybe ""."""
    # The fixed beginning of the names, without the separator before the number.
    name = re.split(r"[{*?\[]", Path(pattern).name)[0]
    return escape(re.sub(r"[-_.]*$", "", name).removesuffix(".tar"))


def files_by_split(names: Sequence[str], where: str) -> dict[str, list[int]]:
    """Group files by the split in their names; all belong to the pool where no name has one.

    Args:
        names: names of the files.
        where: the folder or address, for messages.

    Returns:
        Split -> the indices of its files.

    Raises:
        DataError: some names have a split and others do not.
    """
    groups: dict[str, list[int]] = {}
    for index, name in enumerate(names):
        match = SPLIT.search(name)
        split = POOL if match is None else SPLIT_WORDS[match[1].lower()]
        groups.setdefault(split, []).append(index)
    if POOL in groups and len(groups) > 1:
        raise DataError(
            f"{where}: {escape(names[groups[POOL][0]])} has none of train, val and test in its "
            "name, and others have; put the split into all names, or into none"
        )
    return groups
