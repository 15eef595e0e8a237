"""Build a `Dataset`: class names, cuts of images into splits.

Copies, files of one class with the same content, stay together.
"""

import dataclasses
import hashlib
import re
import unicodedata
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Int64, Shaped, UInt64

from vitkit import errors, randomness
from vitkit.data.datasets.dataset import Dataset, dataset_fingerprint
from vitkit.data.datasets.split import Split
from vitkit.messages import plural, quote_list

POOL_FRACTIONS: dict[str, float] = {"train": 0.7, "val": 0.1, "test": 0.2}


def stratified_split(
    labels: Int64[np.ndarray, " N"],
    fractions: Sequence[float],
    seed: int = 0,
    keys: UInt64[np.ndarray, " N"] | None = None,
    *,
    together: bool = True,
) -> list[Int64[np.ndarray, " M"]]:
    """Cut N images into parts that all have the classes in the same proportions.

    Every part gets round(fraction * N) images. A class gives to each part the whole number below
    its share; the missing images come from the classes with the largest remainders. A class never
    gives its last image away from the first part. `hash64(seed, key)` decides which images go: the
    cut depends on nothing but the seed and the keys. Images of one class with the same key go to
    the same part, which may make parts larger or smaller.

    Args:
        labels: class numbers (N,).
        fractions: shares of the parts, positive, summing to 1; the first part takes the rest.
        seed: another seed, another cut.
        keys: one number for each image that stays with it when the order changes, such as the
            first 64 bits of its file's hash; its index where absent.
        together: False lets images with the same key go to different parts.

    Returns:
        For each part its indices in `labels`, ascending.

    Raises:
        SettingError: fractions that are not positive or do not sum to 1.
    """
    if min(fractions, default=0) <= 0 or abs(sum(fractions) - 1) > 1e-9:
        raise errors.SettingError(f"fractions must be positive and sum to 1, got {list(fractions)}")
    if keys is None:
        keys = np.arange(len(labels), dtype=np.uint64)
    # Sorted by class and random draw, a part takes the first images of each class.
    draws = randomness.hash64(seed, keys)
    order = np.lexsort((draws, labels))
    parts: list[Int64[np.ndarray, " M"]] = []
    # The last part is cut off first; its share refers to the remaining images.
    for last in range(len(fractions) - 1, 0, -1):
        share = fractions[last] / sum(fractions[: last + 1])
        groups = draws[order] if together else None
        selected = _take_from_each_class(labels[order], share, groups)
        parts.append(np.sort(order[selected]))
        order = order[~selected]
    return [np.sort(order), *reversed(parts)]


def _marked(
    fingerprint: str,
    cut: Sequence[Int64[np.ndarray, " _"]],
    separated: Sequence[Int64[np.ndarray, " _"]],
) -> str:
    """Return the fingerprint of a cut; another one where it keeps copies together that moved."""
    if all(map(np.array_equal, cut, separated)):
        return fingerprint
    return _copies_together(fingerprint)


def with_validation(dataset: Dataset, fraction: float, seed: int = 0) -> Dataset:
    """Return the dataset with a validation split: its own, or a stratified part of train.

    Copies in train stay together; where that changes the cut, the fingerprint changes, too.

    Args:
        dataset: returned as it is where it has "val".
        fraction: part of train to take, in (0, 1).
        seed: another seed, another part.

    Raises:
        SettingError: a fraction out of range.
        DataError: no train split, or too few images in it to take any.
    """
    if "val" in dataset.splits:
        return dataset
    if not 0 < fraction < 1:
        raise errors.SettingError(f"--val-fraction {fraction:g} must lie between 0 and 1")
    train = dataset.splits.get("train")
    if train is None:
        raise errors.DataError(
            f"{dataset.name} has no train split; it has {', '.join(dataset.splits)}"
        )
    shares = (1 - fraction, fraction)
    cut = stratified_split(train.labels, shares, seed)
    if not len(cut[1]):
        raise errors.DataError(
            f"{dataset.name}: train has {plural(len(train), 'image')}, too few to use "
            f"{fraction:.0%} for validation; add images or a val folder, or pass --val-fraction 0 "
            "to train without validation"
        )
    fingerprint = dataset.fingerprint
    if dataset.first_copies is not None:
        # Copies have the index of their first one as key; other images have their own.
        together = stratified_split(
            train.labels, shares, seed, dataset.first_copies.astype(np.uint64)
        )
        if len(together[1]):
            fingerprint = _marked(fingerprint, together, cut)
            cut = together
    splits = {"train": train.subset(cut[0]), "val": train.subset(cut[1])}
    for name, split in dataset.splits.items():
        splits.setdefault(name, split)
    note = f"validation: {len(cut[1]):,} of {len(train):,} train images, stratified, seed {seed}"
    return dataclasses.replace(
        dataset,
        splits=splits,
        fingerprint=fingerprint,
        notes=(*dataset.notes, note),
        first_copies=None,
    )


def with_validation_of(dataset: Dataset, fingerprint: object, fraction: object) -> Dataset:
    """Return the dataset with the validation split of a run.

    Args:
        dataset: returned as it is where the run was about other data, or cut nothing off.
        fingerprint: the run's, after its cut; of a stranger's JSON, so that it may be anything.
        fraction: the run's part of train; likewise.
    """
    if not isinstance(fraction, float) or fraction <= 0:
        return dataset
    if fingerprint not in (dataset.fingerprint, _copies_together(dataset.fingerprint)):
        return dataset
    cut = with_validation(dataset, fraction)
    if cut.fingerprint == fingerprint:
        return cut
    return dataset


def _take_from_each_class(
    labels: Int64[np.ndarray, " N"], share: float, draws: UInt64[np.ndarray, " N"] | None
) -> np.ndarray:
    """Select images, sorted by class and draw: bool (N,), `round(share * N)` of them set.

    Nearly as many where images of one draw have to stay together.
    """
    _, starts, counts = np.unique(labels, return_index=True, return_counts=True)
    shares = counts * share
    take = np.floor(shares + 1e-9).astype(np.int64)  # a product may be off by a rounding error
    missing = round(round(float(shares.sum()), 6)) - int(take.sum())
    # Largest remainders first; of equal ones, the class with the smaller number.
    by_remainder = np.argsort(-(shares - take), kind="stable")
    able = by_remainder[(take < counts - 1)[by_remainder]]  # one image stays in the first part
    take[able[: max(missing, 0)]] += 1
    if draws is not None:
        take = _moved_to_edges(labels, draws, starts, counts, take)
    rank = np.arange(len(labels)) - np.repeat(starts, counts)
    return np.asarray(rank < np.repeat(take, counts))


def _moved_to_edges(
    labels: Int64[np.ndarray, " N"],
    draws: UInt64[np.ndarray, " N"],
    starts: Int64[np.ndarray, " K"],
    counts: Int64[np.ndarray, " K"],
    take: Int64[np.ndarray, " K"],
) -> Int64[np.ndarray, " K"]:
    """Round the number taken of each class (K,) to the nearest edge of a group of one draw."""
    # A group is a run of images of one class with one draw; it may not be torn apart.
    edges = edges_of_runs(labels, draws)
    edge = np.searchsorted(edges, starts + take, "right") - 1
    before = edges[edge] - starts
    after = edges[np.minimum(edge + 1, len(edges) - 1)] - starts
    # A class keeps its last group in the first part.
    up = (after - take <= take - before) & (after < counts)
    return np.where(before == take, take, np.where(up, after, before))


def edges_of_runs(
    one: Shaped[np.ndarray, " N"], other: Shaped[np.ndarray, " N"]
) -> Int64[np.ndarray, " E"]:
    """Return where each run of equal pairs (one[i], other[i]) begins, and N, where the last ends.

    >>> edges_of_runs(np.array([5, 5, 5, 7]), np.array([0, 0, 1, 1])).tolist()
    [0, 2, 3, 4]
    """
    changes = (one[1:] != one[:-1]) | (other[1:] != other[:-1])
    return np.flatnonzero(np.concatenate([[True], changes, [True]]))


def _copies_together(fingerprint: str) -> str:
    return hashlib.sha256(f"{fingerprint}, copies together".encode()).hexdigest()


def first_copies(digests: Iterable[bytes]) -> Int64[np.ndarray, " N"] | None:
    """Return for each image the first index of its digest (N,); None where all differ."""
    seen: dict[bytes, int] = {}
    firsts = [seen.setdefault(digest[:8], index) for index, digest in enumerate(digests)]
    if len(seen) == len(firsts):
        return None
    return np.array(firsts, np.int64)


# Class names: their order, matching them by name, and names that are doubtful.

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
        # Case folding may undo a normal form, so the name is normalised before and after.
        folded = unicodedata.normalize("NFC", unicodedata.normalize("NFC", name).casefold())
        other = seen.setdefault(folded, name)
        problem = f"names {other!a} and {name!a} differ only in case or Unicode form"
        if name.encode(errors="ignore").decode() != name:
            problem = f"name {name!r} is not valid UTF-8"
        elif other == name:
            continue
        raise errors.DataError(f"{where}: class {problem}; merge or rename them")


def doubtful_names(names: Iterable[str]) -> list[str]:
    """Return a line for each doubt: class names that are probably one class, or no class.

    Compared are names without case, spaces, hyphens, underscores, invisible characters and leading
    zeros, with letters of other widths as usual ones.
    """
    alike: dict[str, list[str]] = {}
    lines = []
    for name in names:
        alike.setdefault(_plain(name), []).append(name)
        if name.casefold() in _MISSING:
            lines.append(f"class {name!r} looks like a missing label; correct the labels")
    for group in alike.values():
        if len(group) > 1:
            lines.append(
                f"class names {' and '.join(map(ascii, group))} look alike; merge them if they are "
                f"one class"
            )
    return lines


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
    folded = unicodedata.normalize("NFKC", name).casefold()
    visible = (letter for letter in folded if unicodedata.category(letter) != "Cf")
    letters = re.sub(r"[\s_-]", "", "".join(visible))
    # Leading zeros are removed, except after a decimal point.
    return re.sub(r"(?<![0-9.])0+(?=[0-9])", "", letters) or name


# Build a `Dataset` from images with class names: one list of classes for all splits.

POOL = ""
"""The name of images that belong to no split yet."""


@dataclass(frozen=True)
class NamedImages:
    """The images of one split, or of all, before classes have numbers."""

    images: Split
    """The images; their labels are ignored."""
    names: Sequence[str]
    """Each image's class."""
    digests: Sequence[bytes]
    """Each image's SHA-256."""


def assemble(
    name: str,
    where: str,
    parts: Mapping[str, NamedImages],
    *,
    classes: Sequence[str] = (),
    ignore_extra_classes: bool = False,
    notes: Iterable[str] = (),
) -> Dataset:
    """Number the classes, and cut images without a split 70/10/20.

    Args:
        name: the dataset's name.
        where: the folder or address, for messages.
        parts: by split, or all of it as `POOL`.
        classes: all class names in their order, where the source knows them; else those of train,
            numbers as numbers.
        ignore_extra_classes: leave out classes of val and test that train lacks.
        notes: lines for the user that the source has already.

    Raises:
        DataError: no images, one class only, unknown or ambiguous classes.
    """
    counts = {split: Counter(part.names) for split, part in parts.items() if len(part.names)}
    if not counts:
        raise errors.DataError(f"{where}: no images")
    all_names = set().union(*counts.values())
    # The training images define the classes; without them, all named classes count.
    train_counts = counts.get(POOL) or counts.get("train")
    if not classes:
        classes = natural_order(train_counts or all_names)
    classes = tuple(classes)
    refuse_look_alikes({*classes, *all_names}, where)
    if train_counts is not None and len(train_counts) < 2:
        only = next(iter(train_counts))
        raise errors.DataError(
            f"{where}: only one class has images, {only!r}; expected at least two"
        )
    notes = list(notes)
    numbered: dict[str, NamedImages] = {}
    for split in counts:
        part = parts[split]
        extra = natural_order({*counts[split]} - {*classes})
        if extra and not ignore_extra_classes:
            raise errors.DataError(
                f"{where}: {split or 'the data'} has {plural(len(extra), 'class')} that train "
                f"lacks: {quote_list(extra)}; rename or remove them, or pass --ignore-extra-classes"
            )
        if extra:
            notes.append(f"{split} classes that train lacks are left out: {quote_list(extra)}")
            part = _without_classes(part, {*extra})
        if not len(part.names):
            notes.append(f"{split} has no images and is left out")
            continue
        notes += notes_on_classes(split or "train", classes, counts[split])
        numbered[split] = _numbered(part, classes)
    return _dataset(name, classes, numbered, notes)


def _dataset(
    name: str, classes: tuple[str, ...], parts: dict[str, NamedImages], notes: list[str]
) -> Dataset:
    # The fingerprint is of the images as they were opened, before any cut.
    marks = {}
    for split, part in parts.items():
        marks[split] = (part.images.labels, part.digests)
    mark = dataset_fingerprint(classes, marks)
    if POOL not in parts:
        # Training comes first, whatever the order of the source.
        splits = {split: parts[split].images for split in POOL_FRACTIONS if split in parts}
        copies = None
        if "train" in parts:
            copies = first_copies(parts["train"].digests)
        return Dataset(name, classes, splits, mark, tuple(notes), first_copies=copies)
    # Cut 70/10/20, stratified, seed 0, by the images' own SHA-256: their order does not matter.
    whole = parts[POOL].images
    # 64 bits are enough: two of a billion images have the same with a chance of 3 %.
    first_bits = b"".join(digest[:8] for digest in parts[POOL].digests)
    keys = np.frombuffer(first_bits, ">u8").astype(np.uint64)
    shares = tuple(POOL_FRACTIONS.values())
    cut = stratified_split(whole.labels, shares, 0, keys)
    mark = _marked(mark, cut, stratified_split(whole.labels, shares, 0, keys, together=False))
    splits, sizes = {}, []
    for split, indices in zip(POOL_FRACTIONS, cut, strict=True):
        sizes.append(f"{len(indices):,} {split}")
        if len(indices):
            splits[split] = whole.subset(indices)
    notes.append(f"no splits: divided 70/10/20 by class and image hash, seed 0: {', '.join(sizes)}")
    return Dataset(name, classes, splits, mark, tuple(notes), cut=True)


def _numbered(part: NamedImages, classes: Sequence[str]) -> NamedImages:
    number = dict(zip(classes, range(len(classes)), strict=True))
    labels = np.array([*map(number.__getitem__, part.names)], np.int64)
    return NamedImages(part.images.relabelled(labels), part.names, part.digests)


def _without_classes(part: NamedImages, extra: set[str]) -> NamedImages:
    kept = [index for index, name in enumerate(part.names) if name not in extra]
    images = part.images.subset(np.array(kept, np.int64))
    names = [*map(part.names.__getitem__, kept)]
    return NamedImages(images, names, [*map(part.digests.__getitem__, kept)])
