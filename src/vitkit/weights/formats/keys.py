"""Two-way tables between a format's tensor names and ours, with invertible transforms.

Reading, writing and their errors are implemented here, once for all formats. A row's names may hold
`{i}`, the number of a block; `{p}`, `weight` or `bias`; and in a ResNet stem `{s}` and `{u}`, the
numbers of a stage and of a unit in it, or `{s1}` and `{u1}` where they start at 1. A row applies
where the model has our names. Every tensor of the model must be claimed by exactly one row, and
every tensor of the file by a row or by a pattern of `ignored`: none is dropped silently.
"""

import itertools
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import NamedTuple, TypeAlias

import torch
from einops import EinopsError
from torch import Tensor

from vitkit import errors, messages
from vitkit.spec import ViTSpec
from vitkit.weights.files import Header, Shapes, Source

Parts: TypeAlias = tuple[Tensor, ...]
"""The tensors of one row, in its order."""
BLOCK = "blocks.{i}."
RESNET_UNIT = "stages.{s}.blocks.{u}."
"""Our names in a block, and in a unit of a ResNet stem."""
PARTIAL_HINT = "to load the rest, pass strict=False (--allow-partial)"
INTEGER = re.compile(r"[<>|=]?[iub]\d+|[IU]\d+|BOOL|u?int\d+|bool")
"""Dtypes of whole numbers, as safetensors, numpy or torch name them."""


def _as_is(parts: Parts, spec: ViTSpec) -> Parts:
    return parts


class Transform(NamedTuple):
    """An invertible change of a row's tensors; by default none.

    Attributes:
        to_ours: their tensors, in the row's order, and the spec -> ours.
        to_theirs: the inverse.
    """

    to_ours: Callable[[Parts, ViTSpec], Parts] = _as_is
    to_theirs: Callable[[Parts, ViTSpec], Parts] = _as_is


AS_IS = Transform()


def each(
    to_ours: Callable[[Tensor, ViTSpec], Tensor], to_theirs: Callable[[Tensor, ViTSpec], Tensor]
) -> Transform:
    """Return the transform that changes each tensor of a row by itself."""
    return Transform(
        lambda parts, spec: tuple(to_ours(part, spec) for part in parts),
        lambda parts, spec: tuple(to_theirs(part, spec) for part in parts),
    )


def stacked(count: int) -> Transform:
    """Return the transform of `count` tensors into one, along rows: q, k, v into `qkv`."""
    return Transform(
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
    transform: Transform = AS_IS


def row(
    theirs: str | Sequence[str], ours: str | Sequence[str], transform: Transform = AS_IS
) -> Row:
    """Return a `Row`; a single name may be a plain string."""
    if isinstance(theirs, str):
        theirs = (theirs,)
    if isinstance(ours, str):
        ours = (ours,)
    return Row(tuple(theirs), tuple(ours), transform)


def renamed(names: Mapping[str, str], theirs: str = "", ours: str = "") -> list[Row]:
    """Return the rows of tensors that have other names only: theirs -> ours, after prefixes."""
    return [row(theirs + name, ours + our_name) for name, our_name in names.items()]


def token_rows(spec: ViTSpec, tokens: Mapping[str, str], positions: str) -> list[Row]:
    """Return the rows of tokens and positions where theirs has no positions for registers.

    Ours then gets rows of zeros for them, and the same file can be written again. Where our table
    has no rows for prefix tokens, theirs are added to the tokens, and written as zeros.

    Args:
        spec: the model.
        tokens: our name of a token -> theirs.
        positions: their name of the table.
    """
    in_table = ["cls_token", "dist_token"][: 1 + spec.distillation_token]
    if spec.positions_cover_prefix:
        rows = [row(positions, "pos_embed", each(_with_register_rows, _without_register_rows))]
    else:
        theirs = [tokens[name] for name in in_table]
        added = Transform(_rows_added, _rows_of_zeros)
        rows = [row([*theirs, positions], [*in_table, "pos_embed"], added)]
    return [*rows, *renamed({theirs: ours for ours, theirs in tokens.items()})]


def _with_register_rows(positions: Tensor, spec: ViTSpec) -> Tensor:
    first, patches = positions.tensor_split([1 + spec.distillation_token], dim=1)
    return torch.cat([first, first.new_zeros(1, spec.num_registers, spec.width), patches], dim=1)


def _without_register_rows(positions: Tensor, spec: ViTSpec) -> Tensor:
    # These rows are zeros: `fold_register_positions` adds others to the registers before.
    ends = [1 + spec.distillation_token, spec.num_prefix_tokens]
    first, _, patches = positions.tensor_split(ends, dim=1)
    return torch.cat([first, patches], dim=1)


def _rows_added(parts: Parts, spec: ViTSpec) -> Parts:
    *tokens, positions = parts
    # Row i of the table belongs to token i: class, then distillation.
    added = [token + positions[:, i : i + 1] for i, token in enumerate(tokens)]
    return *added, positions[:, len(tokens) :]


def _rows_of_zeros(parts: Parts, spec: ViTSpec) -> Parts:
    *tokens, positions = parts
    return *tokens, torch.cat([*map(torch.zeros_like, tokens), positions], dim=1)


@dataclass(frozen=True)
class Table:
    """The rows of a format.

    Attributes:
        rows: correspondences; the first one that claims a tensor of ours has it.
        ignored: patterns of their tensors that no forward pass of a ViT uses, each with the reason.
        same_names: tensors that no row claims have our names there.
    """

    rows: tuple[Row, ...]
    ignored: tuple[tuple[str, str], ...] = ()
    same_names: bool = False

    def applied(self, names: Set[str], spec: ViTSpec) -> list[Row]:
        """Return the rows for a model, with all numbers and kinds filled in.

        Args:
            names: names of all tensors of the model, ours.
            spec: the model.

        Raises:
            CheckpointError: a tensor of the model that no row claims: the format cannot hold it.
        """
        claimed: set[str] = set()
        rows: list[Row] = []
        for rule in self.rows:
            # Rows for parts that this model lacks match none of its names, and fall out here.
            for filled in _fillings(rule, spec):
                if claimed.isdisjoint(filled.ours) and names >= set(filled.ours):
                    claimed |= set(filled.ours)
                    rows.append(filled)
        unclaimed = sorted(names - claimed)
        if unclaimed and not self.same_names:
            raise errors.CheckpointError(
                f"the format cannot store {messages.few(unclaimed)}; convert to another format"
            )
        return [*rows, *(row(name, name) for name in unclaimed)]


def _fillings(rule: Row, spec: ViTSpec) -> Iterable[Row]:
    """Return a row once for each block, stage, unit and kind that its names ask for."""
    names = " ".join(rule.ours)
    units = range(max(spec.resnet_layers, default=0) or 1)
    stages = range(len(spec.resnet_layers) or 1)
    if "{s}" not in names:  # no name has one of the two alone
        units = stages = range(1)
    blocks = range(spec.depth if "{i}" in names else 1)
    filled: dict[Row, None] = {}  # an ordered set
    for i, s, u, kind in itertools.product(blocks, stages, units, ("weight", "bias")):
        numbers = {"i": i, "s": s, "s1": s + 1, "u": u, "u1": u + 1, "p": kind}
        theirs = tuple(name.format(**numbers) for name in rule.theirs)
        ours = tuple(name.format(**numbers) for name in rule.ours)
        filled[Row(theirs, ours, rule.transform)] = None
    return filled


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
        raise errors.CheckpointError(
            f"depth {spec.depth}, width {spec.width} and mlp_width {spec.mlp_width} need more than "
            f"the {len(theirs)} tensors of {numbers} numbers that the file declares"
        )


@contextmanager
def named_errors(path: Path, form: str) -> Iterator[None]:
    """Name the file and its format in an error of the format's code."""
    try:
        yield
    except (errors.SpecError, errors.CheckpointError) as error:
        reason = str(error).removeprefix(f"{path}: ")
        raise errors.CheckpointError(f"{path}: as {form}: {reason}") from None


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


def match_keys(table: Table, spec: ViTSpec, ours: Set[str], header: Header) -> KeyMatch:
    """Match the names in a file with those that a format has for a model.

    Args:
        table: table of the file's format.
        spec: the model.
        ours: our names of all its tensors.
        header: header of the file, with the names of the table.
    """
    names = header.shapes.keys()
    complete: list[Row] = []
    claimed: set[str] = set()
    needed: dict[str, None] = {}  # an ordered set
    fresh: list[str] = []
    for line in table.applied(ours, spec):
        # A row is read as a whole: a part of it makes none of our tensors.
        if names >= set(line.theirs):
            complete.append(line)
            claimed.update(line.theirs)
        else:
            needed.update(dict.fromkeys(line.theirs))
            fresh += line.ours
    ignored: list[str] = []
    unknown: list[str] = []
    for name in sorted(names - claimed - needed.keys()):
        reasons = [reason for pattern, reason in table.ignored if fnmatchcase(name, pattern)]
        if is_integer(header.dtypes[name]):  # counters, such as num_batches_tracked
            reasons.append("whole numbers, not weights")
        if reasons:
            ignored.append(f"{name}: {reasons[0]}")
        else:
            unknown.append(name)
    return KeyMatch(
        rows=tuple(complete),
        missing=tuple(name for name in needed if name not in names),
        fresh=tuple(fresh),
        unusable=tuple(name for name in needed if name in names),
        ignored=tuple(ignored),
        unknown=tuple(unknown),
    )


def is_integer(dtype: str) -> bool:
    """Return True if a dtype, as safetensors, numpy or torch names it, is of whole numbers."""
    return INTEGER.fullmatch(dtype) is not None


def read_tensors(
    table: Table, spec: ViTSpec, shapes: Shapes, theirs: Source, *, strict: bool = True
) -> tuple[dict[str, Tensor], KeyMatch]:
    """Read their tensors under our names.

    Args:
        table: table of their format.
        spec: the model.
        shapes: those of all its tensors, by our names.
        theirs: the open file, with the names of the table.
        strict: refuse missing and unknown tensors; else those are left out.

    Returns:
        Tensors by our names, and the role of each tensor in the file.

    Raises:
        CheckpointError: a tensor that is missing, unknown, or of another shape than the spec says.
    """
    match = match_keys(table, spec, shapes.keys(), theirs.header)
    if strict and match.missing:
        first, *others = match.missing
        subject = f"{first} and {len(others)} more are" if others else f"{first} is"
        near = messages.did_you_mean(first, theirs)
        raise errors.CheckpointError(f"tensor {subject} missing{near}; {PARTIAL_HINT}")
    if strict and match.unknown:
        count = messages.plural(len(match.unknown), "unknown tensor")
        raise errors.CheckpointError(f"{count}: {messages.few(match.unknown)}; {PARTIAL_HINT}")
    ours: dict[str, Tensor] = {}
    # One row at a time, so that only one row is in memory twice.
    for rule in match.rows:
        parts = tuple(theirs[name] for name in rule.theirs)
        try:
            made = rule.transform.to_ours(parts, spec)
        except (RuntimeError, LookupError, TypeError, ValueError, EinopsError):
            named = zip(rule.theirs, parts, strict=True)
            shown = " + ".join(f"{name} {tuple(part.shape)}" for name, part in named)
            raise errors.CheckpointError(
                f"{shown} cannot be converted to {messages.few(rule.ours)}"
            ) from None
        for name, tensor in zip(rule.ours, made, strict=True):
            if tuple(tensor.shape) != shapes[name]:
                raise errors.CheckpointError(
                    f"{' + '.join(rule.theirs)} gives {name} the shape {tuple(tensor.shape)}; "
                    f"the model needs {shapes[name]}"
                )
            # Copied at once where it is a view, so that theirs need not stay in memory.
            ours[name] = tensor.contiguous()
    return ours, match


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
    for rule in table.applied(ours.keys(), spec):
        # Their shapes need no check: ours have been compared with the spec.
        parts = rule.transform.to_theirs(tuple(ours[name] for name in rule.ours), spec)
        for name, part in zip(rule.theirs, parts, strict=True):
            theirs[name] = part.contiguous()
    return theirs
