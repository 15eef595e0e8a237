"""Two-way tables between a format's tensor names and ours, with invertible transforms.

Reading, writing and their errors are implemented here, once for all formats. A row's names may hold
`{i}`, the number of a block, and `{p}`, `weight` or `bias`; it applies where the model has our
names. Every tensor of the model must be claimed by exactly one row, and every tensor of the file by
a row or by a pattern of `ignored`: none is dropped silently.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import NamedTuple, TypeAlias

import torch
from einops import EinopsError
from torch import Tensor

from vitkit.errors import CheckpointError
from vitkit.messages import did_you_mean, plural
from vitkit.spec import ViTSpec
from vitkit.weights.tensor_file import Header, Source

TensorParts: TypeAlias = tuple[Tensor, ...]
"""The tensors of one row, in its order."""
PARTIAL_HINT = "to load the rest, pass strict=False (--allow-partial)"
INTEGER = re.compile(r"[<>|=]?[iub]\d+|[IU]\d+|BOOL|u?int\d+|bool")
"""Dtypes of whole numbers, as safetensors, numpy or torch name them."""


class KeyTransform(NamedTuple):
    """An invertible change of a row's tensors.

    Attributes:
        to_ours: their tensors, in the row's order, and the spec -> ours.
        to_theirs: the inverse.
    """

    to_ours: Callable[[TensorParts, ViTSpec], TensorParts]
    to_theirs: Callable[[TensorParts, ViTSpec], TensorParts]


def _as_is(parts: TensorParts, spec: ViTSpec) -> TensorParts:
    return parts


def _transposed(parts: TensorParts, spec: ViTSpec) -> TensorParts:
    return tuple(part.mT for part in parts)


AS_IS = KeyTransform(_as_is, _as_is)
TRANSPOSED = KeyTransform(_transposed, _transposed)


def stacked(count: int) -> KeyTransform:
    """Return the transform of `count` tensors into one, along rows: q, k, v into `qkv`."""
    return KeyTransform(
        lambda parts, spec: (torch.cat(parts, dim=0),),
        lambda parts, spec: tuple(parts[0].chunk(count, dim=0)),
    )


class Row(NamedTuple):
    """One correspondence between their tensors and ours.

    Attributes:
        theirs: their names.
        ours: our names.
        transform: the transform between them.
    """

    theirs: tuple[str, ...]
    ours: tuple[str, ...]
    transform: KeyTransform = AS_IS


def row(
    theirs: str | Sequence[str], ours: str | Sequence[str], transform: KeyTransform = AS_IS
) -> Row:
    """Return a `Row`; a single name may be a plain string."""
    return Row(_names(theirs), _names(ours), transform)


def _names(one_or_more: str | Sequence[str]) -> tuple[str, ...]:
    return (one_or_more,) if isinstance(one_or_more, str) else tuple(one_or_more)


@dataclass(frozen=True)
class Table:
    """The rows of a format.

    Attributes:
        rows: correspondences; the first one that claims a tensor of ours has it.
        ignored: patterns of their tensors that no forward pass of a ViT uses, each with the reason.
    """

    rows: tuple[Row, ...]
    ignored: tuple[tuple[str, str], ...] = ()

    def applied(self, names: Set[str], depth: int) -> list[Row]:
        """Return the rows for a model, with block numbers and kinds filled in.

        Args:
            names: names of all tensors of the model, ours.
            depth: L, the number of its blocks.

        Raises:
            CheckpointError: a tensor of the model that no row claims: the format cannot hold it.
        """
        claimed: set[str] = set()
        rows: list[Row] = []
        for rule in self.rows:
            # Rows for parts that this model lacks match none of its names, and fall out here.
            for filled in _fillings(rule, depth):
                if claimed.isdisjoint(filled.ours) and names >= set(filled.ours):
                    claimed |= set(filled.ours)
                    rows.append(filled)
        unclaimed = sorted(names - claimed)
        if unclaimed:
            raise CheckpointError(
                f"the format cannot store {few(unclaimed)}; convert to another format"
            )
        return rows


def _fillings(rule: Row, depth: int) -> Iterator[Row]:
    """Yield a row once for each block and for `weight` and `bias`, as far as its names ask."""
    names = " ".join(rule.ours)
    # A row without {i} is for the whole model, one without {p} for a single tensor.
    layers = range(depth if "{i}" in names else 1)
    kinds = ("weight", "bias") if "{p}" in names else ("",)

    for layer in layers:
        for kind in kinds:
            yield Row(
                tuple(_filled(name, layer, kind) for name in rule.theirs),
                tuple(_filled(name, layer, kind) for name in rule.ours),
                rule.transform,
            )


def _filled(name: str, layer: int, kind: str) -> str:
    return name.replace("{i}", str(layer)).replace("{p}", kind)


def check_size(spec: ViTSpec, theirs: Mapping[str, tuple[int, ...]]) -> None:
    """Check a spec against the tensors of a file, before a model of it is made.

    Args:
        spec: the one inferred for the file.
        theirs: name -> shape, as in its header.

    Raises:
        CheckpointError: more blocks than tensors, or more numbers in blocks than the file declares.
    """
    blocks = spec.depth + sum(spec.resnet_layers)
    # A forged header may state any size; even a model on the meta device takes memory.
    numbers = sum(map(math.prod, theirs.values()))
    matrices = spec.width * (3 * spec.attention_width + 2 * spec.mlp_width)
    if blocks > len(theirs) or spec.depth * matrices > numbers:
        raise CheckpointError(
            f"depth {spec.depth}, width {spec.width} and mlp_width {spec.mlp_width} need more than "
            f"the {len(theirs)} tensors of {numbers} numbers that the file declares"
        )


class KeyMatch(NamedTuple):
    """The tensors of a file matched with those of a model, by names alone.

    Attributes:
        rows: the rows of the table whose tensors are all in the file.
        missing: names that other rows need and the file lacks.
        fresh: our names of tensors that cannot be read because of that.
        unusable: names in the file that are of no use without the missing ones.
        ignored: a line for each tensor that is known and not needed.
        unknown: names that belong to nothing known.
    """

    rows: tuple[Row, ...]
    missing: tuple[str, ...]
    fresh: tuple[str, ...]
    unusable: tuple[str, ...]
    ignored: tuple[str, ...]
    unknown: tuple[str, ...]


def match_keys(table: Table, header: Header, ours: Set[str], depth: int) -> KeyMatch:
    """Match the names in a file with those that a format has for a model.

    Args:
        table: table of the file's format.
        header: header of the file, with the names of the table.
        ours: our names of all tensors of the model.
        depth: L, the number of its blocks.
    """
    names = header.shapes.keys()
    complete: list[Row] = []
    claimed: set[str] = set()
    needed: dict[str, None] = {}  # an ordered set
    fresh: list[str] = []
    for line in table.applied(ours, depth):
        # A row is read as a whole: a part of it makes none of our tensors.
        if names >= set(line.theirs):
            complete.append(line)
            claimed.update(line.theirs)
        else:
            needed.update(dict.fromkeys(line.theirs))
            fresh += line.ours
    ignored: list[str] = []
    integers: list[str] = []
    unknown: list[str] = []
    for name in sorted(names - claimed - needed.keys()):
        reason = _reason_to_ignore(table, name)
        if reason is not None:
            ignored.append(f"{name}: {reason}")
        elif is_integer(header.dtypes[name]):  # counters, such as num_batches_tracked
            integers.append(f"{name}: whole numbers, not weights")
        else:
            unknown.append(name)
    return KeyMatch(
        rows=tuple(complete),
        missing=tuple(name for name in needed if name not in names),
        fresh=tuple(fresh),
        unusable=tuple(name for name in needed if name in names),
        ignored=(*ignored, *integers),
        unknown=tuple(unknown),
    )


def _reason_to_ignore(table: Table, name: str) -> str | None:
    for pattern, reason in table.ignored:
        if fnmatchcase(name, pattern):
            return reason
    return None


def is_integer(dtype: str) -> bool:
    """Return True if a dtype, as safetensors, numpy or torch names it, is of whole numbers."""
    return INTEGER.fullmatch(dtype) is not None


def read_tensors(
    table: Table,
    spec: ViTSpec,
    shapes: Mapping[str, tuple[int, ...]],
    theirs: Source,
    *,
    strict: bool = True,
) -> tuple[dict[str, Tensor], KeyMatch]:
    """Read their tensors under our names.

    Args:
        table: table of their format.
        spec: the model.
        shapes: our name -> shape of all tensors of the model.
        theirs: the open file, with the names of the table.
        strict: refuse missing and unknown tensors; else those are left out.

    Returns:
        Tensors by our names, and the role of each tensor in the file.

    Raises:
        CheckpointError: a tensor that is missing, unknown, or of another shape than the spec says.
    """
    match = match_keys(table, theirs.header, shapes.keys(), spec.depth)
    if strict:
        _refuse_partial(match, theirs)
    ours: dict[str, Tensor] = {}
    for rule in match.rows:
        for name, tensor in zip(rule.ours, _transformed(rule, spec, theirs), strict=True):
            if tuple(tensor.shape) != shapes[name]:
                raise CheckpointError(
                    f"{' + '.join(rule.theirs)} gives {name} the shape {tuple(tensor.shape)}; "
                    f"the model needs {shapes[name]}"
                )
            # Copied at once where it is a view, so that theirs need not stay in memory.
            ours[name] = tensor.contiguous()
    return ours, match


def _transformed(rule: Row, spec: ViTSpec, theirs: Source) -> TensorParts:
    """Read the tensors of a row, and change them to ours."""
    # Read here, one row at a time, so that only one row is in memory twice.
    parts = tuple(map(theirs.__getitem__, rule.theirs))
    try:
        return rule.transform.to_ours(parts, spec)
    except (RuntimeError, LookupError, TypeError, ValueError, EinopsError):
        named = zip(rule.theirs, parts, strict=True)
        shown = " + ".join(f"{name} {tuple(part.shape)}" for name, part in named)
        raise CheckpointError(f"{shown} cannot be converted to {few(rule.ours)}") from None


def _refuse_partial(match: KeyMatch, theirs: Source) -> None:
    """Refuse missing and unknown tensors."""
    missing = match.missing
    if missing:
        near = did_you_mean(missing[0], theirs)
        subject = f"tensor {missing[0]} is"
        if len(missing) > 1:
            subject = f"tensor {missing[0]} and {len(missing) - 1} more are"
        raise CheckpointError(f"{subject} missing{near}; {PARTIAL_HINT}")
    if match.unknown:
        count = plural(len(match.unknown), "unknown tensor")
        raise CheckpointError(f"{count}: {few(match.unknown)}; {PARTIAL_HINT}")


def write_tensors(table: Table, spec: ViTSpec, ours: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return our tensors under their names, contiguous.

    Args:
        table: table of their format.
        spec: the model.
        ours: all of its tensors, by our names.

    Raises:
        CheckpointError: a tensor that the format cannot hold.
    """
    theirs: dict[str, Tensor] = {}
    for rule in table.applied(ours.keys(), spec.depth):
        # Their shapes need no check: ours have been compared with the spec.
        parts = rule.transform.to_theirs(tuple(map(ours.__getitem__, rule.ours)), spec)
        for name, part in zip(rule.theirs, parts, strict=True):
            theirs[name] = part.contiguous()
    return theirs


def few(names: Sequence[str], most: int = 5) -> str:
    """Return the first names of a list as text, with the number of the others."""
    text = ", ".join(names[:most])
    if len(names) > most:
        text += f" and {len(names) - most} more"
    return text
