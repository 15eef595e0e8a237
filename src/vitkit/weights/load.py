"""Any published checkpoint in, whatever its format: opened, recognised, understood, read."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from vitkit.errors import CheckpointError, SpecError, plural
from vitkit.models.presets import preset
from vitkit.models.vit import ViT
from vitkit.spec import ViTSpec
from vitkit.weights.catalogue import Entry, known
from vitkit.weights.checkpoint import Checkpoint
from vitkit.weights.files.open import Source, open_source
from vitkit.weights.formats import vitkit
from vitkit.weights.formats.format import Format, Inferred
from vitkit.weights.formats.key_table import Account, check_size, few, read_tensors
from vitkit.weights.formats.registry import FORMATS
from vitkit.weights.formats.unwrapping import find_model, unknown_format
from vitkit.weights.hints import Hints, infer, with_doubt
from vitkit.weights.imagenet_classes import assumed_names, with_assumption


def load(
    path: str | Path,
    *,
    model: str | None = None,
    trust_pickle: bool = False,
    strict: bool = True,
    **overrides: Any,
) -> Checkpoint:
    """Read a checkpoint of any known format; the model is inferred from the file.

    What the file does not say is guessed. A guess is told in one line of `.metadata["warnings"]`,
    which is also logged (logger `vitkit`).

    Args:
        path: a vitkit, `.safetensors`, `.npz` or (with `trust_pickle`) `.pth` file, a folder (also
            that of a run), an address (`hf://owner/name`, `timm://name`, `https://...`), or the
            name of a published checkpoint (`vitkit models --pretrained`).
        model: a preset's name, which decides what the file does not say, such as heads, activation
            and block of timm's bare weights.
        trust_pickle: read a pickle at all, by torch's `weights_only` reader.
        strict: refuse a file with tensors that are unknown or missing. False leaves out what is
            unknown and fills what is missing with random initial values, the same in every call;
            `.metadata["left_out"]` and `["fresh"]` name them, `["warnings"]` has a line on each.
            A tensor of a wrong shape is always refused, and so is a vitkit file that is not whole.
        **overrides: fields of `ViTSpec` that the file cannot say, such as `num_heads=6` where heads
            are not 64 wide.

    Returns:
        The model in eval mode in float32, with preprocessing and class names as far as the file
        has them; `.metadata["sure"]` says how each field of the spec is known. A head of 1,000
        classes without names gets those of ImageNet-1k (`.classes_assumed` is then true).

    Raises:
        CheckpointError: what is wrong with the file, in one line; or it is of another model.
        SettingError: there is no preset of the name `model`.
        SpecError: a field that does not exist.
    """
    hints = Hints.of(model, overrides)
    stored = load_with(path, hints, trust_pickle=trust_pickle, strict=strict, **overrides)
    refuse_other_model(path, hints, stored.model.spec)
    for line in stored.warnings:
        logging.getLogger("vitkit").warning("%s: %s", path, line)
    return stored


def refuse_other_model(path: str | Path, hints: Hints, spec: ViTSpec) -> None:
    """Raise `CheckpointError` where the named preset is not the model that the file holds."""
    if found := hints.differences(spec, "patch_size"):
        raise CheckpointError(f"{path}: of another model than --model names: {'; '.join(found)}")


def load_with(
    path: str | Path,
    hints: Hints,
    *,
    trust_pickle: bool = False,
    strict: bool = True,
    **overrides: Any,
) -> Checkpoint:
    """Read a checkpoint as `load` does, and log nothing; `hints` decide what the file leaves open.

    Raises:
        CheckpointError: what is wrong with the file, in one line.
    """
    entry = known(path)
    with open_source(entry.address if entry else path, trust_pickle=trust_pickle) as source:
        said = vitkit.description(source.header)
        if said is None:
            return _named(read(source, overrides, hints, entry, strict=strict))
        if overrides:
            raise CheckpointError(f"{path}: describes itself; leave {', '.join(overrides)} out")
        tensors = vitkit.read_own(source, said)
        model, dtype, rounded = _filled(said.spec, tensors)
        document = dict(said.document)
        if rounded:
            earlier = document.get("notes")
            document["notes"] = [*(earlier if isinstance(earlier, list) else []), *rounded]
        return _named(Checkpoint(model, said.preprocess, said.classes, vitkit.OWN, document,
                                 source.header.path, dtype))  # fmt: skip


def _named(found: Checkpoint) -> Checkpoint:
    """The checkpoint; with ImageNet-1k's class names where they are assumed."""
    names = assumed_names(found.model.spec, found.classes)
    if not names:
        return found
    return replace(found, classes=names, metadata=with_assumption(found.metadata))


def _filled(spec: ViTSpec, tensors: dict[str, Tensor]) -> tuple[ViT, str, list[str]]:
    """A model in eval mode with these weights as float32, the dtype they had, and what was lost.

    It takes the tensors out of the dictionary, so that the model is the only copy of them.
    """
    with torch.device("meta"):
        model = ViT(spec)
    found = {str(tensor.dtype).removeprefix("torch.") for tensor in tensors.values()}
    floats: dict[str, Tensor] = {}
    rounded = 0
    for name in list(tensors):
        stored = tensors.pop(name)
        floats[name] = stored.float()
        if stored.dtype == torch.float64:
            rounded += not torch.equal(floats[name].double(), stored)
    model.load_state_dict(floats, assign=True)
    be = "is" if rounded == 1 else "are"
    said = f"{plural(rounded, 'tensor')} of float64 {be} rounded to float32"
    notes = [said] if rounded else []
    dtype = found.pop() if len(found) == 1 else "float32"
    return model.eval(), "float32" if dtype == "float64" else dtype, notes


def formats() -> set[str]:
    """The names of the formats that can be read and written."""
    return {"vitkit", *FORMATS}


def read(
    source: Source,
    overrides: Mapping[str, Any],
    hints: Hints,
    entry: Entry | None = None,
    *,
    strict: bool = True,
) -> Checkpoint:
    """The checkpoint in an open file of a foreign format; errors as for `load`."""
    path = source.header.path
    form, source, inferred = recognise(source, overrides, hints, entry)
    try:
        tensors, found = read_tensors(
            form.table(inferred.spec), inferred.spec, source, strict=strict
        )
    except CheckpointError as error:
        reason = str(error).removeprefix(f"{path}: ")
        raise CheckpointError(f"{path}: as {form.name}: {reason}") from None
    if found.fresh:
        tensors |= _random(inferred.spec, found.fresh)
    model, dtype, rounded = _filled(inferred.spec, tensors)
    metadata: dict[str, Any] = {"catalogue": entry.name, "licence": entry.licence} if entry else {}
    metadata |= {
        "sure": dict(inferred.sure),
        "warnings": [*inferred.warnings, *partial_lines(found)],
        "notes": [*source.header.notes, *found.aside, *rounded],
    }
    left_out = [*inferred.left_out, *found.unknown, *found.alone]
    metadata |= {"left_out": left_out} if left_out else {}
    metadata |= {"fresh": list(found.fresh)} if found.fresh else {}
    return Checkpoint(
        model, inferred.preprocess, inferred.classes, form.name, metadata, path, dtype
    )


def _random(spec: ViTSpec, names: Iterable[str]) -> dict[str, Tensor]:
    """Initial values of some tensors of a model, always the same; no generator is advanced."""
    with torch.device("cpu"), torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(0)  # `torch.manual_seed` would also seed every GPU
        made = ViT(spec).state_dict()
    return {name: made[name].float() for name in names}


def partial_lines(found: Account) -> list[str]:
    """A line on what of a file is not read, and one on what starts at random."""
    lines = []
    if found.unknown:
        unknown = plural(len(found.unknown), "unknown tensor")
        lines.append(f"{unknown} left out: {few(found.unknown)}")
    if found.fresh:
        missing = plural(len(found.missing), "missing tensor")
        lines.append(
            f"{missing} ({few(found.missing)}), so that these have random initial values: "
            f"{few(found.fresh)}"
        )
    if found.alone:
        lines.append(f"left out, as what belongs to them is missing: {few(found.alone)}")
    return lines


def recognise(
    source: Source, overrides: Mapping[str, Any], hints: Hints, entry: Entry | None = None
) -> tuple[Format, Source, Inferred]:
    """Whose file it is, the file with that format's names, and what it says of the model."""
    path = source.header.path
    inside = find_model(source, FORMATS.values())
    if inside is None:
        raise unknown_format(source, FORMATS)
    form, source = inside.form, inside.source
    if entry:
        published = {**hints.asked, "image_size": entry.image_size}
        hints = Hints(published, hints.named or preset(entry.preset))
    told = vitkit.description(source.header, vitkit.ABOUT)
    said = {"image_size": told.spec.image_size} if told else entry.fields if entry else {}
    try:
        source = form.prepare(source)
        found = infer(form, source.header, {**said, **overrides}, Hints() if told else hints)
        check_size(found.spec, source.header.shapes)
        if told is not None:
            found = _completed(found, told)
        elif entry is not None:
            found = _as_published(found, entry)
        found = with_doubt(found, form)
        warnings = (*found.warnings, *inside.warnings)
        return form, source, replace(found, warnings=warnings, left_out=inside.outside)
    except (SpecError, CheckpointError) as error:
        raise CheckpointError(f"{path}: as {form.name}: {error}") from None
    except (LookupError, TypeError, ValueError, ArithmeticError, AttributeError,
            RuntimeError) as error:  # fmt: skip
        raise CheckpointError(
            f"{path}: as {form.name}: not what such a file holds ({type(error).__name__}: {error})"
        ) from None


def _completed(inferred: Inferred, told: vitkit.Description) -> Inferred:
    """What only was usual, as vitkit itself wrote it into the file's header."""
    for name in ("num_classes", "in_channels", "width", "depth"):
        if getattr(told.spec, name) != getattr(inferred.spec, name):
            raise CheckpointError(
                f"the header says {name} {getattr(told.spec, name)}, the tensors "
                f"{getattr(inferred.spec, name)}"
            )
    fields = [name for name, how in inferred.sure.items() if how == "usual"]
    spec = {name: getattr(told.spec, name) for name in fields if name != "preprocess"}
    return replace(
        inferred,
        spec=inferred.spec.replace(**spec),
        preprocess=told.preprocess if "preprocess" in fields else inferred.preprocess,
        classes=inferred.classes or told.classes,
        sure={**inferred.sure, **dict.fromkeys(fields, "stored")},
        warnings=(),
    )


def _as_published(inferred: Inferred, entry: Entry) -> Inferred:
    """What images become, where the file does not say it and its publisher does."""
    if entry.preprocess is None or inferred.sure.get("preprocess") != "usual":
        return inferred
    return replace(
        inferred,
        preprocess=entry.preprocess.replace(image_size=inferred.spec.image_size),
        sure={**inferred.sure, "preprocess": "stored"},
    )
