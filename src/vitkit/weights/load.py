"""Loading any published checkpoint, whatever its format."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from os import PathLike, fspath
from os.path import exists
from pathlib import Path
from typing import TYPE_CHECKING, Any

import vitkit.data.images.preprocess  # noqa: F401 - a checkpoint's preprocess reads images
from vitkit.errors import CheckpointError
from vitkit.io.untrusted import refuse
from vitkit.messages import escape, few, plural
from vitkit.weights import catalogue, files
from vitkit.weights import checkpoint as parts
from vitkit.weights.checkpoint import Checkpoint, Description, texts
from vitkit.weights.formats.keys import KeyMatch, named_errors, read_tensors

if TYPE_CHECKING:
    from vitkit.weights.recognise_format import Hints


def load(
    path: str | Path,
    *,
    model: str | None = None,
    trust_pickle: bool = False,
    strict: bool = True,
    **overrides: Any,
) -> Checkpoint:
    """Read a checkpoint of any known format; the model is inferred from the file.

    Values that the file does not contain are guessed. Each guess is named in one line of
    `.metadata["warnings"]`, which is also logged (logger `vitkit`).

    Args:
        path: a vitkit, `.safetensors`, `.npz` or (with `trust_pickle`) `.pth` file, a folder (also
            that of a run), an address (`hf://owner/name`, `timm://name`, `https://...`), or the
            name of a published checkpoint (`vitkit models --pretrained`).
        model: a preset's name, which decides fields that the file leaves open, such as heads,
            activation and block of timm's bare weights.
        trust_pickle: read a pickle at all, by torch's `weights_only` reader.
        strict: refuse a file with tensors that are unknown or missing. False leaves out unknown
            ones and fills missing ones with random initial values, the same in every call;
            `.left_out` and `.missing` name them, and a warning has a line on each.
            A tensor of a wrong shape is always refused, and so is an incomplete vitkit file.
        **overrides: fields of `ViTSpec` that the file cannot contain, such as `num_heads=6` where
            heads are not 64 wide.

    Returns:
        The model in eval mode in float32, with preprocessing and class names as far as the file
        has them; `.metadata["sure"]` has for each field of the spec how it is known. A head of
        1,000 classes without names gets those of ImageNet-1k (`.classes_assumed` is then true).

    Raises:
        CheckpointError: a file that is damaged, of no known format or of another model; one line.
        SettingError: there is no preset of the name `model`.
        SpecError: a field that does not exist.
    """
    checkpoint = load_with(path, model=model, trust_pickle=trust_pickle, strict=strict, **overrides)
    for line in checkpoint.warnings:
        # A line may quote names of tensors, which hold any text.
        logging.getLogger("vitkit").warning("%s: %s", path, escape(line))
    return checkpoint


def as_checkpoint(source: Checkpoint | str | PathLike[str]) -> Checkpoint:
    """Return a checkpoint as it is, or load it from its path.

    Raises:
        CheckpointError: neither a checkpoint nor a path, or a file that is not a checkpoint.
    """
    if isinstance(source, Checkpoint):
        return source
    if not isinstance(source, str | PathLike):
        raise CheckpointError(
            f"a {type(source).__name__} is not a checkpoint; pass the result of vitkit.load, "
            "which includes preprocessing and class names, or the path of a file or a run"
        )
    return load(fspath(source))


def load_with(
    path: str | Path,
    hints: Hints | None = None,
    *,
    model: str | None = None,
    trust_pickle: bool = False,
    strict: bool = True,
    **overrides: Any,
) -> Checkpoint:
    """Read a checkpoint as `load` does, with given hints and without logging.

    Args:
        path: as for `load`.
        hints: values for fields that the file leaves open.
        model: as for `load`.
        trust_pickle: as for `load`.
        strict: as for `load`.
        **overrides: as for `load`.

    Raises:
        CheckpointError: as for `load`.
    """
    if model:
        from vitkit.weights.recognise_format import Hints

        # Hints only fill what the file leaves open; overrides hold in any case.
        hints = Hints.for_model(model, overrides)
    with opened(path, overrides, trust_pickle=trust_pickle) as (source, description, entry):
        if description is None:
            checkpoint = _load_foreign(source, overrides, hints, entry, strict=strict)
        else:
            checkpoint = _load_own(source, description)
    # Class names are not part of most formats; a head of 1,000 classes is ImageNet's.
    names = parts.assumed_names(checkpoint.model.spec, checkpoint.classes)
    if names:
        metadata = parts.with_assumption(checkpoint.metadata)
        checkpoint = replace(checkpoint, classes=names, metadata=metadata)
    # Last, as the origin has the class names.
    checkpoint.model.origin = checkpoint.origin
    if model and hints is not None:
        hints.refuse_other_model(path, checkpoint.model.spec)
    return checkpoint


@contextmanager
def opened(
    path: str | Path, overrides: Mapping[str, Any], *, trust_pickle: bool
) -> Iterator[tuple[files.Source, Description | None, catalogue.CatalogueEntry | None]]:
    """Open a checkpoint: the file, its description if it is ours, its entry in the catalogue.

    Args:
        path: as for `load`.
        overrides: spec fields of the caller; a file of ours takes none.
        trust_pickle: as for `load`.

    Raises:
        CheckpointError: as for `load`.
    """
    entry = None
    # A file that exists goes before a published checkpoint of that name.
    if not isinstance(path, str | PathLike) or not exists(path):
        path, entry = catalogue.locate(path, trust_pickle=trust_pickle)
    with files.open_source(Path(path), trust_pickle=trust_pickle) as source:
        description = parts.read_description(source.header)
        complete = f"describes itself completely; leave out {', '.join(overrides)}"
        refuse(path, {complete: description is not None and overrides})
        yield source, description, entry


def _load_own(source: files.Source, description: Description) -> Checkpoint:
    """Read the checkpoint in an open file of ours."""
    model, dtype, notes = parts.filled_model(description.spec, parts.read_own(source, description))
    metadata = dict(description.document)
    if notes:
        metadata["notes"] = [*texts(metadata, "notes"), *notes]
    return Checkpoint(
        model=model,
        preprocess=description.preprocess,
        classes=description.classes,
        metadata=metadata,
        path=source.header.path,
        dtype=dtype,
    )


def _load_foreign(
    source: files.Source,
    overrides: Mapping[str, Any],
    hints: Hints | None,
    entry: catalogue.CatalogueEntry | None,
    *,
    strict: bool,
) -> Checkpoint:
    """Read the checkpoint in an open file of a foreign format; errors as for `load`."""
    # imported here: a file of vitkit needs no other format
    from vitkit.weights.recognise_format import Hints, recognise

    path = source.header.path
    form, source, inferred = recognise(source, overrides, hints or Hints(), entry)
    spec = inferred.spec
    # The error names the format, as the file may have been taken for another one than it is.
    with named_errors(path, form.name):
        tensors, match = read_tensors(
            form.table(spec), spec, parts.tensor_shapes(spec), source, strict=strict
        )
    if match.fresh:
        tensors |= parts.initial_values(spec, match.fresh)  # only with strict=False
    model, dtype, rounding_notes = parts.filled_model(spec, tensors)
    metadata: dict[str, Any] = {}
    if entry is not None:
        metadata |= {"catalogue": entry.name, "licence": entry.licence}
    metadata["sure"] = dict(inferred.sure)
    metadata["warnings"] = [*inferred.warnings, *_partial_warnings(match)]
    metadata["notes"] = [*source.header.notes, *match.ignored, *rounding_notes]
    # Outside of the model, unknown to the format, or without their partners.
    left_out = [*inferred.left_out, *match.unknown, *match.unusable]
    if left_out:
        metadata["left_out"] = left_out
    if match.fresh:
        metadata["fresh"] = list(match.fresh)
    return Checkpoint(
        model=model,
        preprocess=inferred.preprocess,
        classes=inferred.classes,
        format=form.name,
        metadata=metadata,
        path=path,
        dtype=dtype,
    )


def _partial_warnings(match: KeyMatch) -> list[str]:
    """Return a line on tensors that are not read, and one on tensors that start at random."""
    lines: list[str] = []
    if match.unknown:
        count = plural(len(match.unknown), "unknown tensor")
        lines.append(f"{count} left out: {few(match.unknown)}")
    if match.fresh:
        count = plural(len(match.missing), "missing tensor")
        lines.append(
            f"{count} ({few(match.missing)}): random initial values for {few(match.fresh)}"
        )
    if match.unusable:
        lines.append(f"left out, as the tensors they need are missing: {few(match.unusable)}")
    return lines
