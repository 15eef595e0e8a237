"""What a file of weights is, without building the model or reading its numbers."""

from __future__ import annotations

import json
import math
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from vitkit.errors import CheckpointError
from vitkit.spec import Preprocess, ViTSpec
from vitkit.weights.catalogue import known
from vitkit.weights.files.open import Header, open_source
from vitkit.weights.formats import vitkit
from vitkit.weights.formats.format import Sure
from vitkit.weights.formats.key_table import PARTIAL, account
from vitkit.weights.hints import Hints
from vitkit.weights.imagenet_classes import ASSUMED, assumed_names, names_are_assumed
from vitkit.weights.load import recognise, refuse_other_model


@dataclass(frozen=True)
class Inspection:
    """What a file says of its model.

    Attributes:
        path: the file.
        format: whose it is, `vitkit` for our own.
        spec: the architecture.
        preprocess: what images become.
        parameters: numbers that the file holds.
        dtypes: as the file names them.
        classes: class names; empty where the file has none.
        sure: spec field, or `preprocess` -> `stored` in the file, forced by `shapes`, or only
            `usual` for files of this format.
        warnings: one line each.
        metadata: what a vitkit file says besides: `recipe`, `metrics`, `data` and others.
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
        """Plain JSON values."""
        values = {one.name: getattr(self, one.name) for one in fields(self)}
        return values | {
            "path": str(self.path), "sure": dict(self.sure), "metadata": dict(self.metadata),
            "spec": self.spec.to_json(), "preprocess": self.preprocess.to_json(),
        }  # fmt: skip

    def __str__(self) -> str:
        plain = ViTSpec().to_json()
        lines = [
            f"{self.path}: {self.format}, {self.parameters:,} numbers of {', '.join(self.dtypes)}"
        ]
        for name, value in self.spec.to_json().items():
            if name in self.sure or value != plain[name]:
                said = str(value) if not isinstance(value, list) else " x ".join(map(str, value))
                lines.append(f"  {name:<24} {said:<20} {self.sure.get(name, 'usual')}")
        pixels = self.preprocess.to_json()
        text = ", ".join(f"{name} {value}" for name, value in pixels.items())
        lines.append(f"  preprocess: {text} ({self.sure.get('preprocess', 'usual')})")
        lines += self._classes()
        for name, value in self.metadata.items():
            lines += _paragraph(name, _pairs(value))
        for name in ("unknown", "missing", "left_out"):
            lines += _paragraph(f"tensors {name.replace('_', ' ')}", getattr(self, name))
        if self.unknown or self.missing:
            lines.append(f"  load refuses this file; {PARTIAL}")
        return "\n".join([*lines, *(f"  warning: {line}" for line in self.warnings)])

    def _classes(self) -> list[str]:
        if not self.classes:
            return ["  classes: none"]
        how = self.sure.get("classes", "stored")
        return _paragraph(f"classes ({len(self.classes)}, {how})", self.classes, most=10)


UNSET: tuple[Any, ...] = (None, "", [], {})
"""Values of settings that are not worth a word."""


def _pairs(value: Any, name: str = "") -> list[str]:
    """A JSON value as `name value`; of an object, what is set, its objects by `outer.inner`."""
    if not isinstance(value, Mapping) or name.count(".") > 1:
        text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
        text = f"{value:.6g}" if isinstance(value, float) else text
        return [f"{name} {text}".strip()]
    inner = {f"{name}.{key}" if name else key: part for key, part in value.items()}
    said = {key: part for key, part in inner.items() if not (part is False or part in UNSET)}
    return [line for key, part in said.items() for line in _pairs(part, key)]


def _paragraph(title: str, parts: Sequence[str], most: int = 200) -> list[str]:
    """Lines of at most 100 characters, or none where there are no parts."""
    if not parts:
        return []
    shown = [_printable(part[:120]) for part in parts[:most]]
    more = [f"... and {len(parts) - most} more"] if len(parts) > most else []
    return textwrap.wrap(
        f"{_printable(title[:120])}: {', '.join([*shown, *more])}", 100, break_on_hyphens=False,
        initial_indent="  ", subsequent_indent="    ",
    )  # fmt: skip


def _printable(text: str) -> str:
    """The text without what would move a terminal's cursor."""
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)


def inspect(
    path: str | Path, *, model: str | None = None, trust_pickle: bool = False, **overrides: Any
) -> Inspection:
    """Say what a file of weights is; arguments and errors as for `load`."""
    entry, hints = known(path), Hints.of(model, overrides)
    with open_source(entry.address if entry else path, trust_pickle=trust_pickle) as source:
        header = source.header
        if (said := vitkit.description(header)) is not None:
            if overrides:
                raise CheckpointError(f"{path}: describes itself; leave {', '.join(overrides)} out")
            vitkit.check(header, said)
            refuse_other_model(path, hints, said.spec)
            sure: dict[str, Sure] = dict.fromkeys((*said.spec.to_json(), "preprocess"), "stored")
            if names_are_assumed(said.classes, said.document):
                sure["classes"] = "usual"
            made = _inspection(
                header, vitkit.OWN, said.spec, said.preprocess, said.classes, sure, ()
            )
            rest = {name: value for name, value in said.document.items() if name not in BESIDE}
            return replace(made, metadata=rest)
        form, source, found = recognise(source, overrides, hints, entry)
        refuse_other_model(path, hints, found.spec)
        try:
            names = account(form.table(found.spec), found.spec, source.header)
        except CheckpointError as error:
            raise CheckpointError(f"{header.path}: as {form.name}: {error}") from None
        notes = (*source.header.notes, *names.aside, *found.warnings)
        made = _inspection(source.header, form.name, found.spec, found.preprocess, found.classes,
                           found.sure, notes)  # fmt: skip
        return replace(made, unknown=names.unknown, missing=names.missing, left_out=found.left_out)


BESIDE = ("spec", "preprocess", "classes", "sha256", "format_version")
"""Entries of a vitkit file's description that are not repeated in `Inspection.metadata`."""


def _inspection(
    header: Header,
    name: str,
    spec: ViTSpec,
    preprocess: Preprocess,
    classes: tuple[str, ...],
    sure: Mapping[str, Sure],
    warnings: tuple[str, ...],
) -> Inspection:
    if assumed := assumed_names(spec, classes):
        classes, sure, warnings = assumed, {**sure, "classes": "usual"}, (*warnings, ASSUMED)
    count = sum(math.prod(shape) for shape in header.shapes.values())
    dtypes = tuple(sorted(set(header.dtypes.values())))
    return Inspection(header.path, name, spec, preprocess, count, dtypes, classes, sure, warnings)
