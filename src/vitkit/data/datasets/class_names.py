"""Class names: their order, and one map from name to number that all splits share."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterable, Mapping, Sequence

from vitkit.errors import DataError

_DIGITS = re.compile(r"([0-9]+)")
_NOT_CLASSES = {"__macosx", "@eadir"}
_MISSING = {"nan", "none", "null", "n/a", "<na>"}
"""What a program writes into a list where a label is missing, in lower case."""


def natural_order(names: Iterable[str]) -> tuple[str, ...]:
    """Names sorted with their numbers as numbers: "2" before "10", "img9" before "img10"."""
    return tuple(sorted(names, key=_natural_key))


def is_hidden(name: str) -> bool:
    """Whether a file or folder is some program's own: `.name`, `__MACOSX`, `@eaDir`."""
    return name.startswith(".") or name.casefold() in _NOT_CLASSES


def refuse_look_alikes(names: Iterable[str], where: str) -> None:
    """Refuse names that differ only in case or in how their letters are encoded.

    Some file systems take them for one and the same folder.

    Raises:
        DataError: two such names, or a name that is not valid Unicode.
    """
    seen: dict[str, str] = {}
    for name in sorted(set(names)):
        if not _is_unicode(name):
            raise DataError(f"{where}: class name {name!r} is not valid UTF-8; rename it")
        folded = unicodedata.normalize("NFC", unicodedata.normalize("NFC", name).casefold())
        if folded in seen:
            raise DataError(
                f"{where}: class names {seen[folded]!a} and {name!a} differ only in "
                f"case or Unicode form; merge or rename them"
            )
        seen[folded] = name


def doubtful_names(names: Iterable[str]) -> list[str]:
    """Say which class names are probably one class, or none: a line for each doubt.

    Compared are names without case, spaces, hyphens, underscores, invisible characters and leading
    zeros, with letters of other widths as usual ones.
    """
    alike: dict[str, list[str]] = {}
    missing = []
    for name in names:
        alike.setdefault(_plain(name), []).append(name)
        if name.casefold() in _MISSING:
            missing.append(name)
    lines = [
        f"class names {' and '.join(map(ascii, group))} look alike; merge them if they are one "
        f"class"
        for group in alike.values()
        if len(group) > 1
    ]
    return lines + [
        f"class {name!r} looks like a missing label; correct the list" for name in missing
    ]


def refuse_unknown(
    classes: tuple[str, ...], counts: Mapping[str, int], split: str, where: str
) -> None:
    """Refuse images of classes that training does not know.

    Args:
        classes: the names training knows.
        counts: how many images `split` has of each name.
        split: "val" or "test", for the message.
        where: the folder, for the message.

    Raises:
        DataError: listing the unknown classes.
    """
    extra = unknown(classes, counts)
    if extra:
        raise DataError(
            f"{where}: {split} has {len(extra)} classes that train lacks: {quote_list(extra)}; "
            f"rename or remove them, or pass --ignore-extra-classes"
        )


def unknown(classes: tuple[str, ...], counts: Mapping[str, int]) -> tuple[str, ...]:
    """The names with at least one image that are not among `classes`, in natural order."""
    known = {*classes}
    return natural_order(name for name, count in counts.items() if count and name not in known)


def notes_on_classes(split: str, classes: Sequence[str], counts: Mapping[str, int]) -> list[str]:
    """A line that names the classes without an image; none where all have one, or none has."""
    empty = [name for name in classes if not counts.get(name)]
    if not empty or len(empty) == len(classes):
        return []
    word = "class" if len(empty) == 1 else "classes"
    return [f"{split} has no images of {word} {quote_list(empty)}"]


def quote_list(names: Iterable[str], most: int = 8) -> str:
    """`"'a', 'b' and 3 more"`, for one line of a message."""
    names = list(names)
    more = len(names) - most
    return ", ".join(map(repr, names[:most])) + (f" and {more} more" if more > 0 else "")


def _natural_key(name: str) -> tuple[list[tuple[int, int, str]], str]:
    """Numbers are compared by length, then as text: `int` refuses more than 4,300 digits."""
    parts = [part for part in _DIGITS.split(name) if part]
    return [
        (0, len(digits := part.lstrip("0")), digits)
        if part.isdecimal() and part.isascii()
        else (1, 0, part)
        for part in parts
    ], name


def _plain(name: str) -> str:
    """A class name without what two people may write in different ways."""
    folded = unicodedata.normalize("NFKC", name).casefold()
    kept = "".join(
        c for c in folded if unicodedata.category(c) != "Cf" and not c.isspace() and c not in "-_"
    )
    return re.sub(r"(?<![0-9.])0+(?=[0-9])", "", kept) or name


def _is_unicode(name: str) -> bool:
    try:
        name.encode()
    except UnicodeEncodeError:
        return False
    return True
