"""Any format to any other, with a report of what happened and a proof that it is the same model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch import Tensor

from vitkit.models.record import Record
from vitkit.models.vit import ViT
from vitkit.spec import ViTSpec
from vitkit.weights.adapt import adapt as adapted
from vitkit.weights.checkpoint import Checkpoint
from vitkit.weights.fitting import Step
from vitkit.weights.inspection import inspect
from vitkit.weights.load import load
from vitkit.weights.own import OWN
from vitkit.weights.peers import Foreign, foreign
from vitkit.weights.writing import refuse_unknown, written

KINDS = ("folded", "approximated", "lost")


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
        proved_by: who ran the files written: the target's own library with its version, where it is
            installed, else `vitkit`, which read them again.
        differences: largest |difference| of each block's tokens between the model read and the
            files written, on one fixed picture; NaN where tokens were lost.
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
    proved_by: str = OWN
    differences: tuple[float, ...] = ()
    max_difference: float = field(default=float("nan"))

    def __str__(self) -> str:
        lines = [f"{self.source} -> {self.target}: {self.kept} tensors kept"]
        for name in ("folded", "approximated", "lost", "notes"):
            lines += [f"  {name}: {line}" for line in getattr(self, name)]
        worst = max(self.differences, default=0.0)
        lines.append(
            f"  run by {self.proved_by}: largest difference of a block's tokens {worst:.2e}, "
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
    adapt: Mapping[str, Any] | None = None,
    **overrides: Any,
) -> ConversionReport:
    """Write a checkpoint of any known format in another one.

    Args:
        path: the checkpoint, as for `load`.
        out: a folder, made if it is not there, or a file with the target's ending.
        to: one of `formats()`.
        allow_lossy: also do what approximates or loses something.
        trust_pickle: as for `load`.
        adapt: what is to be changed on the way, by the names of `vitkit.adapt`, such as
            `{"image_size": 384, "num_classes": 0}`; these need no `allow_lossy`.
        **overrides: as for `load`.

    Raises:
        CheckpointError: a file that cannot be read, a model that the target cannot hold, or steps
            that lose something without `allow_lossy`; they are listed.
        SpecError: an adaptation that cannot be.
        OutputError: something is there already, or the place cannot be written; what was there is
            untouched.
    """
    refuse_unknown(to)
    given = load(path, trust_pickle=trust_pickle, **overrides)
    before = given.model.state_dict()
    earlier = len(given.metadata.get("adapted", ()))
    given = adapted(given, **adapt) if adapt else given
    files, spec, steps, kept = written(given, Path(out), to, allow_lossy, before)
    place = files[0] if len(files) == 1 else Path(out)
    unsaid, notes = _unsaid(place, spec, given, to)
    changes = [Step.of(line) for line in given.metadata.get("adapted", ())[earlier:]]
    lines = {kind: tuple(s.text for s in (*changes, *steps) if s.kind == kind) for kind in KINDS}
    heard = (*given.metadata.get("notes", ()), *given.metadata.get("warnings", ()))
    source, picture = given.format, _picture(given.model.spec)
    expected = run(given.model, picture)
    del given, before  # the weights that were read go before those that were written come
    witness = foreign(to, place, spec) or load(place, **unsaid).model
    blocks, logits = compare(expected, run(witness, picture))
    return ConversionReport(
        source, to, files, kept, **lines, notes=(*heard, *notes),
        proved_by=witness.library if isinstance(witness, Foreign) else OWN,
        differences=blocks, max_difference=logits,
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
    if given.temperature != 1.0:
        notes.append(f"the file cannot say the temperature {given.temperature:.4g}")
    if given.classes and not found.classes:
        notes.append(f"the file cannot say the {len(given.classes)} class names")
    return unsaid, notes


Run: TypeAlias = tuple[list[Tensor], Tensor]
"""What a model makes of the fixed picture: each block's tokens (B, T, D), and the logits."""


def _picture(spec: ViTSpec) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(1, spec.in_channels, *spec.image_size, generator=generator)


@torch.no_grad()
def run(model: ViT | Foreign, pictures: Tensor) -> Run:
    """A model, ours or of another library, on pictures (B, C, H, W)."""
    if isinstance(model, Foreign):
        return model(pictures)
    record = Record(tokens=range(model.spec.depth))
    logits = model.eval()(pictures, record)
    return [record.tokens[layer] for layer in range(model.spec.depth)], logits


def compare(ours: Run, theirs: Run) -> tuple[tuple[float, ...], float]:
    """Largest |difference| of each block's tokens, and of the logits."""
    blocks = tuple(_distance(*pair) for pair in zip(ours[0], theirs[0], strict=True))
    return blocks, _distance(ours[1], theirs[1])


def _distance(left: Tensor, right: Tensor) -> float:
    """NaN where the shapes differ, as when a token was lost."""
    return float((left - right).abs().max()) if left.shape == right.shape else float("nan")
