"""Converting any format to any other, with a report of all changes and a verified result."""

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from vitkit import errors, messages
from vitkit.io.results import nonempty_path
from vitkit.models.vit import ViT
from vitkit.spec import Preprocess, ViTSpec
from vitkit.weights import load, verify, write
from vitkit.weights.adapt import adapt as adapt_checkpoint
from vitkit.weights.checkpoint import OWN_FORMAT, Checkpoint, texts
from vitkit.weights.formats.format import STEP_KINDS, Step
from vitkit.weights.inspection import Inspection, inspect


@dataclass(frozen=True)
class ConversionReport:
    """The changes and the verification of a conversion.

    Attributes:
        source: the format read.
        target: the format written.
        files: written.
        kept: number of tensors with the same bits as before.
        folded: exact changes, one line each.
        approximated: changes that alter the result a little, one line each.
        lost: parts that the target cannot hold, one line each.
        notes: parts that were unwrapped, ignored or only guessed when reading.
        proved_by: the library that ran the files written: the target's own with its version, or
            `vitkit`, which read them again.
        unproved: where `vitkit` did, why the other library did not, and how to get it; empty where
            it did, and for vitkit's own format.
        max_difference: largest |difference| of the logits, or of the features of a model without
            head, between the model read and the files written, on one fixed image.
    """

    source: str
    target: str
    files: tuple[Path, ...]
    kept: int
    folded: tuple[str, ...] = ()
    approximated: tuple[str, ...] = ()
    lost: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    proved_by: str = OWN_FORMAT
    unproved: str = ""
    max_difference: float = field(default=float("nan"))

    def __str__(self) -> str:
        lines = [f"{self.source} -> {self.target}: {self.kept} tensors kept"]
        for name in ("folded", "approximated", "lost", "notes"):
            lines += [f"  {name}: {messages.escape(line)}" for line in getattr(self, name)]
        if self.unproved:
            lines.append(f"  not verified by another library: {self.unproved}")
        result = f"largest difference of the logits {self.max_difference:.2e}"
        if self.max_difference == 0:
            result = "the logits are identical"
        lines.append(f"  verified by {self.proved_by}: {result}")
        lines += [f"  wrote {file}" for file in self.files]
        return "\n".join(lines)

    def to_json(self) -> dict[str, Any]:
        """Return plain JSON values; a difference that is not known (NaN) is `None`."""
        values = asdict(self) | {"files": list(map(str, self.files))}
        if not math.isfinite(self.max_difference):
            values["max_difference"] = None
        return values


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
    """Write a checkpoint of any known format in another one, and compare the result with it.

    Args:
        path: the checkpoint, as for `load`.
        out: a folder, created if it does not exist, or a file with the target's ending.
        to: one of `formats()`.
        model: a preset's name, which decides fields that the file leaves open, as for `load`.
        allow_lossy: also take steps that approximate or lose something.
        trust_pickle: as for `load`.
        strict: as for `load`; the report's notes list tensors that are left out or random.
        adapt: changes on the way, as for `vitkit.adapt`; these need no `allow_lossy`.
        **overrides: as for `load`.

    Raises:
        CheckpointError: a file that cannot be read, a model that the target cannot hold, or steps
            that lose something without `allow_lossy`; they are listed.
        SpecError: an adaptation that is not possible.
        OutputError: `out` is empty, exists already or cannot be written; no file is replaced.
    """
    write.refuse_unknown_format(to)
    out = nonempty_path(out, "out")
    checkpoint = load.load_with(
        path, model=model, trust_pickle=trust_pickle, strict=strict, **overrides
    )
    before, earlier = checkpoint.model.state_dict(), len(texts(checkpoint.metadata, "adapted"))
    if adapt:
        checkpoint = adapt_checkpoint(checkpoint, **adapt)
    stored = write.write_checkpoint(checkpoint, out, to, allow_lossy, before)
    # A format of one file is read by that file, others by their folder.
    written_path = stored.files[0] if len(stored.files) == 1 else out
    not_stored, notes = _not_stored(written_path, stored.spec, checkpoint, to)
    steps = [*map(Step.from_line, texts(checkpoint.metadata, "adapted")[earlier:]), *stored.steps]
    notes = [*texts(checkpoint.metadata, "notes"), *checkpoint.warnings, *notes]
    source = checkpoint.format
    # One image (1, C, H, W), the same in every call; the caller's generator is not touched.
    size = (checkpoint.model.spec.in_channels, *checkpoint.model.spec.image_size)
    image = torch.randn(1, *size, generator=torch.Generator().manual_seed(0))
    expected = _logits(checkpoint.model, image)  # as adapted, before it is fitted to the format
    del checkpoint, before  # their weights are freed before the written ones are loaded
    found, proved_by, unproved = None, OWN_FORMAT, ""
    if to != OWN_FORMAT:
        found, proved_by = verify.reference_logits(to, written_path, stored.spec, image)
    if found is None:
        # No library can run it: read it again, with the fields that the file has no place for.
        if to != OWN_FORMAT:
            proved_by, unproved = OWN_FORMAT, proved_by
        found = _logits(load.load_with(written_path, **not_stored).model, image)
    difference = float("nan")
    if found.shape == expected.shape:
        difference = float((found - expected).abs().max())
    return ConversionReport(
        source=source,
        target=to,
        files=stored.files,
        kept=stored.unchanged,
        **{kind: tuple(s.text for s in steps if s.kind == kind) for kind in STEP_KINDS},
        notes=tuple(notes),
        proved_by=proved_by,
        unproved=unproved,
        max_difference=difference,
    )


@torch.no_grad()
def _logits(model: ViT, images: torch.Tensor) -> torch.Tensor:
    logits: torch.Tensor = model.eval()(images)
    return logits


def _not_stored(
    path: Path, spec: ViTSpec, checkpoint: Checkpoint, to: str
) -> tuple[dict[str, Any], list[str]]:
    """Return the spec fields that a written file cannot contain, and a line on each loss.

    Args:
        path: path of the file or folder.
        spec: spec of the model in it.
        checkpoint: as it was before writing.
        to: the format.
    """
    if to == OWN_FORMAT:
        return {}, []
    not_stored: dict[str, Any] = {}
    found: Inspection | None
    try:
        found = inspect(path)
    except errors.CheckpointError:  # an oblong image size, which no shape shows
        found = None
    if found is None or found.spec.image_size != spec.image_size:
        not_stored["image_size"] = spec.image_size
        found = inspect(path, image_size=spec.image_size)
    for name, certainty in found.sure.items():
        is_guess = certainty == "usual" and name not in ("preprocess", "classes")
        if is_guess and getattr(found.spec, name) != getattr(spec, name):
            not_stored[name] = getattr(spec, name)
    lost = [f"{name} = {value!r}: pass it when loading" for name, value in not_stored.items()]
    # Preprocessing that a reader of the files would get differently.
    before, after = _resizing(checkpoint.preprocess), _resizing(found.preprocess)
    differing = [f"{name} {value}" for name, value in before.items() if value != after.get(name)]
    if differing:
        lost.append(f"this part of the preprocessing: {', '.join(differing)}")
    if checkpoint.temperature != 1.0:
        lost.append(f"the temperature {checkpoint.temperature:.4g}")
    if checkpoint.classes and not found.classes:
        lost.append(f"the {len(checkpoint.classes)} class names")
    return not_stored, [f"the file cannot store {part}" for part in lost]


def _resizing(preprocess: Preprocess) -> dict[str, Any]:
    """Return preprocessing as JSON, with the resized sides in whole pixels for the crop ratio."""
    # Formats store the size before the crop, so the ratio itself may be rounded.
    values = preprocess.to_json()
    ratio = values.pop("crop_ratio")
    if preprocess.fit != "squash":
        values["size before the crop"] = [math.floor(s / ratio) for s in preprocess.image_size]
    return values
