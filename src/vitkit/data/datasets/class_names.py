"""Class names: their order, matching them by name, and names that are doubtful."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from vitkit.errors import DataError
from vitkit.messages import plural, quote_list

_DIGITS = re.compile(r"([0-9]+)")
_NOT_CLASSES = {"__macosx", "@eadir"}
_MISSING = {"nan", "none", "null", "n/a", "<na>"}
"""Text that programs write into a list where a label is missing, in lower case."""


@dataclass(frozen=True)
class ClassMatch:
    """Class names looked up in a list of known ones, such as those of train or of a head."""

    indices: tuple[int, ...]
    """First index in the known list of each name that it has, in the order of the names."""
    unknown: tuple[str, ...]
    """The names that it lacks, in their order."""
    unused: tuple[str, ...]
    """The known names that are not looked up, in their order."""
    ambiguous: tuple[str, ...] = ()
    """The names that the known list has several times, in their order; callers refuse them."""


def match_classes(names: Iterable[str], known: Sequence[str]) -> ClassMatch:
    """Match classes by name.

    Args:
        names: the classes to look up, each once.
        known: the classes to look them up in.

    >>> match_classes(["dog", "bird"], ["cat", "dog"])
    ClassMatch(indices=(1,), unknown=('bird',), unused=('cat',), ambiguous=())
    """
    position: dict[str, int] = {}
    repeated = set()
    for index, name in enumerate(known):
        if name in position:
            repeated.add(name)
        else:
            position[name] = index
    indices: list[int] = []
    unknown: list[str] = []
    wanted = dict.fromkeys(names)
    for name in wanted:
        if name in position:
            indices.append(position[name])
        else:
            unknown.append(name)
    unused = tuple(name for name in position if name not in wanted)
    ambiguous = tuple(name for name in wanted if name in repeated)
    return ClassMatch(tuple(indices), tuple(unknown), unused, ambiguous)


def natural_order(names: Iterable[str]) -> tuple[str, ...]:
    """Sort names with their numbers as numbers: "2" before "10", "img9" before "img10"."""
    return tuple(sorted(names, key=_natural_key))


def is_hidden(name: str) -> bool:
    """Return True for a file or folder that a program made: `.name`, `__MACOSX`, `@eaDir`."""
    return name.startswith(".") or name.casefold() in _NOT_CLASSES


def refuse_look_alikes(names: Iterable[str], where: str) -> None:
    """Refuse names that differ only in case or in how their letters are encoded.

    Some file systems take them for one and the same folder.

    Raises:
        DataError: two such names, or a name that is not valid Unicode.
    """
    seen: dict[str, str] = {}
    for name in sorted(set(names)):  # sorted, so that the message is always the same
        if not _is_unicode(name):
            raise DataError(f"{where}: class name {name!r} is not valid UTF-8; rename it")
        # Case folding may undo a normal form, so the name is normalised before and after.
        folded = unicodedata.normalize("NFC", unicodedata.normalize("NFC", name).casefold())
        if folded in seen:
            raise DataError(
                f"{where}: class names {seen[folded]!a} and {name!a} differ only in "
                f"case or Unicode form; merge or rename them"
            )
        seen[folded] = name


def doubtful_names(names: Iterable[str]) -> list[str]:
    """Return a line for each doubt: class names that are probably one class, or no class.

    Compared are names without case, spaces, hyphens, underscores, invisible characters and leading
    zeros, with letters of other widths as usual ones.
    """
    alike: dict[str, list[str]] = {}
    missing = []
    for name in names:
        alike.setdefault(_plain(name), []).append(name)
        if name.casefold() in _MISSING:
            missing.append(name)
    lines = []
    for group in alike.values():
        if len(group) > 1:
            lines.append(
                f"class names {' and '.join(map(ascii, group))} look alike; merge them if they are "
                f"one class"
            )
    for name in missing:
        lines.append(f"class {name!r} looks like a missing label; correct the labels")
    return lines


def refuse_unknown_classes(
    classes: tuple[str, ...], counts: Mapping[str, int], split: str, where: str
) -> None:
    """Refuse images of classes that are not in the training split.

    Args:
        classes: the class names of the training split.
        counts: number of images that `split` has of each name.
        split: "val" or "test", for the message.
        where: the folder, for the message.

    Raises:
        DataError: listing the unknown classes.
    """
    extra = unknown_classes(classes, counts)
    if extra:
        raise DataError(
            f"{where}: {split} has {plural(len(extra), 'class')} that train lacks: "
            f"{quote_list(extra)}; rename or remove them, or pass --ignore-extra-classes"
        )


def unknown_classes(classes: tuple[str, ...], counts: Mapping[str, int]) -> tuple[str, ...]:
    """Return the names with at least one image that are not in `classes`, in natural order."""
    present = [name for name, count in counts.items() if count]
    return natural_order(match_classes(present, classes).unknown)


def notes_on_classes(split: str, classes: Sequence[str], counts: Mapping[str, int]) -> list[str]:
    """Return a line that names the classes without an image; none where all have one, or none."""
    # A split without any image is reported elsewhere, not class by class.
    empty = [name for name in classes if not counts.get(name)]
    if not empty or len(empty) == len(classes):
        return []
    word = "class" if len(empty) == 1 else "classes"
    return [f"{split} has no images of {word} {quote_list(empty)}"]


def _natural_key(name: str) -> tuple[list[tuple[int, int, str]], str]:
    """Return a sort key that compares numbers by length, then as text.

    `int` refuses more than 4,300 digits.
    """
    key = []
    for part in filter(None, _DIGITS.split(name)):
        if part.isdecimal() and part.isascii():
            digits = part.lstrip("0")
            # Numbers come before words, and shorter numbers before longer ones.
            key.append((0, len(digits), digits))
        else:
            key.append((1, 0, part))
    return key, name


def _plain(name: str) -> str:
    """Return a class name in a normal form, without differences of spelling such as case."""
    letters = []
    for letter in unicodedata.normalize("NFKC", name).casefold():
        is_invisible = unicodedata.category(letter) == "Cf"
        if not is_invisible and not letter.isspace() and letter not in "-_":
            letters.append(letter)
    # Leading zeros are removed, except after a decimal point.
    return re.sub(r"(?<![0-9.])0+(?=[0-9])", "", "".join(letters)) or name


def _is_unicode(name: str) -> bool:
    try:
        name.encode()
    except UnicodeEncodeError:
        return False
    return True
