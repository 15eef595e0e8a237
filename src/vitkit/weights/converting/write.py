"""A checkpoint on its way into the files of a format: fitted to what it holds, renamed, written."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from vitkit.errors import CheckpointError, OutputError, did_you_mean
from vitkit.io.atomic import FileWriter, write_new
from vitkit.io.strict_json import BESIDE
from vitkit.spec import ViTSpec
from vitkit.weights.converting.fold import Step, fit
from vitkit.weights.files.open import PICKLES, WHOLE
from vitkit.weights.formats.format import Bundle
from vitkit.weights.formats.key_table import write_tensors
from vitkit.weights.formats.model_tensors import as_saved
from vitkit.weights.formats.registry import FORMATS
from vitkit.weights.formats.vitkit import OWN, content

if TYPE_CHECKING:
    from vitkit.weights.checkpoint import Checkpoint

FILES = (".safetensors", ".npz", *PICKLES)
"""Endings by which a place is a file and no folder."""


class Made(NamedTuple):
    """A model on its way into files."""

    contents: dict[str, FileWriter]
    spec: ViTSpec
    state: Mapping[str, Tensor]
    steps: tuple[Step, ...]


def refuse_unknown(to: str) -> None:
    """Raise `CheckpointError` for what is no format."""
    if to not in (OWN, *FORMATS):
        near = did_you_mean(to, [OWN, *FORMATS])
        raise CheckpointError(f"format {to!r} is none of {OWN}, {', '.join(FORMATS)}{near}")


def _made(given: Checkpoint, to: str, allow_lossy: bool) -> Made:
    """The files of the target, what they hold, and the steps that led there."""
    stored, place = getattr(torch, given.dtype), given.path or "checkpoint"
    spec, before = as_saved(given.model, Path(place))
    if to == OWN:
        metadata = {**given.metadata, "source_format": given.format}
        file = content(
            given.model, given.preprocess, given.classes, metadata, stored, place=Path(place)
        )
        return Made({"model.safetensors": file}, spec, before, ())
    form = FORMATS[to]
    try:
        spec, state, steps = form.settle(fit(spec, before, *form.capabilities))
    except CheckpointError as error:
        raise CheckpointError(f"{place}: as {to}: {error}") from None
    if (lossy := [step.text for step in steps if step.kind != "folded"]) and not allow_lossy:
        raise CheckpointError(
            f"{place}: {to} cannot hold all of it: {'; '.join(lossy)}; "
            f"say --allow-lossy (allow_lossy=True) to go on without"
        )
    tensors = write_tensors(form.table(spec), spec, state)
    if not steps:  # numbers that were computed anew keep all their bits
        tensors = {name: tensor.to(stored) for name, tensor in tensors.items()}
    files = form.write(Bundle(spec, tensors, given.preprocess, given.classes))
    return Made(files, spec, state, tuple(steps))


def written(
    given: Checkpoint, out: Path, to: str, allow_lossy: bool, before: Mapping[str, Tensor]
) -> tuple[tuple[Path, ...], ViTSpec, tuple[Step, ...], int]:
    """Files, the spec they hold, the steps, how many tensors stayed; keeps no copy of them."""
    contents, spec, state, steps = _made(given, to, allow_lossy)
    kept = sum(name in before and _same(before[name], tensor) for name, tensor in state.items())
    return _place(out, contents, to), spec, steps, kept


def _same(left: Tensor, right: Tensor) -> bool:
    if left.data_ptr() == right.data_ptr():
        return True
    return left.shape == right.shape and torch.equal(left, right)


def _place(out: Path, contents: Mapping[str, FileWriter], to: str) -> tuple[Path, ...]:
    """Write into the folder `out`, or the one file of that name."""
    if out.suffix not in FILES:
        _refuse_company(out, set(contents), to)
        return write_new(out, contents)
    if len(contents) > 1:
        raise CheckpointError(f"{out}: {to} is a folder of {', '.join(contents)}; give a folder")
    ((name, only),) = contents.items()
    if out.suffix != Path(name).suffix:
        raise CheckpointError(f"{out}: {to} files end in {Path(name).suffix}; name it so")
    _refuse_company(out.parent, {out.name}, to)
    return write_new(out.parent, {out.name: only})


def _refuse_company(folder: Path, names: set[str], to: str) -> None:
    """Raise `OutputError` where new files would change what those in a folder mean, or the reverse.

    A folder is read by the first of `WHOLE` that it has, and weights by the JSON beside them.
    """
    if not folder.is_dir() or any((folder / name).exists() for name in names):
        return  # the one that is there already is named by `write_new`
    there = {file.name for file in folder.iterdir()}
    if names & set(WHOLE):
        if "config.yaml" in there and there & {"state", "weights"}:
            raise OutputError(f"{folder} is the folder of a run; choose another one")
        if other := next((name for name in WHOLE if (folder / name).is_file()), None):
            raise OutputError(f"{folder} is read by its {other}; choose another folder")
    beside = set(BESIDE.values())
    weights = sorted(name for name in there if name.endswith((*FILES, ".safetensors.index.json")))
    if names & beside and weights:
        raise OutputError(
            f"{folder / weights[0]} would be read by the new {min(names & beside)}; choose another "
            f"folder"
        )
    if to != OWN and there & beside and not names & beside:
        raise OutputError(
            f"{', '.join(names)} would be read by {folder / min(there & beside)}, which is not of "
            f"it; choose another folder"
        )
