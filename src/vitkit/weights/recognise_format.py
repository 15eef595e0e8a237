"""Recognise the format of a checkpoint from its keys, among all formats by name."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from vitkit.errors import CheckpointError, SpecError
from vitkit.models.presets import preset
from vitkit.spec import ViTSpec
from vitkit.weights.catalogue import CatalogueEntry
from vitkit.weights.formats.dinov2 import DINOV2
from vitkit.weights.formats.first_paper import JEONSWORLD, TORCHVISION
from vitkit.weights.formats.format import (
    FOREIGN_METADATA_KEY,
    OWN_FORMAT,
    Description,
    Format,
    Inferred,
    read_description,
)
from vitkit.weights.formats.google import GOOGLE
from vitkit.weights.formats.huggingface import HUGGINGFACE
from vitkit.weights.formats.key_table import check_size
from vitkit.weights.formats.lucidrains import LUCIDRAINS
from vitkit.weights.formats.timm import DEIT, TIMM
from vitkit.weights.formats.unwrapping import find_model, unknown_format
from vitkit.weights.hints import Hints, infer_with_hints, with_guess_warning
from vitkit.weights.tensor_file import Source

MALFORMED = (
    LookupError,
    TypeError,
    ValueError,
    ArithmeticError,
    AttributeError,
    RuntimeError,
)
"""Exceptions of a format's code for documents and shapes that are not of this format."""


def refuse_other_model(path: str | Path, hints: Hints, spec: ViTSpec) -> None:
    """Raise `CheckpointError` if the named preset is not the model in the file."""
    differences = hints.differences(spec, "patch_size")
    if differences:
        raise CheckpointError(
            f"{path}: does not contain the model that --model names: {'; '.join(differences)}"
        )


def recognise(
    source: Source,
    overrides: Mapping[str, Any],
    hints: Hints,
    entry: CatalogueEntry | None = None,
) -> tuple[Format, Source, Inferred]:
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
    model = find_model(source, FORMATS.values())
    if model is None:
        raise unknown_format(source, FORMATS)
    form = model.form
    # An entry of the catalogue is as good as a model named by the caller.
    if entry:
        published = {**hints.fields, "image_size": entry.image_size}
        hints = Hints(published, hints.named or preset(entry.preset))
    # Files that vitkit wrote in another format have our description beside theirs.
    description = read_description(model.source.header, FOREIGN_METADATA_KEY)
    # Fields that hold as if the caller had given them, from our description or the catalogue.
    known: dict[str, Any] = {}
    if description is not None:
        known = {"image_size": description.spec.image_size}
        hints = Hints()
    elif entry is not None:
        known = entry.fields
    try:
        # Names first: inference and table know one version of the format's names.
        source = form.prepare(model.source)
        inferred = infer_with_hints(form, source.header, {**known, **overrides}, hints)
        check_size(inferred.spec, source.header.shapes)
        if description is not None:
            inferred = _with_description(inferred, description)
        elif entry is not None:
            inferred = _as_published(inferred, entry)
        inferred = with_guess_warning(inferred, form)
    except (SpecError, CheckpointError) as error:
        raise CheckpointError(f"{path}: as {form.name}: {error}") from None
    # A format indexes documents and shapes freely; here its errors get the name of the file.
    except MALFORMED as error:
        raise CheckpointError(
            f"{path}: not a valid {form.name} file ({type(error).__name__}: {error})"
        ) from None
    warnings = (*inferred.warnings, *model.warnings)
    return form, source, replace(inferred, warnings=warnings, left_out=model.outside)


def _with_description(inferred: Inferred, description: Description) -> Inferred:
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


def _as_published(inferred: Inferred, entry: CatalogueEntry) -> Inferred:
    """Take the publisher's preprocessing, where the file has none."""
    if entry.preprocess is None or inferred.sure.get("preprocess") != "usual":
        return inferred
    return replace(
        inferred,
        preprocess=entry.preprocess.replace(image_size=inferred.spec.image_size),
        sure={**inferred.sure, "preprocess": "stored"},
    )


# All foreign formats by name, in the order in which `detect` is called on a file.

# timm comes last: its names are the most general, and files of others match them, too.
_IN_ORDER = (GOOGLE, HUGGINGFACE, TORCHVISION, JEONSWORLD, LUCIDRAINS, DINOV2, DEIT, TIMM)
FORMATS: dict[str, Format] = {form.name: form for form in _IN_ORDER}


def formats() -> set[str]:
    """Return the names of the formats that can be read and written."""
    return {OWN_FORMAT, *FORMATS}
