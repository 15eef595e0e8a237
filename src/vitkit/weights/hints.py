"""What a caller knows of a model whose file leaves something open: its name, or single fields.

A value that is only usual for files of a format is a guess. A preset's name or a keyword decides it
instead; a guess that remains is told in one line.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

from vitkit.errors import CheckpointError, SpecError
from vitkit.models.presets import preset
from vitkit.spec import ViTSpec
from vitkit.weights.files.open import Header
from vitkit.weights.formats.format import Format, Inferred

GUESSED = (
    "num_heads", "head_width", "activation", "norm_eps", "block", "pooling", "positions",
    "positions_cover_prefix", "image_size", "rope_temperature", "distilled_readout",
    "resnet_variant",
)  # fmt: skip
"""Fields of `ViTSpec` that change what a model computes and that a file may leave open."""
SHAPED = (
    "width", "depth", "mlp_width", "mlp", "norm", "qk_norm", "class_token", "distillation_token",
    "num_registers", "embedding_norm",
)  # fmt: skip
"""Fields that every file decides by its tensors; a preset that differs is of another model."""

OTHERWISE = (
    "if one is wrong, name the model (--model, model=) or the field (--spec.num-heads, num_heads=)"
)


@dataclass(frozen=True)
class Hints:
    """What decides the fields that a file leaves open.

    Attributes:
        asked: fields of `ViTSpec` that the caller names.
        named: the preset that the caller names, with what is `asked` in it; or none.
    """

    asked: Mapping[str, Any] = field(default_factory=dict)
    named: ViTSpec | None = None

    @classmethod
    def of(cls, model: str | None, overrides: Mapping[str, Any]) -> Hints:
        """The hints of `load(..., model=NAME)`; the name may have a tag. Errors as for `preset`."""
        return cls(named=preset(model.partition(".")[0], **overrides)) if model else cls()

    def differences(self, spec: ViTSpec, *further: str) -> list[str]:
        """The fields, `SHAPED` and further ones, in which a file is not the named preset."""
        if self.named is None:
            return []
        ours, theirs = vars(self.named), vars(spec)
        return [f"{name} {ours[name]}, not {theirs[name]}" for name in (*SHAPED, *further)
                if ours[name] != theirs[name]]  # fmt: skip

    def sizes(self) -> Iterator[Any]:
        """Image sizes that the file may be for, the likeliest first."""
        if "image_size" in self.asked:
            yield self.asked["image_size"]
        if self.named is not None:
            yield self.named.image_size


def infer(form: Format, header: Header, overrides: Mapping[str, Any], hints: Hints) -> Inferred:
    """Infer the model of a file; what the file leaves open is as the hints say.

    Args:
        form: the file's format.
        header: of the file, prepared.
        overrides: fields that hold whatever the file seems to be.
        hints: what decides the fields that are only usual.

    Raises:
        CheckpointError, SpecError: as for `form.infer`.
    """
    found, overrides = _first(form, header, overrides, hints)
    left = [name for name in GUESSED if found.sure.get(name) == "usual"]
    likely: dict[str, Any] = {}
    if hints.named is not None and not hints.differences(found.spec):
        likely = {name: getattr(hints.named, name) for name in left if name not in form.fixed}
    likely |= {name: hints.asked[name] for name in left if name in hints.asked}
    likely.pop("image_size", None)
    size = next((size for size in hints.sizes() if _fits(found.spec, size)), None)
    if "image_size" in left and size is not None:
        likely["image_size"] = size
        likely.pop("positions_cover_prefix", None)  # the size decides it
    if not likely:
        return found
    made = form.infer(header, {**likely, **overrides})
    before, after = found.spec.image_size, made.spec.image_size
    same_rows = made.spec.position_rows and made.spec.num_patches == found.spec.num_patches
    if before == after or not same_rows:
        return made
    line = (
        f"its positions are read as those of {_by(after)} pixels, as asked, not resampled from "
        f"{_by(before)}; if the file is of a model for {_by(before)}, resample them first: vitkit "
        f"convert --adapt.image-size {after[0]} {after[1]}"
    )
    return replace(made, warnings=(*made.warnings, line))


def _by(size: tuple[int, int]) -> str:
    return f"{size[0]} x {size[1]}"


def _first(
    form: Format, header: Header, overrides: Mapping[str, Any], hints: Hints
) -> tuple[Inferred, Mapping[str, Any]]:
    """By the file alone; where it cannot be without an image's size, by the first that fits."""
    try:
        return form.infer(header, overrides), overrides
    except CheckpointError:
        for size in hints.sizes():
            sized = {"image_size": size, **overrides}
            with suppress(CheckpointError, SpecError):
                return form.infer(header, sized), sized
        raise


def _fits(spec: ViTSpec, size: Any) -> bool:
    """Whether the positions of a file may be for images of this size."""
    try:
        patches = spec.replace(image_size=size).num_patches
    except SpecError:
        return False
    rows = spec.position_rows
    return not rows or patches in (rows, rows - spec.num_prefix_tokens)


def with_doubt(found: Inferred, form: Format) -> Inferred:
    """Add the line that names every guess of the model, and of its images; or nothing."""
    values = vars(found.spec) | {"image_size": _by(found.spec.image_size)}
    guesses = [f"{name} {values[name]}" for name in GUESSED
               if found.sure.get(name) == "usual" and name not in form.fixed]  # fmt: skip
    if not guesses:
        return found
    if found.sure.get("preprocess") == "usual":
        mean = " ".join(f"{value:g}" for value in found.preprocess.mean)
        std = " ".join(f"{value:g}" for value in found.preprocess.std)
        guesses.append(f"preprocess (mean {mean}, std {std})")
    line = f"the file does not say these, they are only usual: {', '.join(guesses)}; {OTHERWISE}"
    return replace(found, warnings=(*found.warnings, line))
