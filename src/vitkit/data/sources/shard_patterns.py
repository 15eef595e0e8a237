"""File names of shards: `train-{0000..0099}.tar` and wildcards, and the split in a name."""

from __future__ import annotations

import itertools
import os
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

from vitkit.data.datasets.build import POOL
from vitkit.data.datasets.dataset import SPLIT_WORDS
from vitkit.errors import DataError
from vitkit.messages import escape, nearest_parent

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
        if not WILDCARDS & set(text) or path.is_file():
            shards.append(path)
            continue
        matches = sorted(folder.glob(text))
        if not matches:
            raise DataError(f"{escape(path)}: no such shards; {nearest_parent(path)}")
        shards += matches
    missing = [shard for shard in shards if not shard.is_file()]
    if missing:
        raise DataError(_about_missing(missing, len(shards)))
    return shards


def _about_missing(missing: Sequence[Path], total: int) -> str:
    """Return the message about missing shards, out of `total` named ones."""
    first = escape(missing[0])
    if missing[0].is_dir():
        return f"{first} is a folder; name the shards in it, such as wds:{first}/*.tar"
    count = "" if total == 1 else f", and {len(missing):,} of {total:,} shards are not there"
    return f"{first}: no such file{count}; {nearest_parent(missing[0])}"


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


def _expand(pattern: str) -> Iterator[str]:
    start, end = _find_braces(pattern)
    if end < 0:
        yield pattern
        return
    before = pattern[:start]
    after = pattern[end + 1 :]
    for alternative in _alternatives(pattern[start + 1 : end]):
        for rest in _expand(after):
            yield before + alternative + rest


def _find_braces(text: str) -> tuple[int, int]:
    """Return the indices of the first pair of braces, which may hold others; -1 for none."""
    opened: list[int] = []
    pairs: list[tuple[int, int]] = []
    for index, letter in enumerate(text):
        if letter == "{":
            opened.append(index)
        elif letter == "}" and opened:
            pairs.append((opened.pop(), index))
    return min(pairs, default=(-1, -1))


def _alternatives(inside: str) -> Iterator[str]:
    """Generate the alternatives of `first..last` or `one,other`; each may have braces again."""
    numbers = RANGE.fullmatch(inside)
    if numbers is None:
        for alternative in _split_at_commas(inside):
            yield from _expand(alternative)
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


def _split_at_commas(text: str) -> list[str]:
    """Split at the commas that are in no braces."""
    parts = [""]
    depth = 0
    for letter in text:
        depth += (letter == "{") - (letter == "}")
        if letter == "," and depth == 0:
            parts.append("")
        else:
            parts[-1] += letter
    return parts
