"""The format of a checkpoint, from its keys, and the model in it.

A value that is only usual for files of a format is a guess. A preset's name or a keyword of the
caller (`Hints`) replaces it; remaining guesses are reported in one line.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from vitkit.errors import CheckpointError, SpecError
from vitkit.io.untrusted import refuse
from vitkit.models.presets import preset
from vitkit.spec import ViTSpec
from vitkit.weights import catalogue, files
from vitkit.weights import checkpoint as own
from vitkit.weights.formats import first_paper, keys, unwrapping
from vitkit.weights.formats.dinov2 import DINOV2
from vitkit.weights.formats.format import Format, Inferred
from vitkit.weights.formats.google import GOOGLE
from vitkit.weights.formats.huggingface import HUGGINGFACE
from vitkit.weights.formats.lucidrains import LUCIDRAINS
from vitkit.weights.formats.timm import DEIT, TIMM

# timm comes last: its names are the most general, and files of others match them, too.
_IN_ORDER = (
    GOOGLE,
    HUGGINGFACE,
    first_paper.TORCHVISION,
    first_paper.JEONSWORLD,
    LUCIDRAINS,
    DINOV2,
    DEIT,
    TIMM,
)
FORMATS: dict[str, Format] = {form.name: form for form in _IN_ORDER}
MALFORMED = (LookupError, TypeError, ValueError, ArithmeticError, AttributeError, RuntimeError)
"""Exceptions of a format's code for documents and shapes that are not of this format."""
GUESSED_FIELDS = (
    "num_heads",
    "head_width",
    "activation",
    "norm_eps",
    "block",
    "pooling",
    "positions",
    "positions_cover_prefix",
    "image_size",
    "rope_temperature",
    "distilled_readout",
    "resnet_variant",
)
"""Fields of `ViTSpec` that change a model's output and that a file may leave open."""
SHAPE_FIELDS = (
    "width",
    "depth",
    "mlp_width",
    "mlp",
    "norm",
    "qk_norm",
    "class_token",
    "distillation_token",
    "num_registers",
    "embedding_norm",
)
"""Fields that tensors always determine; a preset that differs there is another model."""
REMEDY = (
    "if one is wrong, name the model (--model, model=) or the field (--spec.num-heads, num_heads=)"
)


def formats() -> set[str]:
    """Return the names of the formats that can be read and written."""
    return {own.OWN_FORMAT, *FORMATS}


@dataclass(frozen=True)
class Hints:
    """Values for the fields that a file leaves open.

    Attributes:
        fields: fields of `ViTSpec` that the caller names.
        named: the preset that the caller names, with those `fields` in it; or none.
    """

    fields: Mapping[str, Any] = field(default_factory=dict)
    named: ViTSpec | None = None

    @classmethod
    def for_model(cls, model: str | None, overrides: Mapping[str, Any]) -> Hints:
        """Return the hints of `load(..., model=NAME)`; the name may have a tag.

        Raises:
            SettingError: there is no such preset.
            SpecError: overrides that do not exist, or do not fit it.
        """
        if not model:
            return cls()
        return cls(named=preset(model.partition(".")[0], **overrides))

    def differences(self, spec: ViTSpec, *further: str) -> list[str]:
        """Return a line for each field in which a file is not of the named preset.

        Args:
            spec: inferred for the file.
            *further: fields to compare beside `SHAPE_FIELDS`.
        """
        if self.named is None:
            return []
        lines: list[str] = []
        for name in (*SHAPE_FIELDS, *further):
            ours, theirs = getattr(self.named, name), getattr(spec, name)
            if ours != theirs:
                lines.append(f"{name} {ours}, not {theirs}")
        return lines

    def refuse_other_model(self, path: str | Path, spec: ViTSpec) -> None:
        """Raise `CheckpointError` if the named preset is not the model in the file."""
        lines = self.differences(spec, "patch_size")
        problem = f"does not contain the model that --model names: {'; '.join(lines)}"
        refuse(path, {problem: lines})

    @property
    def image_sizes(self) -> list[Any]:
        """Candidate image sizes, most likely first."""
        sizes = []
        if self.named is not None:
            sizes = [self.named.image_size]
        if "image_size" in self.fields:
            return [self.fields["image_size"], *sizes]
        return sizes


# The format of a file, and the model in it.


def recognise(
    source: files.Source,
    overrides: Mapping[str, Any],
    hints: Hints,
    entry: catalogue.CatalogueEntry | None = None,
) -> tuple[Format, files.Source, Inferred]:
    """Return the format of a file, its tensors by that format's names, and its model.

    Args:
        source: the open file.
        overrides: spec fields that hold in any case.
        hints: values for fields that the file leaves open.
        entry: the file's entry in the catalogue, if it has one.

    Raises:
        CheckpointError: no known format, or a file that contradicts itself.
    """
    path = source.header.path
    model = unwrapping.find_model(source, FORMATS)
    form = model.form
    # An entry of the catalogue is as good as a model named by the caller.
    if entry:
        published = {**hints.fields, "image_size": entry.image_size}
        hints = Hints(published, hints.named or preset(entry.preset))
    # Files that vitkit wrote in another format have our description beside theirs.
    description = own.read_description(model.source.header, own.FOREIGN_METADATA_KEY)
    # Fields that hold as if the caller had given them, from our description or the catalogue.
    known: dict[str, Any] = {}
    if description is not None:
        known = {"image_size": description.spec.image_size}
        hints = Hints()
    elif entry is not None:
        known = entry.fields
    with keys.named_errors(path, form.name):
        try:
            # Names first: inference and table know one version of the format's names.
            source = form.prepare(model.source)
            inferred = infer_with_hints(form, source.header, {**known, **overrides}, hints)
        # A format indexes documents and shapes freely.
        except MALFORMED as error:
            raise CheckpointError(f"not a valid file ({type(error).__name__}: {error})") from None
        keys.check_size(inferred.spec, source.header.shapes)
        if description is not None:
            inferred = _with_description(inferred, description)
        elif entry is not None:
            inferred = _as_published(inferred, entry)
    inferred = with_guess_warning(inferred, form)
    warnings = (*inferred.warnings, *model.warnings)
    return form, source, replace(inferred, warnings=warnings, left_out=model.outside)


def _with_description(inferred: Inferred, description: own.Description) -> Inferred:
    """Replace values that are only usual by those that vitkit wrote into the file's header."""
    for name in ("num_classes", "in_channels", "width", "depth"):
        stated, actual = getattr(description.spec, name), getattr(inferred.spec, name)
        if stated != actual:
            raise CheckpointError(f"the header has {name} {stated}, the tensors {actual}")
    # Shapes and the format's own documents go before the header: tools may have changed them.
    usual = [name for name, certainty in inferred.sure.items() if certainty == "usual"]
    fields = {name: getattr(description.spec, name) for name in usual if name != "preprocess"}
    preprocess = description.preprocess if "preprocess" in usual else inferred.preprocess
    return replace(
        inferred,
        spec=inferred.spec.replace(**fields),
        preprocess=preprocess,
        classes=inferred.classes or description.classes,
        sure={**inferred.sure, **dict.fromkeys(usual, "stored")},
        warnings=(),
    )


def _as_published(inferred: Inferred, entry: catalogue.CatalogueEntry) -> Inferred:
    """Take the publisher's preprocessing, where the file has none."""
    if entry.preprocess is None or inferred.sure.get("preprocess") != "usual":
        return inferred
    return replace(
        inferred,
        preprocess=entry.preprocess.replace(image_size=inferred.spec.image_size),
        sure={**inferred.sure, "preprocess": "stored"},
    )


# Hints for values that a file does not state.


def infer_with_hints(
    form: Format, header: files.Header, overrides: Mapping[str, Any], hints: Hints
) -> Inferred:
    """Infer the model of a file; hints decide the fields that are only usual.

    Args:
        form: the file's format.
        header: header of the file, prepared.
        overrides: fields that hold in any case.
        hints: values for fields that are only usual.

    Raises:
        CheckpointError, SpecError: as for `form.infer`.
    """
    try:
        first = form.infer(header, overrides)
    except CheckpointError:
        # The file alone does not decide its image size: try those that the caller may mean.
        for size in hints.image_sizes:
            with suppress(CheckpointError, SpecError):
                sized = {"image_size": size, **overrides}
                first, overrides = form.infer(header, sized), sized
                break
        else:
            raise
    likely = _likely_fields(form, first, hints)
    if not likely:
        return first
    # Hints are given as overrides to a second inference, so that they are checked like those.
    second = form.infer(header, {**likely, **overrides})
    before, after = first.spec.image_size, second.spec.image_size
    same_rows = second.spec.position_rows and second.spec.num_patches == first.spec.num_patches
    # The same number of patches in another grid: the rows are read in another order, so warn.
    if before == after or not same_rows:
        return second
    line = (
        f"its positions are read as those of {_by(after)} pixels, as requested, not resampled "
        f"from {_by(before)}; if the file is of a model for {_by(before)}, resample them first: "
        f"vitkit convert --adapt.image-size {after[0]} {after[1]}"
    )
    return replace(second, warnings=(*second.warnings, line))


def _by(size: tuple[int, int]) -> str:
    return f"{size[0]} x {size[1]}"


def _likely_fields(form: Format, inferred: Inferred, hints: Hints) -> dict[str, Any]:
    """Return the hints for fields that are only usual."""
    spec = inferred.spec
    usual = [name for name in GUESSED_FIELDS if inferred.sure.get(name) == "usual"]
    likely: dict[str, Any] = {}
    # A preset of another shape says nothing about this file, so none of its values is taken.
    if hints.named is not None and not hints.differences(spec):
        for name in usual:
            if name not in form.fixed:
                likely[name] = getattr(hints.named, name)
    for name in usual:
        if name in hints.fields:
            likely[name] = hints.fields[name]
    # An image size is taken only if the position table may be for it.
    likely.pop("image_size", None)
    sizes = [size for size in hints.image_sizes if _fits(spec, size)]
    if "image_size" in usual and sizes:
        likely["image_size"] = sizes[0]
        likely.pop("positions_cover_prefix", None)  # the size decides it
    return likely


def _fits(spec: ViTSpec, size: Any) -> bool:
    """Return True if the positions of a file may be for images of this size."""
    try:
        patches = spec.replace(image_size=size).num_patches
    except SpecError:
        return False
    # Computed positions fit every size; learned ones need a row for each patch.
    rows = spec.position_rows
    return not rows or patches in (rows, rows - spec.num_prefix_tokens)


def with_guess_warning(inferred: Inferred, form: Format) -> Inferred:
    """Add a warning that names every guess about the model and its preprocessing, if any."""
    values = vars(inferred.spec) | {"image_size": _by(inferred.spec.image_size)}
    guesses: list[str] = []
    for name in GUESSED_FIELDS:
        if inferred.sure.get(name) == "usual" and name not in form.fixed:
            guesses.append(f"{name} {values[name]}")
    if not guesses:
        return inferred
    if inferred.sure.get("preprocess") == "usual":
        mean = " ".join(map("{:g}".format, inferred.preprocess.mean))
        std = " ".join(map("{:g}".format, inferred.preprocess.std))
        guesses.append(f"preprocess (mean {mean}, std {std})")
    line = (
        "the file does not state these fields, so they have their usual values: "
        f"{', '.join(guesses)}; {REMEDY}"
    )
    return replace(inferred, warnings=(*inferred.warnings, line))
