"""Finding the ViT among the tensors of a file, behind what other code puts before their names.

Data parallelism, compilation and averaging wrap a model; Lightning modules and own classes hold it
as a part. Then all its tensors have names with one common prefix. What lies outside of that prefix
is not read, and it is listed.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from vitkit.errors import CheckpointError, plural
from vitkit.weights.files.open import Source
from vitkit.weights.formats.format import Format
from vitkit.weights.formats.key_table import few, is_integer

WHOLE = ("module.", "_orig_mod.", "backbone.")
"""Prefixes that all names of a file may have; they are taken off before a format is looked for."""
INSIDE = ("_orig_mod.", "_fsdp_wrapped_module.", "_checkpoint_wrapped_module.")
"""What compiling or sharding some parts of a model puts into the middle of names."""
LONGEST = 5
"""Most parts of a prefix, as in `model.module.student.vit.`."""
LEAST = 8
"""Fewest tensors of a ViT: each block alone has more."""
CHOSEN = {"base_encoder.": "momentum_encoder."}
"""Of two models in one file, the one to take, and the other: MoCo v3 evaluates its base encoder."""
UNSUPPORTED = {
    "clip": "*clip*", "clip_vision_model": "*clip*", "siglip": "*siglip*",
    "siglip_vision_model": "*siglip*", "siglip2": "*siglip*", "siglip2_vision_model": "*siglip*",
    "dinov3_vit": "*dinov3*", "ijepa": "*ijepa*",
}  # fmt: skip
"""`model_type` of transformers -> pattern of the catalogue's names for such models."""


class Found(NamedTuple):
    """A model in a file.

    Attributes:
        form: the format of its names.
        source: its tensors, without the prefix.
        prefix: what was before the names; empty where there was nothing.
        outside: the names of the other tensors, which are not read.
    """

    form: Format
    source: Source
    prefix: str = ""
    outside: tuple[str, ...] = ()

    @property
    def warnings(self) -> tuple[str, ...]:
        """A line on what is not read, if there is something."""
        if not self.outside:
            return ()
        parts = Counter(name.partition(".")[0] for name in self.outside)
        said = [f"{part} ({plural(count, 'tensor')})" for part, count in parts.items()]
        return (f"left out, as it is outside of {self.prefix!r}: {few(said, most=10)}",)


def find_model(source: Source, forms: Iterable[Format]) -> Found | None:
    """The model in a file: its format, and its tensors by the format's names; None for no model.

    Raises:
        CheckpointError: several models, of which none can be preferred.
    """
    forms = tuple(forms)
    source = _without_wrappers(_without_whole_prefix(source))
    if form := _format_of(source, forms):
        return Found(form, source)
    models: dict[str, Found] = {}
    for prefix, names in _groups(source).items():
        if any(prefix.startswith(shorter) for shorter in models):
            continue
        inner = source.renamed({name: name[len(prefix) :] for name in names})
        if form := _format_of(inner, forms):
            models[prefix] = _taken(source, prefix, names, form)
    for prefix in list(models):
        for chosen, other in CHOSEN.items():
            if prefix.endswith(chosen):
                models.pop(prefix.removesuffix(chosen) + other, None)
    if len(models) > 1:
        first = next(iter(models))
        raise CheckpointError(
            f"{source.header.path}: holds {len(models)} models, under {few(list(models))}; keep "
            f"the tensors of one, such as those whose names start with {first!r}"
        )
    return next(iter(models.values()), None)


def unknown_format(source: Source, known: Iterable[str]) -> CheckpointError:
    """The error for a file in which no model was found."""
    header = source.header
    kind = header.documents["config"].get("model_type") if "config" in header.documents else None
    if isinstance(kind, str) and kind in UNSUPPORTED:
        return CheckpointError(
            f"{header.path}: transformers' model_type {kind!r} is not supported; "
            f"`vitkit models --pretrained '{UNSUPPORTED[kind]}'` lists such models as timm has them"
        )
    names, more = ", ".join(list(source)[:3]), ", ..." if len(source) > 3 else ""
    said = f"; config.json says model_type {kind!r}" if isinstance(kind, str) else ""
    return CheckpointError(
        f"{header.path}: {plural(len(source), 'tensor')} ({names}{more}) of no known "
        f"format{said}; known are vitkit, {', '.join(known)}"
    )


def plain_head(source: Source, root: str, target: str) -> Source:
    """The one linear layer under `root` as `target`, wherever a container such as
    `nn.Sequential(nn.Dropout(), nn.Linear(768, 3))` puts it; more than one layer is left alone.

    Args:
        source: whose names are changed.
        root: what all names of the head start with, such as `heads.`.
        target: the name of the layer in the format, such as `heads.head`.
    """
    names = {name for name in source if name.startswith(root)}
    layer = next((n.removesuffix(".weight") for n in names if n.endswith(".weight")), target)
    matrix = len(source.header.shapes.get(f"{layer}.weight", ())) == 2
    known = re.sub(r"(\.\d+)+$", "", layer) in (root.rstrip("."), target)
    if layer == target or not known or not matrix or names - {f"{layer}.weight", f"{layer}.bias"}:
        return source
    new = {name: name.replace(layer, target, 1) if name in names else name for name in source}
    note = f"the head is read from {layer}"
    if re.search(r"\.[1-9]\d*$", layer):
        note += "; what was before it has no tensors and is taken for dropout"
    return source.renamed(new, note)


def _format_of(source: Source, forms: Sequence[Format]) -> Format | None:
    return next((form for form in forms if form.detect(source.header)), None)


def _without_whole_prefix(source: Source) -> Source:
    for prefix in WHOLE:
        names = list(source)
        if names and all(name.startswith(prefix) for name in names):
            note = f"prefix {prefix!r} taken off"
            new = {name: name.removeprefix(prefix) for name in names}
            return _without_whole_prefix(source.renamed(new, note))
    return source


def _without_wrappers(source: Source) -> Source:
    for part in INSIDE:
        names = {name: name.replace(part, "") for name in source}
        changed = sum(old != new for old, new in names.items())
        if changed and len(set(names.values())) == len(names):
            source = source.renamed(names, f"{part!r} taken out of {changed} names")
    return source


def _groups(source: Source) -> Mapping[str, list[str]]:
    """Prefix -> the names that have it, for prefixes that a model may have; short ones first."""
    groups: dict[str, list[str]] = {}
    for name in source:
        parts = name.split(".")
        for count in range(1, min(LONGEST, len(parts) - 1) + 1):
            groups.setdefault(".".join(parts[:count]) + ".", []).append(name)
    large = {prefix: names for prefix, names in groups.items() if len(names) >= LEAST}
    return dict(sorted(large.items(), key=lambda group: group[0].count(".")))


def _taken(source: Source, prefix: str, names: Sequence[str], form: Format) -> Found:
    inside = {name: name[len(prefix) :] for name in names}
    if prefix.endswith("base_encoder."):  # MoCo's head is for its own training
        inside = {name: new for name, new in inside.items() if not new.startswith("head.")}
    notes, dtypes = [f"prefix {prefix!r} taken off"], source.header.dtypes
    outside = [name for name in source if name not in inside]
    if counts := [name for name in outside if is_integer(dtypes[name])]:
        notes.append(f"whole numbers, no weights, left out: {few(counts)}")
    outside = [name for name in outside if name not in counts]
    return Found(form, source.renamed(inside, *notes), prefix, tuple(outside))
