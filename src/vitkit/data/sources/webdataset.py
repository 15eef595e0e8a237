"""WebDataset shards: tar files in which a sample is a run of members of one name.

`dir/000017.jpg` and `dir/000017.cls` are one sample, `dir/000017`. Each shard is indexed once and
every image hashed; after that images are read by their offset, in any order, like files of a
folder.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import re
import tarfile
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import BinaryIO

import numpy as np
from jaxtyping import Int64

from vitkit.data.datasets.build import NamedImages, assemble
from vitkit.data.datasets.dataset import Dataset, Store, StoredSplit
from vitkit.data.datasets.splitting import is_hidden
from vitkit.data.images.integrity import IMAGE_ENDINGS
from vitkit.data.sources.shard_patterns import files_by_split, find_shards, name_of
from vitkit.errors import DataError, ImageError
from vitkit.io.caches import Index, cached_index, file_stamp
from vitkit.messages import escape

# An index of a tar file, read from its headers; nothing is ever extracted.
#
# `tarfile.TarInfo` decodes each block that is a header. Finding the next header is done here:
# `tarfile.TarFile` ignores damaged records of long names, believes negative sizes, and takes a
# damaged header for the end of the tar, so that samples would be lost silently. Links, folders,
# devices and sparse files are counted and ignored. After the block of zeros that ends the tar there
# may be nothing but zeros; anything else is an entry that would be lost.

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
MAP_IN_HEADER, MAP_IN_BLOCK = 482, 504
"""Bytes that say if another block of a GNU sparse file's map follows the header, or a block."""
COMPRESSED = b"\x1f\x8b"


@dataclass(frozen=True)
class Member:
    """A file inside a tar."""

    name: str
    offset: int
    """Offset of its first byte in the tar."""
    size: int
    """Size in bytes."""


@dataclass
class Members:
    """All files inside a tar, in their order, and counts of its other entries by kind."""

    files: list[Member] = field(default_factory=list)
    ignored: Counter[str] = field(default_factory=Counter)


def read_members(file: BinaryIO, where: str) -> Members:
    """Return the files in an uncompressed tar; only headers are read.

    Args:
        file: the tar, open.
        where: its name for messages.

    Raises:
        DataError: not a tar, compressed, damaged, shorter than its headers claim, or with more
            after its end than zeros.
        OSError: it cannot be read.
    """
    if file.read(len(COMPRESSED)) == COMPRESSED:
        raise DataError(f"{where}: compressed; expected a plain tar: run gunzip on it")
    members = Members()
    length = os.fstat(file.fileno()).st_size
    shared: dict[str, str] = {}  # pax headers for all following entries
    own: dict[str, str] = {}  # pax headers for the next entry only
    offset = 0
    try:
        while (header := _read_header(file, offset)) is not None:
            is_extension = header.type in EXTENSIONS
            records = {} if is_extension else shared | own
            start = _content_offset(file, offset, header)
            size = _content_size(header, records)
            left = max(length - start, 0)
            if size > left:
                raise DataError(
                    f"{where}: the entry at byte {offset:,} claims {size:,} bytes, but only "
                    f"{left:,} follow; the file is truncated or damaged"
                )
            if header.type == tarfile.XGLTYPE:
                shared |= _read_extension(file, start, header)
            elif is_extension:
                own |= _read_extension(file, start, header)
            else:
                _add_entry(members, header, records, Member(_name(header, records), start, size))
                own = {}
            # contents are padded to whole blocks
            offset = start + -(-size // tarfile.BLOCKSIZE) * tarfile.BLOCKSIZE
        if own:
            raise tarfile.HeaderError("no entry after an extended header")
    except tarfile.HeaderError as error:
        place = (
            f"damaged at byte {offset:,}" if offset else "not a tar file, or a damaged one (byte 0)"
        )
        raise DataError(f"{where}: {place}: {error}") from None
    _check_end(file, where, offset)
    return members


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


def _content_offset(file: BinaryIO, offset: int, header: tarfile.TarInfo) -> int:
    """Return the offset of an entry's contents: after its header, and the map of a sparse file."""
    start = offset + tarfile.BLOCKSIZE
    flag = offset + MAP_IN_HEADER
    while header.type == tarfile.GNUTYPE_SPARSE:
        file.seek(flag)
        if file.read(1) in (b"", b"\0"):
            break
        flag = start + MAP_IN_BLOCK
        start += tarfile.BLOCKSIZE
    return start


def _content_size(header: tarfile.TarInfo, records: Mapping[str, str]) -> int:
    """Return the number of bytes of an entry's contents."""
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


def _name(header: tarfile.TarInfo, records: Mapping[str, str]) -> str:
    return records.get("path") or header.name


def _add_entry(
    members: Members, header: tarfile.TarInfo, records: Mapping[str, str], member: Member
) -> None:
    """Add a plain file to the members; count an entry of another kind."""
    is_sparse = header.type == tarfile.GNUTYPE_SPARSE or any(
        key.startswith("GNU.sparse") for key in records
    )
    if is_sparse:
        members.ignored["sparse files"] += 1
    elif header.type in PLAIN_FILES:
        members.files.append(member)
    else:
        members.ignored[EMPTY_KINDS.get(header.type, "other entries")] += 1


def _text(content: bytes) -> str:
    return content.decode("utf-8", "backslashreplace")


def _check_end(file: BinaryIO, where: str, end: int) -> None:
    """Refuse a tar without a block of zeros at byte `end`, or with more than zeros after it."""
    file.seek(end)
    if len(file.read(tarfile.BLOCKSIZE)) < tarfile.BLOCKSIZE:
        raise DataError(
            f"{where}: ends without the empty block that closes a tar; the file is truncated"
        )
    while content := file.read(READ_AT_ONCE):
        rest = content.lstrip(b"\0")
        if rest:
            position = file.tell() - len(rest)
            raise DataError(
                f"{where}: the tar ends with a block of zeros at byte {end:,}, but there is more "
                f"at byte {position:,}; either the header at byte {end:,} was lost: write the file "
                f"again; or files were joined by cat: join them by tar --concatenate instead"
            )


WEBDATASET_PREFIX = "wds:"
LABELS = ("cls", "json", "txt")
"""Endings of the label's member, in order of preference."""
LONGEST_LABEL = 1 << 20
LONGEST_IMAGE = 1 << 30
"""Bytes of the longest member that is read, more than any decodable image has."""
ENDINGS_SHOWN = 8


def open_webdataset(address: str, *, ignore_extra_classes: bool = False) -> Dataset:
    """Open local shards, such as `wds:shards/train-{0000..0099}.tar` or `wds:shards/*.tar`.

    Shards with train, val or test in their names are those splits; a set without such names is cut
    70/10/20.

    Args:
        address: `wds:` and a path with `{first..last}`, `{one,other}` or the wildcards * and ?.
        ignore_extra_classes: leave out classes of val and test that train lacks.

    Raises:
        DataError: shards that are missing or damaged, samples without image or label, by name;
            and the errors of `assemble`.
    """
    pattern = address.removeprefix(WEBDATASET_PREFIX)
    shards = find_shards(pattern)
    indexes = [cached_index(shard, "webdataset", index_shard) for shard in shards]
    where = escape(address)
    parts = {}
    for split, chosen in files_by_split([shard.name for shard in shards], where).items():
        paths = tuple(shards[i] for i in chosen)
        # Size and mtime are recorded now: a shard replaced during the run is refused, not misread.
        store = partial(TarStore, paths, tuple(map(file_stamp, paths)))
        parts[split] = part_of([indexes[i] for i in chosen], store)
    return assemble(
        name_of(pattern) or escape(shards[0].absolute().parent.name) or "shards",
        where,
        parts,
        ignore_extra_classes=ignore_extra_classes,
        notes=ignored_members(indexes),
    )


def index_shard(path: Path) -> Index:
    """Return the offset and SHA-256 of each image of a shard, and its class.

    Raises:
        DataError: a sample without image or label, or with two images.
    """
    try:
        with path.open("rb") as file:
            return index_file(file, escape(path))
    except OSError as error:
        raise DataError(f"{escape(path)}: cannot be read: {error.strerror}") from None


def index_file(file: BinaryIO, where: str) -> Index:
    """Index an open shard as `index_shard` does.

    Args:
        file: the tar, open.
        where: its name for messages.
    """
    members = read_members(file, where)
    keys: list[str] = []
    labels: list[str] = []
    places: list[tuple[int, int]] = []
    digests: list[bytes] = []
    # The members of a sample follow each other, as the format demands.
    for key, group in itertools.groupby(filter(_is_part_of_sample, members.files), _key):
        image, label = _image_and_label(where, key, list(group))
        keys.append(key)
        labels.append(_class_name(file, where, label))
        places.append((image.offset, image.size))
        file.seek(image.offset)
        digests.append(hashlib.sha256(file.read(image.size)).digest())
    arrays: dict[str, np.ndarray] = {
        "places": np.array(places, np.int64).reshape(-1, 2),
        "digests": np.frombuffer(b"".join(digests), np.uint8).reshape(-1, 32),
    }
    ignored = [f"{count:,} {kind}" for kind, count in members.ignored.items()]
    return Index(arrays, {"keys": keys, "labels": labels, "passed over": ignored})


@dataclass(frozen=True, eq=False)
class TarStore(Store):
    """Images in local tar files, read by their offset."""

    paths: tuple[Path, ...]
    stamps: tuple[tuple[int, int], ...]
    """Each shard's size and time of change when it was indexed."""
    keys: tuple[str, ...]
    """Each image's name in its shard."""
    shard: Int64[np.ndarray, " N"]
    """Each image's shard (N,)."""
    places: Int64[np.ndarray, "N 2"]
    """Each image's offset and size in bytes (N, 2)."""

    def name(self, number: int) -> str:
        return f"{self.paths[self.shard[number]].name}/{self.keys[number]}"

    def encoded(self, number: int) -> bytes:
        offset, size = self.places[number].tolist()
        shard = int(self.shard[number])
        try:
            # Opened for each image: it takes microseconds, and no file is shared between threads.
            with self.paths[shard].open("rb", buffering=0) as file:
                if file_stamp(file.fileno()) != self.stamps[shard]:
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


def part_of(indexes: Sequence[Index], store: Callable[..., Store]) -> NamedImages:
    """Return the images of these shards.

    Args:
        indexes: indexes of the shards, in order.
        store: called with the images' keys, shards (N,) and offsets and sizes (N, 2).
    """
    counts: list[int] = []
    keys: list[str] = []
    labels: list[str] = []
    digests: list[bytes] = []
    for index in indexes:
        counts.append(len(index.texts["keys"]))
        keys += index.texts["keys"]
        labels += index.texts["labels"]
        digests += map(bytes, index.arrays["digests"])
    places = np.concatenate([index.arrays["places"] for index in indexes])
    shards = np.repeat(np.arange(len(indexes)), counts)
    # The labels are numbered by `assemble`, when the classes of all shards are known.
    images = StoredSplit(
        store(tuple(keys), shards, places), np.zeros(len(places), np.int64), np.arange(len(places))
    )
    return NamedImages(images, labels, digests)


def ignored_members(indexes: Sequence[Index]) -> list[str]:
    """Return a line on the members of the shards that are not read, if there are any."""
    totals = Counter[str]()
    for index in indexes:
        for line in index.texts["passed over"]:
            count, _, kind = line.partition(" ")
            totals[kind] += int(count.replace(",", ""))
    del totals["folders"]  # every tar of a folder has folder entries
    if not totals:
        return []
    listed = ", ".join(f"{count:,} {kind}" for kind, count in totals.items())
    return [f"skipped in the shards: {listed}"]


def _is_part_of_sample(member: Member) -> bool:
    """Return True if a member has an ending and is not a hidden file."""
    name = member.name.rpartition("/")[2]
    return "." in name and not is_hidden(name)


def _key(member: Member) -> str:
    """Return the sample's name: all before the first dot of the file's own name."""
    # The sample's name includes dots of folder names, but ends at the first dot of the file name.
    folder, slash, name = member.name.rpartition("/")
    return folder + slash + name.partition(".")[0]


def _ending(member: Member) -> str:
    return member.name.rpartition("/")[2].partition(".")[2].lower()


def _image_and_label(where: str, key: str, group: Sequence[Member]) -> tuple[Member, Member]:
    """Return the two members that make a sample."""
    where = f"{where}: sample {escape(key)!r}"
    images = [member for member in group if f".{_ending(member)}" in IMAGE_ENDINGS]
    if len(images) != 1:
        endings = ", ".join(escape(_ending(member)) for member in group[:ENDINGS_SHOWN])
        raise DataError(f"{where}: expected one image, got {len(images)} among {endings}")
    label = _label(group)
    if label is None:
        raise DataError(f"{where}: no label; expected a member ending in .cls, .json or .txt")
    for member, most in ((images[0], LONGEST_IMAGE), (label, LONGEST_LABEL)):
        if member.size > most:
            raise DataError(f"{where}: .{_ending(member)} has {member.size:,} bytes, too many")
    return images[0], label


def _label(group: Sequence[Member]) -> Member | None:
    """Return the first member with the first of `LABELS` that occurs."""
    # The order of the endings decides, not the order of the members.
    for ending in LABELS:
        for member in group:
            if _ending(member) == ending:
                return member
    return None


def _class_name(file: BinaryIO, where: str, label: Member) -> str:
    """Return the class in a label member: its text, or `label` of its JSON."""
    where = f"{where}: {escape(label.name)}"
    file.seek(label.offset)
    try:
        content: object = file.read(label.size).decode("utf-8").strip()
        if _ending(label) == "json":
            content = json.loads(str(content))
    except (ValueError, RecursionError) as error:
        raise DataError(f"{where}: cannot be read: {error}") from None
    if isinstance(content, dict):
        content = content.get("label")
    # JSON's true and false are no class names, although Python counts them as ints.
    if isinstance(content, bool) or not isinstance(content, str | int) or content == "":
        raise DataError(f"{where}: expected a class name or number, got {content!r}")
    return str(content)
