"""WebDataset shards, local or on a web server: tar files in which a sample is a run of members.

`dir/000017.jpg` and `dir/000017.cls` are one sample, `dir/000017`. A remote shard is downloaded
whole, once, and read like a local one. Each shard is indexed once and every image hashed; after
that images are read by their offset, in any order, like files of a folder.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import re
import tarfile
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import BinaryIO, NamedTuple
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
ENDINGS_SHOWN = 8


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
    if SCHEME.match(pattern):
        # A query, such as a signature, is no part of a name.
        folder, _, files = pattern.partition("?")[0].rpartition("/")
        name = f"{escape(folder.partition('://')[2])}/{name_of(files)}".rstrip("/")
        shards = _downloaded(pattern)
    else:
        shards = [_indexed(path, escape(path), path.name) for path in find_shards(pattern)]
        folder = escape(shards[0].path.absolute().parent.name)
        name = name_of(pattern) or folder or "shards"
    parts = {}
    for split, chosen in files_by_split([shard.name for shard in shards], where).items():
        parts[split] = _part([shards[i] for i in chosen])
    notes = _notes_on_ignored(shards)
    if SCHEME.match(pattern):
        size = sum(shard.stamp[0] for shard in shards)
        notes.append(
            f"{len(shards):,} remote shards of {size / 1e9:.3g} GB are kept in {cache_folder()}"
        )
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
    where = escape(pattern)
    if pattern.lower().startswith("pipe:"):
        raise DataError(f"{where}: commands are not run; expected an https:// address or a path")
    if "*" in pattern:
        raise DataError(
            f"{where}: a web server does not list its files; write the shards as a range, such "
            "as train-{000000..000009}.tar"
        )
    shards = []
    for address in expand(pattern):
        path = fetch_data(address)
        name = unquote(urlsplit(address).path).rpartition("/")[2]
        try:
            shards.append(_indexed(path, escape(address), name))
        except DataError as error:
            path.unlink()
            raise DataError(f"{error}; the next run downloads it again") from None
    return shards


def fetch_data(address: str, sha256: str = "") -> Path:
    """Return the file at a web address, from the cache or downloaded into it.

    Raises:
        DataError: not there, not reachable, not whole, or not the file expected.
        OutputError: the cache cannot be written.
    """
    return download(address, sha256=sha256, rehash=False, error=DataError)


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
    with path.open("rb") as file:
        members, ignored = read_members(file, where)
        for key, group in _samples(members):
            image, label = _image_and_label(f"{where}: sample {escape(key)!r}", group)
            keys.append(key)
            labels.append(_class_name(file, where, *label))
            places.append((image.offset, image.size))
            file.seek(image.offset)
            digests.append(hashlib.sha256(file.read(image.size)).digest())
    arrays: dict[str, np.ndarray] = {
        "places": np.array(places, np.int64).reshape(-1, 2),
        "digests": np.frombuffer(b"".join(digests), np.uint8).reshape(-1, 32),
    }
    return Index(arrays, {"keys": keys, "labels": labels, "ignored": [*ignored.elements()]})


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
        try:
            # Opened for each image: it takes microseconds, and no file is shared between threads.
            with shard.path.open("rb", buffering=0) as file:
                if file_stamp(file.fileno()) != shard.stamp:
                    raise ImageError(
                        self.name(number), "missing", "the shard was changed after it was opened"
                    )
                # No seek: only the file's content decides what is read.
                content = os.pread(file.fileno(), size, offset)
        except OSError as error:
            raise ImageError(self.name(number), "missing", str(error.strerror)) from error
        if not content:
            raise ImageError(self.name(number), "empty", "expected an image, got 0 bytes")
        return content

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


def _notes_on_ignored(shards: Sequence[Shard]) -> list[str]:
    """Return a line on the members of the shards that are not read, if there are any."""
    totals = Counter[str]()
    for shard in shards:
        totals.update(shard.contents.texts["ignored"])
    del totals["folders"]  # every tar of a folder has folder entries
    if not totals:
        return []
    listed = ", ".join(f"{count:,} {kind}" for kind, count in totals.items())
    return [f"skipped in the shards: {listed}"]


def _samples(members: Sequence[Member]) -> list[tuple[str, list[tuple[str, Member]]]]:
    """Return the name of each sample, and its members with their endings."""
    samples: list[tuple[str, list[tuple[str, Member]]]] = []
    for member in members:
        # The sample's name includes dots of folders, but ends at the first dot of the file's name.
        folder, slash, name = member.name.rpartition("/")
        stem, dot, ending = name.partition(".")
        key = folder + slash + stem
        if not dot or is_hidden(name):
            continue
        # The members of a sample follow each other, as the format demands.
        if not samples or samples[-1][0] != key:
            samples.append((key, []))
        samples[-1][1].append((ending.lower(), member))
    return samples


def _image_and_label(
    where: str, group: Sequence[tuple[str, Member]]
) -> tuple[Member, tuple[str, Member]]:
    """Return the two members that make a sample, the label with its ending."""
    images = [member for ending, member in group if f".{ending}" in IMAGE_ENDINGS]
    if len(images) != 1:
        endings = ", ".join(escape(ending) for ending, _ in group[:ENDINGS_SHOWN])
        raise DataError(f"{where}: expected one image, got {len(images)} among {endings}")
    # The order of the endings decides, not the order of the members.
    labels = sorted(
        (part for part in group if part[0] in LABELS), key=lambda part: LABELS.index(part[0])
    )
    if not labels:
        raise DataError(f"{where}: no label; expected a member ending in .cls, .json or .txt")
    for size, most in ((images[0].size, LONGEST_IMAGE), (labels[0][1].size, LONGEST_LABEL)):
        if size > most:
            raise DataError(f"{where}: a member has {size:,} bytes; expected at most {most:,}")
    return images[0], labels[0]


def _class_name(file: BinaryIO, where: str, ending: str, label: Member) -> str:
    """Return the class in a label member: its text, or `label` of its JSON."""
    where = f"{where}: {escape(label.name)}"
    file.seek(label.offset)
    try:
        content: object = file.read(label.size).decode("utf-8").strip()
        if ending == "json":
            content = json.loads(str(content))
    except (ValueError, RecursionError) as error:
        raise DataError(f"{where}: cannot be read: {error}") from None
    if isinstance(content, dict):
        content = content.get("label")
    # JSON's true and false are no class names, although Python counts them as ints.
    if isinstance(content, bool) or not isinstance(content, str | int) or content == "":
        raise DataError(f"{where}: expected a class name or number, got {content!r}")
    return str(content)


# The members of a tar file, read from its headers; nothing is ever extracted.
#
# `tarfile.TarInfo` decodes each block that is a header. Finding the next header is done here:
# `tarfile.TarFile` ignores damaged records of long names, believes negative sizes, and takes a
# damaged header for the end of the tar, so that samples would be lost silently. Links, folders and
# devices are counted and ignored. After the block of zeros that ends the tar there may be nothing
# but zeros; anything else is an entry that would be lost.

LONGEST_EXTENSION = 1 << 20
"""Bytes of the longest extended header, which holds names and attributes of the next entry."""
READ_AT_ONCE = 1 << 20
"""Bytes after the end of the tar that are read at once."""
GNU_NAMES = {tarfile.GNUTYPE_LONGNAME: "path", tarfile.GNUTYPE_LONGLINK: "linkpath"}
"""Types of entries that hold one name of the next entry, and its key in pax headers."""
EXTENSIONS = (*GNU_NAMES, tarfile.XHDTYPE, tarfile.XGLTYPE, tarfile.SOLARIS_XHDTYPE)
PLAIN_FILES = (tarfile.REGTYPE, tarfile.AREGTYPE, tarfile.CONTTYPE)
EMPTY_KINDS = {
    tarfile.LNKTYPE: "hard links",
    tarfile.SYMTYPE: "symbolic links",
    tarfile.CHRTYPE: "devices",
    tarfile.BLKTYPE: "devices",
    tarfile.DIRTYPE: "folders",
    tarfile.FIFOTYPE: "FIFOs",
}
"""Types of entries without contents, whatever size their header states."""
RECORD = re.compile(rb"([0-9]{1,7}) ([^=]+)=")
"""Start of a pax record, `<length> <key>=<value>\\n`; the length counts the whole record."""
POSIX_MAGIC = b"ustar\0"
COMPRESSED = b"\x1f\x8b"


class Member(NamedTuple):
    """A file inside a tar."""

    name: str
    offset: int
    """Offset of its first byte in the tar."""
    size: int
    """Size in bytes."""


def read_members(file: BinaryIO, where: str) -> tuple[list[Member], Counter[str]]:
    """Return the files in an uncompressed tar, in order, and counts of other entries by kind.

    Args:
        file: the tar, open; only headers are read.
        where: its name for messages.

    Raises:
        DataError: not a tar, compressed, damaged, shorter than its headers claim, with sparse
            files, or with more after its end than zeros.
        OSError: it cannot be read.
    """
    if file.read(len(COMPRESSED)) == COMPRESSED:
        raise DataError(f"{where}: compressed; expected a plain tar: run gunzip on it")
    members: list[Member] = []
    ignored = Counter[str]()
    length = os.fstat(file.fileno()).st_size
    shared: dict[str, str] = {}  # pax headers for all following entries
    own: dict[str, str] = {}  # pax headers for the next entry only
    offset = 0
    try:
        while (header := _read_header(file, offset)) is not None:
            is_extension = header.type in EXTENSIONS
            records = {} if is_extension else shared | own
            start = offset + tarfile.BLOCKSIZE
            size = _content_size(header, records)
            left = max(length - start, 0)
            if size > left:
                raise tarfile.HeaderError(
                    f"the entry claims {size:,} bytes, but only {left:,} follow"
                )
            if header.type == tarfile.XGLTYPE:
                shared |= _read_extension(file, start, header)
            elif is_extension:
                own |= _read_extension(file, start, header)
            else:
                own = {}
                if header.type in PLAIN_FILES:
                    members.append(Member(records.get("path") or header.name, start, size))
                else:
                    ignored[EMPTY_KINDS.get(header.type, "other entries")] += 1
            # contents are padded to whole blocks
            offset = start + -(-size // tarfile.BLOCKSIZE) * tarfile.BLOCKSIZE
        if own:
            raise tarfile.HeaderError("no entry after an extended header")
        _check_end(file, offset)
    except tarfile.HeaderError as error:
        place = f"damaged at byte {offset:,}" if offset else "not a tar file, or a damaged one"
        raise DataError(f"{where}: {place}: {error}") from None
    return members, ignored


def _read_header(file: BinaryIO, offset: int) -> tarfile.TarInfo | None:
    """Return the header at an offset; None for zeros, and at the end of the file.

    Raises:
        tarfile.HeaderError: no header, or one whose checksum is wrong.
    """
    file.seek(offset)
    block = file.read(tarfile.BLOCKSIZE)
    if not any(block):
        return None
    header = tarfile.TarInfo.frombuf(block, "utf-8", "backslashreplace")
    # where POSIX has the first part of a long name, GNU tar may have the time of access
    if not block.startswith(POSIX_MAGIC, 257):
        header.name = _text(block[:100].partition(b"\0")[0])
    return header


def _content_size(header: tarfile.TarInfo, records: Mapping[str, str]) -> int:
    """Return the number of bytes of an entry's contents."""
    if header.type == tarfile.GNUTYPE_SPARSE or any(
        key.startswith("GNU.sparse") for key in records
    ):
        raise tarfile.HeaderError("a sparse file; write the tar without --sparse")
    if header.type in EMPTY_KINDS:
        return 0
    if stated := records.get("size"):
        # a file has at most 2**63 bytes: 19 digits
        if not re.fullmatch(r"[0-9]{1,19}", stated):
            raise tarfile.HeaderError(f"no size, {stated[:40]!r}")
        return int(stated)
    if header.size < 0:
        raise tarfile.HeaderError(f"a size of {header.size} bytes")
    return header.size


def _read_extension(file: BinaryIO, start: int, header: tarfile.TarInfo) -> dict[str, str]:
    """Return the records of an extended header, such as a name of more than 100 bytes.

    Raises:
        tarfile.HeaderError: too long, or damaged; no checksum covers it.
    """
    if header.size > LONGEST_EXTENSION:
        raise tarfile.HeaderError(
            f"an extended header of {header.size:,} bytes; {LONGEST_EXTENSION:,} are the most"
        )
    file.seek(start)
    content = file.read(header.size)
    if header.type in GNU_NAMES:
        name = content.rstrip(b"\0")
        records = {GNU_NAMES[header.type]: _text(name)}
        is_whole = name and b"\0" not in name
    else:
        records = _pax_records(content)
        is_whole = "\0" not in records.get("path", "")
    # the name in the header is truncated, without its extension
    if not is_whole:
        raise tarfile.HeaderError("a name that is empty or contains a zero byte")
    return records


def _pax_records(content: bytes) -> dict[str, str]:
    records = {}
    position = 0
    while position < len(content):
        start = RECORD.match(content, position)
        end = position + int(start[1]) if start else 0
        # past the end of the contents the slice is empty
        if start is None or start.end() >= end or content[end - 1 : end] != b"\n":
            raise tarfile.HeaderError(f"no pax record, {content[position : position + 40]!r}")
        records[_text(start[2])] = _text(content[start.end() : end - 1])
        position = end
    return records


def _text(content: bytes) -> str:
    return content.decode("utf-8", "backslashreplace")


def _check_end(file: BinaryIO, end: int) -> None:
    """Refuse a tar without a block of zeros at byte `end`, or with more than zeros after it."""
    file.seek(end)
    if len(file.read(tarfile.BLOCKSIZE)) < tarfile.BLOCKSIZE:
        raise tarfile.HeaderError("no empty block closes the tar; the file is truncated")
    while content := file.read(READ_AT_ONCE):
        rest = content.lstrip(b"\0")
        if rest:
            place = file.tell() - len(rest)
            raise tarfile.HeaderError(
                f"zeros, but there is more at byte {place:,}; if files were joined by cat, join "
                "them by tar --concatenate; else a header was lost: write the file again"
            )


# File names of shards: `train-{0000..0099}.tar` and wildcards, and the split in a name.

MOST_SHARDS = 100_000
SPLIT = re.compile(rf"(?:^|[-_.])({'|'.join(SPLIT_WORDS)})(?=[-_.])", re.IGNORECASE)
"""A split in the name of a file, such as `train` in `flowers-train-0001.tar`."""
RANGE = re.compile(r"([0-9]{1,18})\.\.([0-9]{1,18})")
WILDCARDS = frozenset("*?[")


def find_shards(pattern: str) -> list[Path]:
    """Return the files that a pattern means, in order.

    Args:
        pattern: a path with `{first..last}`, `{one,other}` or the wildcards `*`, `?` and `[...]`.

    Raises:
        DataError: none, or one of a `{first..last}` that is not there.
    """
    shards: list[Path] = []
    folder, rest = _literal_folder(Path(os.path.expanduser(pattern)))
    for text in expand(rest):
        path = folder / text
        # A file whose name has a wildcard in it is meant literally.
        has_wildcard = WILDCARDS & set(text) and not path.is_file()
        shards += (sorted(folder.glob(text)) if has_wildcard else []) or [path]
    missing = [shard for shard in shards if not shard.is_file()]
    if not missing:
        return shards
    first = escape(missing[0])
    if missing[0].is_dir():
        raise DataError(f"{first} is a folder; name the shards in it, such as wds:{first}/*.tar")
    count = ""
    if len(shards) > 1:
        count = f", and {len(missing):,} of {len(shards):,} shards are not there"
    raise DataError(f"{first}: no such file{count}; {nearest_parent(missing[0])}")


def expand(pattern: str) -> list[str]:
    """Return the pattern with every `{...}` replaced by each of its alternatives, in order.

    >>> expand("{a,b}-{08..10}.tar")[:4]
    ['a-08.tar', 'a-09.tar', 'a-10.tar', 'b-08.tar']

    Raises:
        DataError: more than `MOST_SHARDS`, or a range that runs backwards.
    """
    # One more than the limit shows that there are too many.
    texts = list(itertools.islice(_expand(pattern), MOST_SHARDS + 1))
    if len(texts) > MOST_SHARDS:
        raise DataError(f"{escape(pattern)}: more than {MOST_SHARDS:,} shards")
    return texts


def _expand(pattern: str) -> Iterator[str]:
    # The edges of the first alternatives: the braces, and the commas that are in no inner braces.
    depth, edges = 0, []
    for index, letter in enumerate(pattern):
        depth += letter == "{"
        if depth == 1 and letter in "{,}":
            edges.append(index)
        depth -= letter == "}" and depth > 0
        if edges and depth == 0:
            break
    else:
        yield pattern
        return
    for alternative in _alternatives(pattern, edges):
        for rest in _expand(pattern[edges[-1] + 1 :]):
            yield pattern[: edges[0]] + alternative + rest


def _alternatives(pattern: str, edges: Sequence[int]) -> Iterator[str]:
    """Generate the alternatives between two edges of `{first..last}` or `{one,other}`."""
    inside = pattern[edges[0] + 1 : edges[-1]]
    numbers = RANGE.fullmatch(inside)
    if numbers is None:
        for start, end in itertools.pairwise(edges):
            yield from _expand(pattern[start + 1 : end])
        return
    first, last = int(numbers[1]), int(numbers[2])
    if first > last:
        raise DataError(
            f"{{{inside}}} names no shard; the first number comes first: "
            f"{{{numbers[2]}..{numbers[1]}}}"
        )
    # Leading zeros of the first number give the width of all.
    width = len(numbers[1]) if numbers[1].startswith("0") else 0
    for number in range(first, last + 1):
        yield str(number).zfill(width)


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


def _literal_folder(pattern: Path) -> tuple[Path, str]:
    """Return the longest beginning of a pattern that is a folder, and the rest.

    The name of a folder may hold braces and wildcards; they are meant literally.
    """
    folder = Path(pattern.anchor)
    parts = [*pattern.relative_to(pattern.anchor).parts]
    # Otherwise a folder called "data[1]" could not be opened.
    while len(parts) > 1 and (folder / parts[0]).is_dir():
        folder /= parts.pop(0)
    return folder, os.path.join(*parts) if parts else ""
