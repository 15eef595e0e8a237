"""Any format to any other, with a report of what happened and a proof that it is the same model."""

from __future__ import annotations

import math
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch import Tensor

from vitkit.errors import CheckpointError
from vitkit.models.record import Record
from vitkit.models.vit import ViT
from vitkit.spec import Preprocess, ViTSpec
from vitkit.weights.adapt import adapt as adapted
from vitkit.weights.checkpoint import Checkpoint
from vitkit.weights.converting.fold import Step
from vitkit.weights.converting.verify import Foreign, foreign
from vitkit.weights.converting.write import refuse_unknown, written
from vitkit.weights.formats.registry import FORMATS
from vitkit.weights.formats.vitkit import OWN
from vitkit.weights.hints import Hints
from vitkit.weights.inspection import Inspection, inspect
from vitkit.weights.load import load_with, refuse_other_model

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
        proved_by: who ran the files written: the target's own library with its version, or
            `vitkit`, which read them again.
        unproved: where `vitkit` did, why the other library did not, and how to get it; empty where
            it did, and for vitkit's own format.
        differences: largest |difference| of each block's tokens between the model read and the
            files written, on one fixed image; NaN where tokens were lost.
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
    unproved: str = ""
    differences: tuple[float, ...] = ()
    max_difference: float = field(default=float("nan"))

    def __str__(self) -> str:
        lines = [f"{self.source} -> {self.target}: {self.kept} tensors kept"]
        for name in ("folded", "approximated", "lost", "notes"):
            lines += [f"  {name}: {line}" for line in getattr(self, name)]
        worst = max(self.differences, default=0.0)
        if self.unproved:
            lines.append(f"  not run by another library: {self.unproved}")
        lines.append(
            f"  run by {self.proved_by}: largest difference of a block's tokens {worst:.2e}, "
            f"of the logits {self.max_difference:.2e}"
        )
        return "\n".join([*lines, *(f"  wrote {file}" for file in self.files)])

    def to_json(self) -> dict[str, Any]:
        """Plain JSON values; a difference that cannot be told (NaN) is `None`."""
        blocks = [_number(value) for value in self.differences]
        return asdict(self) | {
            "files": [str(file) for file in self.files],
            "differences": blocks,
            "max_difference": _number(self.max_difference),
        }


def convert(
    path: str | Path,
    out: str | Path,
    *,
    to: str,
    model: str | None = None,
    allow_lossy: bool = False,
    trust_pickle: bool = False,
    strict: bool = True,
    adapt: Mapping[str, Any] | None = None,
    **overrides: Any,
) -> ConversionReport:
    """Write a checkpoint of any known format in another one.

    Args:
        path: the checkpoint, as for `load`.
        out: a folder, made if it is not there, or a file with the target's ending.
        to: one of `formats()`.
        model: a preset's name, which decides what the file does not say, as for `load`.
        allow_lossy: also do what approximates or loses something.
        trust_pickle: as for `load`.
        strict: as for `load`; the report's notes list what is left out and what is random.
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
    hints = Hints.of(model, overrides)
    given = load_with(path, hints, trust_pickle=trust_pickle, strict=strict, **overrides)
    refuse_other_model(path, hints, given.model.spec)
    before = given.model.state_dict()
    earlier = len(given.metadata.get("adapted", ()))
    given = adapted(given, **adapt) if adapt else given
    files, spec, steps, kept = written(given, Path(out), to, allow_lossy, before)
    place = files[0] if len(files) == 1 else Path(out)
    unsaid, notes = _unsaid(place, spec, given, to)
    changes = [Step.of(line) for line in given.metadata.get("adapted", ())[earlier:]]
    lines = {kind: tuple(s.text for s in (*changes, *steps) if s.kind == kind) for kind in KINDS}
    heard = (*given.metadata.get("notes", ()), *given.warnings)
    source, image = given.format, _image(given.model.spec)
    expected = run(given.model, image)
    del given, before  # the weights that were read go before those that were written come
    theirs = "" if to == OWN else foreign(to, place, spec)
    witness = theirs if isinstance(theirs, Foreign) else load_with(place, Hints(), **unsaid).model
    blocks, logits = compare(expected, run(witness, image))
    return ConversionReport(
        source, to, files, kept, **lines, notes=(*heard, *notes),
        proved_by=theirs.library if isinstance(theirs, Foreign) else OWN,
        unproved="" if isinstance(theirs, Foreign) else theirs,
        differences=blocks, max_difference=logits,
    )  # fmt: skip


def _unsaid(
    place: Path, spec: ViTSpec, given: Checkpoint, to: str
) -> tuple[dict[str, Any], list[str]]:
    """Fields of the spec that the file written cannot say, and a line on each of them."""
    if to == OWN:
        return {}, []
    size: dict[str, Any] = {}
    found: Inspection | None = None
    with suppress(CheckpointError):  # an oblong image that nothing but the caller knows of
        found = inspect(place)
    if found is None or found.spec.image_size != spec.image_size:
        size = {"image_size": spec.image_size}
        found = inspect(place, **size)
    unsaid = size | {
        field: getattr(spec, field)
        for field, sure in found.sure.items()
        if sure == "usual" and field not in ("preprocess", "classes")
        and getattr(found.spec, field) != getattr(spec, field)
    }  # fmt: skip
    notes = [f"the file cannot say {f} = {v!r}: pass it when reading" for f, v in unsaid.items()]
    if not _same_pixels(found.preprocess, given.preprocess):
        notes.append("the file cannot say the preprocessing: " + ", ".join(
            f"{name} {value}" for name, value in given.preprocess.to_json().items()
            if value != found.preprocess.to_json()[name]
        ))  # fmt: skip
    if given.temperature != 1.0:
        notes.append(f"the file cannot say the temperature {given.temperature:.4g}")
    if given.classes and not found.classes:
        notes.append(f"the file cannot say the {len(given.classes)} class names")
    theirs = FORMATS[to].resampling(spec)
    if theirs not in (None, spec.position_resampling) and spec.positions == "learned":
        notes.append(
            f"at another image size {to} resamples positions by {theirs}, this model by "
            f"{spec.position_resampling}, so results differ there; --adapt.image-size "
            f"(adapt={{'image_size': ...}}) resamples them before they are written"
        )
    return unsaid, notes


def _same_pixels(left: Preprocess, right: Preprocess) -> bool:
    """Whether images become the same: of the crop ratio, only the resized side counts."""

    def sides(preprocess: Preprocess) -> list[int]:
        return [math.floor(side / preprocess.crop_ratio) for side in preprocess.image_size]

    alike = left.replace(crop_ratio=right.crop_ratio) == right
    return alike and (left.fit == "squash" or sides(left) == sides(right))


Run: TypeAlias = tuple[list[Tensor], Tensor]
"""What a model makes of the fixed image: each block's tokens (B, T, D), and the logits."""


def _image(spec: ViTSpec) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(1, spec.in_channels, *spec.image_size, generator=generator)


@torch.no_grad()
def run(model: ViT | Foreign, images: Tensor) -> Run:
    """A model, ours or of another library, on images (B, C, H, W)."""
    if isinstance(model, Foreign):
        return model(images)
    record = Record(tokens=range(model.spec.depth))
    logits = model.eval()(images, record)
    return [record.tokens[layer] for layer in range(model.spec.depth)], logits


def compare(ours: Run, theirs: Run) -> tuple[tuple[float, ...], float]:
    """Largest |difference| of each block's tokens, and of the logits."""
    blocks = tuple(_distance(*pair) for pair in zip(ours[0], theirs[0], strict=True))
    return blocks, _distance(ours[1], theirs[1])


def _number(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _distance(left: Tensor, right: Tensor) -> float:
    """NaN where the shapes differ, as when a token was lost."""
    return float((left - right).abs().max()) if left.shape == right.shape else float("nan")
