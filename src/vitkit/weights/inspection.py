"""Inspecting a file of weights without building the model or reading its numbers."""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from vitkit.messages import escape, few
from vitkit.spec import Preprocess, ViTSpec
from vitkit.weights import catalogue, checkpoint, files, load, recognise_format
from vitkit.weights.formats.format import Inferred, Sure
from vitkit.weights.formats.keys import PARTIAL_HINT, match_keys, named_errors

SHOWN_APART = ("spec", "preprocess", "classes", "sha256", "format_version")
"""Entries of a vitkit file's description that are not repeated in `Inspection.metadata`."""
LONGEST_ENTRY = 4000
"""Characters of an entry of the metadata that are shown."""


@dataclass(frozen=True)
class Inspection:
    """The description of a file's model.

    Attributes:
        path: the file.
        format: its name, `vitkit` for our own.
        spec: the architecture.
        preprocess: how images are resized and normalised.
        parameters: count of numbers in the file.
        dtypes: as the file names them.
        classes: class names; empty where the file has none.
        sure: spec field, or `preprocess` -> `stored` in the file, forced by `shapes`, or only
            `usual` for files of this format.
        warnings: one line each.
        metadata: other entries of a vitkit file: `recipe`, `metrics`, `data` and others.
        unknown: names of tensors that belong to nothing known, for which `load` refuses the file.
        missing: names of tensors that the model needs and the file lacks, likewise.
        left_out: names of tensors outside of the model, which `load` leaves out.
    """

    path: Path
    format: str
    spec: ViTSpec
    preprocess: Preprocess
    parameters: int
    dtypes: tuple[str, ...]
    classes: tuple[str, ...]
    sure: Mapping[str, Sure]
    warnings: tuple[str, ...]
    metadata: Mapping[str, Any] = field(default_factory=dict)
    unknown: tuple[str, ...] = ()
    missing: tuple[str, ...] = ()
    left_out: tuple[str, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """Return plain JSON values."""
        return {
            **vars(self),
            "path": str(self.path),
            "sure": dict(self.sure),
            "metadata": dict(self.metadata),
            "spec": self.spec.to_json(),
            "preprocess": self.preprocess.to_json(),
        }

    def __str__(self) -> str:
        dtypes = ", ".join(self.dtypes)
        lines = [f"{self.path}: {self.format}, {self.parameters:,} parameters in {dtypes}"]
        # Fields that no format infers are shown only where they differ from the default.
        defaults = ViTSpec().to_json()
        for name, value in self.spec.to_json().items():
            if name in self.sure or value != defaults[name]:
                text = " x ".join(map(str, value)) if isinstance(value, list) else str(value)
                lines.append(f"  {name:<24} {text:<20} {self.sure.get(name, 'usual')}")
        preprocess = self.preprocess.to_json()
        text = ", ".join(f"{name} {value}" for name, value in preprocess.items())
        lines.append(f"  preprocess: {text} ({self.sure.get('preprocess', 'usual')})")
        classes = "classes: none"
        if self.classes:
            count, how = len(self.classes), self.sure.get("classes", "stored")
            classes = f"classes ({count}, {how}): {few(self.classes, 10)}"
        lines.append(f"  {classes}")
        for name, value in self.metadata.items():
            lines.append(f"  {name}: {json.dumps(value, ensure_ascii=False)[:LONGEST_ENTRY]}")
        for name in ("unknown", "missing", "left_out"):
            if getattr(self, name):
                title = f"tensors {name.replace('_', ' ')}"
                lines.append(f"  {title}: {few(getattr(self, name), 200)}")
        if self.unknown or self.missing:
            lines.append(f"  vitkit.load refuses this file; {PARTIAL_HINT}")
        lines += [f"  warning: {line}" for line in self.warnings]
        # Names of tensors and classes hold any text: a terminal must not obey it.
        return "\n".join(map(escape, lines))


def inspect(
    path: str | Path, *, model: str | None = None, trust_pickle: bool = False, **overrides: Any
) -> Inspection:
    """Describe the model in a file of weights.

    Args:
        path: as for `load`.
        model: as for `load`.
        trust_pickle: as for `load`.
        **overrides: as for `load`.

    Returns:
        The format, the spec and the preprocessing with how sure each is, the parameters, and the
        names of tensors for which `load` refuses the file; `print` shows them as a text.

    Raises:
        CheckpointError, SettingError, SpecError: as for `load`.
    """
    hints = recognise_format.Hints.for_model(model, overrides)
    with load.opened(path, overrides, trust_pickle=trust_pickle) as (source, description, entry):
        if description is None:
            inspection = _inspect_foreign(source, overrides, hints, entry)
        else:
            inspection = _inspect_own(source.header, description)
    hints.refuse_other_model(path, inspection.spec)
    return inspection


def _inspect_own(header: files.Header, description: checkpoint.Description) -> Inspection:
    """Describe the model in an open file of ours."""
    checkpoint.check_description(header, description)
    # A file of ours states every field, so nothing of it is a guess.
    fields_of_spec = description.spec.to_json()
    sure: dict[str, Sure] = dict.fromkeys((*fields_of_spec, "preprocess"), "stored")
    if checkpoint.names_are_assumed(description.classes, description.document):
        sure["classes"] = "usual"
    metadata = dict(description.document)
    for name in SHOWN_APART:
        metadata.pop(name, None)
    inferred = Inferred(description.spec, description.preprocess, description.classes, sure)
    return replace(_inspection(header, checkpoint.OWN_FORMAT, inferred), metadata=metadata)


def _inspect_foreign(
    source: files.Source,
    overrides: Mapping[str, Any],
    hints: recognise_format.Hints,
    entry: catalogue.CatalogueEntry | None,
) -> Inspection:
    """Describe the model in an open file of a foreign format: by names, shapes and documents."""
    form, source, inferred = recognise_format.recognise(source, overrides, hints, entry)
    header, spec = source.header, inferred.spec
    with named_errors(header.path, form.name):
        # By names alone: `load` also compares shapes and numbers.
        match = match_keys(form.table(spec), spec, checkpoint.tensor_shapes(spec).keys(), header)
    notes = (*header.notes, *match.ignored, *inferred.warnings)
    inspection = _inspection(header, form.name, replace(inferred, warnings=notes))
    return replace(
        inspection, unknown=match.unknown, missing=match.missing, left_out=inferred.left_out
    )


def _inspection(header: files.Header, name: str, inferred: Inferred) -> Inspection:
    """Return the inspection of a file with names of classes, assumed ones where it has none."""
    classes = inferred.classes
    sure = inferred.sure
    warnings = inferred.warnings
    # As `load` does it, so that both name the same classes.
    assumed = checkpoint.assumed_names(inferred.spec, classes)
    if assumed:
        classes = assumed
        sure = {**sure, "classes": "usual"}
        warnings = (*warnings, checkpoint.ASSUMED)
    return Inspection(
        path=header.path,
        format=name,
        spec=inferred.spec,
        preprocess=inferred.preprocess,
        parameters=sum(map(math.prod, header.shapes.values())),
        dtypes=tuple(sorted(set(header.dtypes.values()))),
        classes=classes,
        sure=sure,
        warnings=warnings,
    )
