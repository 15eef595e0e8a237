"""What a file of weights is, without building the model or reading its numbers."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from vitkit.errors import CheckpointError
from vitkit.spec import Preprocess, ViTSpec
from vitkit.weights import own
from vitkit.weights.catalogue import known
from vitkit.weights.format import Sure
from vitkit.weights.load import recognise
from vitkit.weights.sources import Header, open_source


@dataclass(frozen=True)
class Inspection:
    """What a file says of its model.

    Attributes:
        path: the file.
        format: whose it is, `vitkit` for our own.
        spec: the architecture.
        preprocess: what pictures become.
        parameters: numbers that the file holds.
        dtypes: as the file names them.
        classes: class names; empty where the file has none.
        sure: spec field, or `preprocess` -> `stored` in the file, forced by `shapes`, or only
            `usual` for files of this format.
        warnings: one line each.
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

    def to_json(self) -> dict[str, Any]:
        """Plain JSON values."""
        values = {**asdict(self), "path": str(self.path), "sure": dict(self.sure)}
        return values | {"spec": self.spec.to_json(), "preprocess": self.preprocess.to_json()}

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
        lines.append(f"  classes: {len(self.classes) or 'none'}")
        return "\n".join([*lines, *(f"  warning: {line}" for line in self.warnings)])


def inspect(path: str | Path, *, trust_pickle: bool = False, **overrides: Any) -> Inspection:
    """Say what a file of weights is; arguments and errors as for `load`."""
    entry = known(path)
    with open_source(entry.address if entry else path, trust_pickle=trust_pickle) as source:
        header = source.header
        if (said := own.description(header)) is not None:
            if overrides:
                raise CheckpointError(f"{path}: describes itself; leave {', '.join(overrides)} out")
            own.check(header, said)
            sure: dict[str, Sure] = dict.fromkeys((*said.spec.to_json(), "preprocess"), "stored")
            return _inspection(header, own.OWN, said.spec, said.preprocess, said.classes, sure, ())
        form, source, found = recognise(source, overrides, entry)
        notes = (*source.header.notes, *found.warnings)
        return _inspection(header, form.name, found.spec, found.preprocess, found.classes,
                           found.sure, notes)  # fmt: skip


def _inspection(
    header: Header,
    name: str,
    spec: ViTSpec,
    preprocess: Preprocess,
    classes: tuple[str, ...],
    sure: Mapping[str, Sure],
    warnings: tuple[str, ...],
) -> Inspection:
    count = sum(math.prod(shape) for shape in header.shapes.values())
    dtypes = tuple(sorted(set(header.dtypes.values())))
    return Inspection(header.path, name, spec, preprocess, count, dtypes, classes, sure, warnings)
