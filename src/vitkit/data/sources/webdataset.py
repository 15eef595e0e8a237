"""WebDataset shards: tar files in which a sample is a run of members of one name.

`dir/000017.jpg` and `dir/000017.cls` are one sample, `dir/000017`. Each shard is indexed once and
every image hashed; after that images are read by their place, in any order, like files of a
folder.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import BinaryIO

import numpy as np
from jaxtyping import Int64

from vitkit.data.datasets.build import POOL, Part, assemble
from vitkit.data.datasets.class_names import is_hidden
from vitkit.data.datasets.dataset import SPLIT_WORDS, Dataset, Store, StoredSplit
from vitkit.data.images.decode import escape
from vitkit.data.sources.image_folder import ENDINGS
from vitkit.data.sources.tar_index import Member, read_members
from vitkit.errors import DataError, ImageError, nearest_parent
from vitkit.io.index_cache import Index, cached_index, stamp

PREFIX = "wds:"
LABELS = ("cls", "json", "txt")
"""Endings of the member that holds the label; where there are several, the first of these."""
LONGEST_LABEL = 1 << 20
LONGEST_IMAGE = 1 << 30
"""Bytes of a member that is read at all; no image that is decoded has as many."""
MOST_SHARDS = 100_000
SPLIT = re.compile(rf"(?:^|[-_.])({'|'.join(SPLIT_WORDS)})(?=[-_.])", re.IGNORECASE)


def open_webdataset(address: str, *, ignore_extra_classes: bool = False) -> Dataset:
    """Open local shards, such as `wds:shards/train-{0000..0099}.tar` or `wds:shards/*.tar`.

    Shards with train, val or test in their names are those splits; a set without such names is cut
    70/10/20.

    Args:
        address: `wds:` and a path with `{first..last}`, `{one,other}` or the wildcards * and ?.
        ignore_extra_classes: leave out classes of val and test that train lacks.

    Raises:
        DataError: shards that are missing or damaged, samples without image or label, by name;
            and what `assemble` raises.
    """
    pattern = address.removeprefix(PREFIX)
    shards = find_shards(pattern)
    indexes = [cached_index(shard, "webdataset", index_shard) for shard in shards]
    where = escape(address)
    notes = notes_of(indexes)
    parts = {}
    for split, chosen in shards_by_split([shard.name for shard in shards], where).items():
        paths = tuple(shards[i] for i in chosen)
        stamps = tuple(stamp(path) for path in paths)
        parts[split] = part([indexes[i] for i in chosen], partial(TarStore, paths, stamps))
    return assemble(
        name_of(pattern) or escape(shards[0].absolute().parent.name) or "shards",
        where,
        parts,
        ignore_extra_classes=ignore_extra_classes,
        notes=notes,
    )


def find_shards(pattern: str) -> list[Path]:
    """The files that a pattern means, in order.

    Raises:
        DataError: none, or one of a `{first..last}` that is not there.
    """
    shards: list[Path] = []
    folder, rest = _literal_folder(Path(os.path.expanduser(pattern)))
    for text in expanded(rest):
        path = folder / text
        if set(text) & set("*?[") and not path.is_file():
            found = sorted(folder.glob(text))
            if not found:
                raise DataError(f"{escape(path)}: no such shards; {nearest_parent(path)}")
            shards += found
        else:
            shards.append(path)
    missing = [shard for shard in shards if not shard.is_file()]
    if missing:
        raise DataError(
            f"{escape(missing[0])}: no such file, and {len(missing):,} of {len(shards):,} "
            f"shards are not there; {nearest_parent(missing[0])}"
        )
    return shards


def _literal_folder(pattern: Path) -> tuple[Path, str]:
    """The longest beginning of a pattern that is a folder, whatever its name, and the rest."""
    folder, parts = Path(pattern.anchor), [*pattern.relative_to(pattern.anchor).parts]
    while len(parts) > 1 and (folder / parts[0]).is_dir():
        folder /= parts.pop(0)
    return folder, os.path.join(*parts) if parts else ""


def expanded(pattern: str) -> list[str]:
    """The pattern with every `{...}` replaced by each of what it lists, in order.

    Raises:
        DataError: more than `MOST_SHARDS`.
    """
    texts = list(itertools.islice(_expanded(pattern), MOST_SHARDS + 1))
    if len(texts) > MOST_SHARDS:
        raise DataError(f"{escape(pattern)}: more than {MOST_SHARDS:,} shards")
    return texts


def name_of(pattern: str) -> str:
    """What a set of shards is called: what their names begin with; empty where nothing does."""
    name = re.split(r"[{*?\[]", Path(pattern).name)[0]
    return escape(re.sub(r"[-_.]*$", "", name).removesuffix(".tar"))


def shards_by_split(names: Sequence[str], where: str) -> dict[str, list[int]]:
    """Split -> the places of its shards, told by their names; all in the pool where none tells.

    Raises:
        DataError: some names tell a split and others do not.
    """
    groups: dict[str, list[int]] = {}
    for place, name in enumerate(names):
        said = SPLIT.search(name)
        groups.setdefault(SPLIT_WORDS[said[1].lower()] if said else POOL, []).append(place)
    if POOL in groups and len(groups) > 1:
        raise DataError(
            f"{where}: {escape(names[groups[POOL][0]])} has none of train, val and test in its "
            f"name and others have; name all shards, or none, after their split"
        )
    return groups


def index_shard(path: Path) -> Index:
    """Where the images of a shard lie, their classes and SHA-256.

    Raises:
        DataError: a sample without image or label, or with two images.
    """
    try:
        with path.open("rb") as file:
            return index_file(file, escape(path))
    except OSError as error:
        raise DataError(f"{escape(path)}: cannot be read: {error.strerror}") from None


def index_file(file: BinaryIO, where: str) -> Index:
    """The same of an open file; `where` is what to call it in a message."""
    members = read_members(file, where)
    keys, labels, places, digests = [], [], [], []
    for key, group in itertools.groupby(filter(_counts, members.files), _key):
        image, label = _image_and_label(where, key, list(group))
        keys.append(key)
        labels.append(_class_name(file, where, label))
        places.append((image.offset, image.size))
        file.seek(image.offset)
        digests.append(hashlib.sha256(file.read(image.size)).digest())
    return Index(
        {
            "places": np.array(places, np.int64).reshape(-1, 2),
            "digests": np.frombuffer(b"".join(digests), np.uint8).reshape(-1, 32),
        },
        {
            "keys": keys,
            "labels": labels,
            "passed over": [f"{count:,} {kind}" for kind, count in members.passed_over.items()],
        },
    )


@dataclass(frozen=True, eq=False)
class TarStore:
    """Images in tar files, read by their place."""

    shards: tuple[Path, ...]
    stamps: tuple[tuple[int, int], ...]
    """Each shard's size and time of change when it was indexed."""
    keys: tuple[str, ...]
    """Each image's name in its shard."""
    shard: Int64[np.ndarray, " N"]
    """Each image's shard (N,)."""
    places: Int64[np.ndarray, "N 2"]
    """Each image's offset and size in bytes (N, 2)."""

    def name(self, number: int) -> str:
        return f"{self.shards[self.shard[number]].name}/{self.keys[number]}"

    def encoded(self, number: int) -> bytes:
        offset, size = self.places[number].tolist()
        shard = int(self.shard[number])
        try:
            # Opened for each image: that takes microseconds, and nothing has to be shared.
            with self.shards[shard].open("rb", buffering=0) as file:
                if stamp(file.fileno()) != self.stamps[shard]:
                    raise ImageError(
                        self.name(number), "missing", "the shard was changed after it was opened"
                    )
                content = os.pread(file.fileno(), size, offset)
        except OSError as error:
            raise ImageError(self.name(number), "missing", str(error.strerror)) from error
        if not content:
            raise ImageError(self.name(number), "empty", "expected an image, got 0 bytes")
        return content


def part(indexes: Sequence[Index], store: Callable[..., Store]) -> Part:
    """The images of some shards; `store` takes their keys, shards (N,) and places (N, 2)."""
    counts = [len(index.texts["keys"]) for index in indexes]
    places = np.concatenate([index.arrays["places"] for index in indexes])
    keys = tuple(key for index in indexes for key in index.texts["keys"])
    made = store(keys, np.repeat(np.arange(len(indexes)), counts), places)
    images = StoredSplit(made, np.zeros(len(places), np.int64), np.arange(len(places)))
    labels = [label for index in indexes for label in index.texts["labels"]]
    digests = [row.tobytes() for index in indexes for row in index.arrays["digests"]]
    return Part(images, labels, digests)


def notes_of(indexes: Sequence[Index]) -> list[str]:
    """What the user should know of the shards, a line each."""
    passed = Counter[str]()
    for index in indexes:
        for line in index.texts["passed over"]:
            count, _, kind = line.partition(" ")
            passed[kind] += int(count)
    listed = ", ".join(f"{count:,} {kind}" for kind, count in passed.items() if kind != "folders")
    return [f"passed over in the shards: {listed}"] if listed else []


def _counts(member: Member) -> bool:
    """Whether a member belongs to a sample: it has an ending and is no program's own file."""
    name = member.name.rpartition("/")[2]
    return "." in name and not is_hidden(name)


def _key(member: Member) -> str:
    """The sample's name: all before the first dot of the file's own name."""
    folder, slash, name = member.name.rpartition("/")
    return folder + slash + name.partition(".")[0]


def _ending(member: Member) -> str:
    return member.name.rpartition("/")[2].partition(".")[2].lower()


def _image_and_label(where: str, key: str, group: Sequence[Member]) -> tuple[Member, Member]:
    """The two members that make a sample."""
    where = f"{where}: sample {escape(key)!r}"
    images = [member for member in group if f".{_ending(member)}" in ENDINGS]
    if len(images) != 1:
        endings = ", ".join(escape(_ending(member)) for member in group[:8])
        raise DataError(f"{where}: expected one image, got {len(images)} among {endings}")
    by_ending = {_ending(member): member for member in reversed(group)}
    label = next((by_ending[ending] for ending in LABELS if ending in by_ending), None)
    if label is None:
        raise DataError(f"{where}: no label; expected a member ending in .cls, .json or .txt")
    for member, most in ((images[0], LONGEST_IMAGE), (label, LONGEST_LABEL)):
        if member.size > most:
            raise DataError(f"{where}: .{_ending(member)} has {member.size:,} bytes, too many")
    return images[0], label


def _class_name(file: BinaryIO, where: str, label: Member) -> str:
    """The class a label member names: its text, or `label` of its JSON."""
    where = f"{where}: {escape(label.name)}"
    file.seek(label.offset)
    try:
        said: object = file.read(label.size).decode("utf-8").strip()
        if _ending(label) == "json":
            said = json.loads(str(said))
    except (ValueError, RecursionError) as error:
        raise DataError(f"{where}: cannot be read: {error}") from None
    if isinstance(said, dict):
        said = said.get("label")
    if isinstance(said, bool) or not isinstance(said, str | int) or said == "":
        raise DataError(f"{where}: expected a class name or number, got {said!r}")
    return str(said)


def _expanded(pattern: str) -> Iterator[str]:
    start, end = _braces(pattern)
    if end < 0:
        yield pattern
        return
    before, after = pattern[:start], pattern[end + 1 :]
    for one in _listed(pattern[start + 1 : end]):
        yield from (before + one + rest for rest in _expanded(after))


def _braces(text: str) -> tuple[int, int]:
    """Where the first pair of braces begins and ends, which may hold others; -1 for none."""
    opened: list[int] = []
    pairs: list[tuple[int, int]] = []
    for place, letter in enumerate(text):
        if letter == "{":
            opened.append(place)
        elif letter == "}" and opened:
            pairs.append((opened.pop(), place))
    return min(pairs, default=(-1, -1))


def _listed(inside: str) -> Iterator[str]:
    """What `first..last` or `one,other` between braces stands for; each may have braces again."""
    numbers = re.fullmatch(r"([0-9]{1,18})\.\.([0-9]{1,18})", inside)
    if numbers is None:
        for part in _split(inside):
            yield from _expanded(part)
        return
    if int(numbers[1]) > int(numbers[2]):
        raise DataError(
            f"{{{inside}}} stands for no shard; the first number comes first: "
            f"{{{numbers[2]}..{numbers[1]}}}"
        )
    width = len(numbers[1]) if numbers[1].startswith("0") else 0
    for number in range(int(numbers[1]), int(numbers[2]) + 1):
        yield str(number).zfill(width)


def _split(inside: str) -> list[str]:
    """Split at the commas that are in no braces."""
    parts, depth = [""], 0
    for letter in inside:
        depth += (letter == "{") - (letter == "}")
        if letter == "," and depth == 0:
            parts.append("")
        else:
            parts[-1] += letter
    return parts
