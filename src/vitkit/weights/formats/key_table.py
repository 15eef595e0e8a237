"""A foreign format is a two-way table: rows of their names and ours, with an invertible transform.

Reading, writing and complaining live here, once. A row's names may hold `{i}`, the number of a
block, and `{p}`, `weight` or `bias`; it applies where the model at hand has our names. Every tensor
of the model must be claimed by exactly one row, and every tensor of the file by a row or by a
pattern of what may be left aside: nothing is dropped in silence.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import lru_cache
from typing import NamedTuple, TypeAlias

import torch
from einops import EinopsError
from torch import Tensor

from vitkit.errors import CheckpointError, did_you_mean, plural
from vitkit.models.vit import ViT
from vitkit.spec import ViTSpec
from vitkit.weights.files.open import Header, Source

Tensors: TypeAlias = Mapping[str, Tensor]
Parts: TypeAlias = tuple[Tensor, ...]


class Transform(NamedTuple):
    """What is done to the tensors of a row, there and back.

    Attributes:
        to_ours: their tensors, in the row's order, and the spec -> ours.
        to_theirs: the inverse.
    """

    to_ours: Callable[[Parts, ViTSpec], Parts]
    to_theirs: Callable[[Parts, ViTSpec], Parts]


def _as_is(parts: Parts, spec: ViTSpec) -> Parts:
    return parts


AS_IS = Transform(_as_is, _as_is)
TRANSPOSED = Transform(
    lambda parts, spec: tuple(part.mT for part in parts),
    lambda parts, spec: tuple(part.mT for part in parts),
)


def stacked(count: int) -> Transform:
    """`count` tensors of theirs one under the other in one of ours: q, k, v in `qkv`."""
    return Transform(
        lambda parts, spec: (torch.cat(parts, dim=0),),
        lambda parts, spec: tuple(parts[0].chunk(count, dim=0)),
    )


class Row(NamedTuple):
    """One correspondence.

    Attributes:
        theirs: their names.
        ours: our names.
        how: the transform between them.
    """

    theirs: tuple[str, ...]
    ours: tuple[str, ...]
    how: Transform = AS_IS


def row(theirs: str | Sequence[str], ours: str | Sequence[str], how: Transform = AS_IS) -> Row:
    """A `Row`, from single names too."""
    return Row(_names(theirs), _names(ours), how)


def _names(one_or_more: str | Sequence[str]) -> tuple[str, ...]:
    return (one_or_more,) if isinstance(one_or_more, str) else tuple(one_or_more)


@dataclass(frozen=True)
class Table:
    """The rows of a format.

    Attributes:
        rows: correspondences; the first one that claims a tensor of ours has it.
        aside: patterns of their tensors that carry nothing of a ViT's forward pass, and why.
    """

    rows: tuple[Row, ...]
    aside: tuple[tuple[str, str], ...] = ()

    def applied(self, spec: ViTSpec) -> list[Row]:
        """The rows with names filled in, one for each tensor (or few) of a model of this spec.

        Raises:
            CheckpointError: a tensor of the model that no row claims: the format cannot hold it.
        """
        wanted = shapes(spec)
        taken: set[str] = set()
        found: list[Row] = []
        for rule in self.rows:
            for filled in _fillings(rule, spec.depth):
                if taken.isdisjoint(filled.ours) and wanted.keys() >= set(filled.ours):
                    taken |= set(filled.ours)
                    found.append(filled)
        if unclaimed := sorted(wanted.keys() - taken):
            raise CheckpointError(
                f"the format has no place for {few(unclaimed)}; convert to one that has"
            )
        return found


@lru_cache(maxsize=4)
def shapes(spec: ViTSpec) -> Mapping[str, tuple[int, ...]]:
    """Names and shapes of a model's tensors, without memory for them."""
    with torch.device("meta"):
        return {name: tuple(t.shape) for name, t in ViT(spec).state_dict().items()}


def check_size(spec: ViTSpec, theirs: Mapping[str, tuple[int, ...]]) -> None:
    """Hold a spec against the tensors of a file, before a model of it is made.

    Args:
        spec: what the file is said to be.
        theirs: name -> shape, as in its header.

    Raises:
        CheckpointError: more blocks than tensors, or more numbers in blocks than the file declares.
    """
    blocks = spec.depth + sum(spec.resnet_layers)
    numbers = sum(math.prod(shape) for shape in theirs.values())
    matrices = spec.width * (3 * spec.attention_width + 2 * spec.mlp_width)
    if blocks > len(theirs) or spec.depth * matrices > numbers:
        raise CheckpointError(
            f"depth {spec.depth}, width {spec.width} and mlp_width {spec.mlp_width} need more than "
            f"the {len(theirs)} tensors of {numbers} numbers that the file declares"
        )


class Account(NamedTuple):
    """What each tensor of a file is to a model, by names alone.

    Attributes:
        rows: the rows of the table whose tensors are all there.
        missing: names that other rows need and the file lacks.
        fresh: our names of what cannot be read because of that.
        alone: names that are there and of no use without the missing ones.
        aside: a line for each tensor that is known and not needed.
        unknown: names that belong to nothing known.
    """

    rows: tuple[Row, ...]
    missing: tuple[str, ...]
    fresh: tuple[str, ...]
    alone: tuple[str, ...]
    aside: tuple[str, ...]
    unknown: tuple[str, ...]


def account(table: Table, spec: ViTSpec, header: Header) -> Account:
    """Hold the names in a file against those that a format has for a model of this spec."""
    names, rows = header.shapes.keys(), table.applied(spec)
    there = [line for line in rows if names >= set(line.theirs)]
    other = [line for line in rows if not names >= set(line.theirs)]
    needed = {name: None for line in other for name in line.theirs}
    rest = sorted(names - {name for line in there for name in line.theirs} - needed.keys())
    aside = dict(_set_aside(table, rest))
    counts = {name: "whole numbers, no weights" for name in rest
              if name not in aside and is_integer(header.dtypes[name])}  # fmt: skip
    return Account(
        tuple(there),
        tuple(name for name in needed if name not in names),
        tuple(name for line in other for name in line.ours),
        tuple(name for name in needed if name in names),
        tuple(f"{name}: {why}" for name, why in (aside | counts).items()),
        tuple(name for name in rest if name not in aside and name not in counts),
    )


INTEGER = re.compile(r"[<>|=]?[iub]\d+|[IU]\d+|BOOL|u?int\d+|bool")


def is_integer(dtype: str) -> bool:
    """Whether a dtype, as safetensors, numpy or torch names it, is of whole numbers."""
    return INTEGER.fullmatch(dtype) is not None


def read_tensors(
    table: Table, spec: ViTSpec, theirs: Source, *, strict: bool = True
) -> tuple[dict[str, Tensor], Account]:
    """Their tensors under our names, and what each of them is.

    Args:
        table: of their format.
        spec: the model.
        theirs: the open file, with the names of the table.
        strict: refuse missing and unknown tensors; else those are left out.

    Raises:
        CheckpointError: a tensor that is missing, unknown, or of another shape than the spec says.
    """
    expected, found = shapes(spec), account(table, spec, theirs.header)
    if strict:
        _refuse(found, theirs)
    ours: dict[str, Tensor] = {}
    for rule in found.rows:
        parts = tuple(theirs[name] for name in rule.theirs)
        try:
            made = rule.how.to_ours(parts, spec)
        except (RuntimeError, LookupError, TypeError, ValueError, EinopsError):
            named = zip(rule.theirs, parts, strict=True)
            shown = " + ".join(f"{name} {tuple(part.shape)}" for name, part in named)
            raise CheckpointError(f"{shown} cannot become {few(rule.ours)}") from None
        for name, tensor in zip(rule.ours, made, strict=True):
            if tuple(tensor.shape) != expected[name]:
                raise CheckpointError(
                    f"{' + '.join(rule.theirs)} gives {name} the shape {tuple(tensor.shape)}; "
                    f"the model needs {expected[name]}"
                )
            ours[name] = tensor.contiguous()  # now, so that theirs need not stay in memory
    return ours, found


def _refuse(found: Account, theirs: Source) -> None:
    """Raise `CheckpointError` for missing and for unknown tensors."""
    if missing := found.missing:
        near = did_you_mean(missing[0], theirs)
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        raise CheckpointError(
            f"tensor {missing[0]}{more} {'are' if more else 'is'} missing{near}; {PARTIAL}"
        )
    if unknown := found.unknown:
        raise CheckpointError(
            f"{plural(len(unknown), 'unknown tensor')}: {few(unknown)}; {PARTIAL}"
        )


PARTIAL = "strict=False (--allow-partial) goes on without"


def write_tensors(table: Table, spec: ViTSpec, ours: Tensors) -> dict[str, Tensor]:
    """Our tensors under their names, contiguous; `CheckpointError` for what has no place."""
    made: dict[str, Tensor] = {}
    for rule in table.applied(spec):
        parts = rule.how.to_theirs(tuple(ours[name] for name in rule.ours), spec)
        made |= {name: part.contiguous() for name, part in zip(rule.theirs, parts, strict=True)}
    return made


def _fillings(rule: Row, depth: int) -> Iterator[Row]:
    layers = range(depth) if any("{i}" in name for name in rule.ours) else range(1)
    kinds = ("weight", "bias") if any("{p}" in name for name in rule.ours) else ("",)
    for layer in layers:
        for kind in kinds:
            theirs = tuple(
                name.replace("{i}", str(layer)).replace("{p}", kind) for name in rule.theirs
            )
            ours = tuple(name.replace("{i}", str(layer)).replace("{p}", kind) for name in rule.ours)
            yield Row(theirs, ours, rule.how)


def _set_aside(table: Table, names: Sequence[str]) -> Iterator[tuple[str, str]]:
    for name in names:
        for pattern, why in table.aside:
            if fnmatchcase(name, pattern):
                yield name, why
                break


def few(names: Sequence[str], most: int = 5) -> str:
    """The first names of many, in words."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more
