"""Any format to any other, with a report of what happened and a proof that it is the same model."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from vitkit.errors import CheckpointError, OutputError, did_you_mean
from vitkit.models.record import Record
from vitkit.models.vit import ViT
from vitkit.spec import ViTSpec
from vitkit.weights.adapt import Step, adapt
from vitkit.weights.checkpoint import Checkpoint, save
from vitkit.weights.files import write_bytes
from vitkit.weights.format import Bundle
from vitkit.weights.formats import FORMATS
from vitkit.weights.inspection import inspect
from vitkit.weights.load import load
from vitkit.weights.rules import write_tensors

OWN = "vitkit"


@dataclass(frozen=True)
class ConversionReport:
    """What a conversion did.

    Attributes:
        source: the format read.
        target: the format written.
        files: what was written.
        kept: how many tensors went over with the same bits.
        folded: exact changes, one line each.
        approximated: changes that alter the result a little, one line each.
        lost: what the target has no place for, one line each.
        notes: what was unwrapped, set aside or only guessed on the way in.
        differences: largest |difference| of each block's tokens between the model read and the file
            written, read again, on fixed pictures.
        max_difference: the same of the logits.
    """

    source: str
    target: str
    files: tuple[Path, ...]
    kept: int
    folded: tuple[str, ...] = ()
    approximated: tuple[str, ...] = ()
    lost: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    differences: tuple[float, ...] = ()
    max_difference: float = field(default=float("nan"))

    def __str__(self) -> str:
        lines = [f"{self.source} -> {self.target}: {self.kept} tensors kept"]
        for name in ("folded", "approximated", "lost", "notes"):
            lines += [f"  {name}: {line}" for line in getattr(self, name)]
        worst = max(self.differences, default=0.0)
        lines.append(
            f"  read again: largest difference of a block's tokens {worst:.2e}, "
            f"of the logits {self.max_difference:.2e}"
        )
        return "\n".join([*lines, *(f"  wrote {file}" for file in self.files)])


def convert(
    path: str | Path,
    out: str | Path,
    *,
    to: str,
    allow_lossy: bool = False,
    trust_pickle: bool = False,
    **overrides: Any,
) -> ConversionReport:
    """Write a checkpoint of any known format in another one.

    Args:
        path: the checkpoint, as for `load`.
        out: a folder, made if it is not there, or a file with the target's ending.
        to: one of `formats()`.
        allow_lossy: also do what approximates or loses something.
        trust_pickle: as for `load`.
        **overrides: as for `load`.

    Raises:
        CheckpointError: a file that cannot be read, a model that the target cannot hold, or steps
            that lose something without `allow_lossy`; they are listed.
        OutputError: something is there already, or the place cannot be written; what was there is
            untouched.
    """
    if to not in (OWN, *FORMATS):
        near = did_you_mean(to, [OWN, *FORMATS])
        raise CheckpointError(f"format {to!r} is none of {OWN}, {', '.join(FORMATS)}{near}")
    given = load(path, trust_pickle=trust_pickle, **overrides)
    files, spec, steps, kept = _write(given, Path(out), to, allow_lossy)
    place = files[0] if len(files) == 1 else Path(out)
    unsaid, notes = _unsaid(place, spec, given, to)
    blocks, logits = compare(given.model, load(place, **unsaid).model)
    lines = {kind: tuple(s.text for s in steps if s.kind == kind) for kind in KINDS}
    heard = (*given.metadata.get("notes", ()), *given.metadata.get("warnings", ()))
    return ConversionReport(
        given.format, to, files, kept, **lines, notes=(*heard, *notes), differences=blocks,
        max_difference=logits,
    )  # fmt: skip


def _unsaid(
    place: Path, spec: ViTSpec, given: Checkpoint, to: str
) -> tuple[dict[str, Any], list[str]]:
    """Fields of the spec that the file written cannot say, and a line on each of them."""
    if to == OWN:
        return {}, []
    height, width = spec.image_size
    size: dict[str, Any] = {} if height == width else {"image_size": spec.image_size}
    found = inspect(place, **size)
    unsaid = size | {
        field: getattr(spec, field)
        for field, sure in found.sure.items()
        if sure == "usual" and field != "preprocess"
        and getattr(found.spec, field) != getattr(spec, field)
    }  # fmt: skip
    notes = [f"the file cannot say {f} = {v!r}: pass it when reading" for f, v in unsaid.items()]
    if found.preprocess != given.preprocess:
        notes.append("the file cannot say the preprocessing: " + ", ".join(
            f"{name} {value}" for name, value in given.preprocess.to_json().items()
            if value != found.preprocess.to_json()[name]
        ))  # fmt: skip
    if given.classes and not found.classes:
        notes.append(f"the file cannot say the {len(given.classes)} class names")
    return unsaid, notes


KINDS = ("folded", "approximated", "lost")


def _write(
    given: Checkpoint, out: Path, to: str, allow_lossy: bool
) -> tuple[tuple[Path, ...], ViTSpec, list[Step], int]:
    """The files written, the spec they hold, the steps that led there, how many tensors stayed."""
    if to == OWN:
        file = out if out.suffix == ".safetensors" else out / "model.safetensors"
        _refuse_existing((file,))
        given_metadata = {k: v for k, v in given.metadata.items() if k not in RESERVED}
        save(file, given.model, preprocess=given.preprocess, classes=given.classes,
             source_format=given.format, **given_metadata)  # fmt: skip
        return (file,), given.model.spec, [], len(given.model.state_dict())
    form, before = FORMATS[to], given.model.state_dict()
    try:
        spec, state, steps = adapt(given.model.spec, before, form.holds)
    except CheckpointError as error:
        raise CheckpointError(f"{given.path}: as {to}: {error}") from None
    if (lossy := [step.text for step in steps if step.kind != "folded"]) and not allow_lossy:
        raise CheckpointError(
            f"{given.path}: {to} cannot hold all of it: {'; '.join(lossy)}; "
            f"say --allow-lossy (allow_lossy=True) to go on without"
        )
    tensors = write_tensors(form.table(spec), spec, state)
    written = form.write(Bundle(spec, tensors, given.preprocess, given.classes))
    if out.suffix and len(written) > 1:
        raise CheckpointError(f"{out}: {to} is a folder of {', '.join(written)}; give a folder")
    files = tuple(out if out.suffix else out / name for name in written)
    _refuse_existing(files)
    for file, content in zip(files, written.values(), strict=True):
        write_bytes(file, content)
    kept = sum(name in before and before[name] is tensor for name, tensor in state.items())
    return files, spec, steps, kept


def _refuse_existing(files: Iterable[Path]) -> None:
    for file in files:
        if file.exists():
            raise OutputError(f"{file} exists already; choose another place, or move it away")


RESERVED = ("format_version", "spec", "preprocess", "classes", "versions", "source_format")
"""Metadata that `save` writes itself."""


@torch.no_grad()
def compare(left: ViT, right: ViT) -> tuple[tuple[float, ...], float]:
    """Largest |difference| of each block's tokens, and of the logits, on two fixed pictures."""
    generator = torch.Generator().manual_seed(0)
    images = torch.randn(2, left.spec.in_channels, *left.spec.image_size, generator=generator)
    records = (Record(tokens=range(left.spec.depth)), Record(tokens=range(right.spec.depth)))
    logits = [m.eval()(images, record) for m, record in zip((left, right), records, strict=True)]
    blocks = tuple(
        _distance(records[0].tokens[layer], records[1].tokens[layer])
        for layer in range(left.spec.depth)
    )
    return blocks, _distance(*logits)


def _distance(left: Tensor, right: Tensor) -> float:
    """NaN where the shapes differ, as when a token was lost."""
    return float((left - right).abs().max()) if left.shape == right.shape else float("nan")
