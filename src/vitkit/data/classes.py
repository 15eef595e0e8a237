"""Class names: their order, and one map from name to number that all splits share."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterable, Mapping, Sequence

from vitkit.errors import DataError

_DIGITS = re.compile(r"([0-9]+)")
_NOT_CLASSES = {"__macosx"}


def natural_order(names: Iterable[str]) -> tuple[str, ...]:
    """Names sorted with their numbers as numbers: "2" before "10", "img9" before "img10"."""
    return tuple(sorted(names, key=_natural_key))


def is_hidden(name: str) -> bool:
    """Whether a file or folder is some program's own: `.name`, `__MACOSX`."""
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


def refuse_unknown(
    classes: tuple[str, ...], counts: Mapping[str, int], split: str, where: str
) -> None:
    """Refuse pictures of classes that training does not know.

    Args:
        classes: the names training knows.
        counts: how many pictures `split` has of each name.
        split: "val" or "test", for the message.
        where: the folder, for the message.

    Raises:
        DataError: listing the unknown classes.
    """
    extra = unknown(classes, counts)
    if extra:
        raise DataError(
            f"{where}: {split} has {len(extra)} classes that train lacks: {listed(extra)}; "
            f"rename or remove them, or pass --ignore-extra-classes"
        )


def unknown(classes: tuple[str, ...], counts: Mapping[str, int]) -> tuple[str, ...]:
    """The names with at least one picture that are not among `classes`, in natural order."""
    return natural_order(name for name, count in counts.items() if count and name not in classes)


def notes_on_classes(split: str, classes: Sequence[str], counts: Mapping[str, int]) -> list[str]:
    """A line that names the classes without a picture; none where all have one, or none has."""
    empty = [name for name in classes if not counts.get(name)]
    if not empty or len(empty) == len(classes):
        return []
    word = "class" if len(empty) == 1 else "classes"
    return [f"{split} has no pictures of {word} {listed(empty)}"]


def listed(names: Iterable[str], most: int = 8) -> str:
    """`"'a', 'b' and 3 more"`, for one line of a message."""
    names = list(names)
    more = len(names) - most
    return ", ".join(map(repr, names[:most])) + (f" and {more} more" if more > 0 else "")


def _natural_key(name: str) -> tuple[list[tuple[int, int, str]], str]:
    parts = [part for part in _DIGITS.split(name) if part]
    return [
        (0, int(part), "") if part.isdecimal() and part.isascii() else (1, 0, part)
        for part in parts
    ], name


def _is_unicode(name: str) -> bool:
    try:
        name.encode()
    except UnicodeEncodeError:
        return False
    return True
