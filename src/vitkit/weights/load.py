"""Any published checkpoint in, whatever its format: opened, recognised, understood, read."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from vitkit.errors import CheckpointError, SpecError
from vitkit.models.vit import ViT
from vitkit.spec import ViTSpec
from vitkit.weights import own
from vitkit.weights.catalogue import Entry, known
from vitkit.weights.checkpoint import Checkpoint
from vitkit.weights.format import Format, Inferred
from vitkit.weights.formats import FORMATS
from vitkit.weights.rules import check_size, read_tensors
from vitkit.weights.sources import Source, open_source, without_prefix


def load(path: str | Path, *, trust_pickle: bool = False, **overrides: Any) -> Checkpoint:
    """Read a checkpoint of any known format; the model is inferred from the file.

    Args:
        path: a vitkit, `.safetensors`, `.npz` or (with `trust_pickle`) `.pth` file, a folder (also
            that of a run), an address (`hf://owner/name`, `timm://name`, `https://...`), or the
            name of a published checkpoint (`vitkit models --pretrained`).
        trust_pickle: read a pickle at all, by torch's `weights_only` reader.
        **overrides: fields of `ViTSpec` that the file cannot say, such as `num_heads=6` where heads
            are not 64 wide.

    Returns:
        The model in eval mode in float32, with preprocessing and class names as far as the file
        has them; `.metadata["sure"]` says how each field of the spec is known.

    Raises:
        CheckpointError: what is wrong with the file, in one line.
    """
    entry = known(path)
    with open_source(entry.address if entry else path, trust_pickle=trust_pickle) as source:
        said = own.description(source.header)
        if said is None:
            return read(source, overrides, entry)
        if overrides:
            raise CheckpointError(f"{path}: describes itself; leave {', '.join(overrides)} out")
        tensors = own.read_own(source, said)
        model, dtype = _filled(said.spec, tensors)
        return Checkpoint(model, said.preprocess, said.classes, own.OWN, said.document,
                          source.header.path, dtype)  # fmt: skip


def _filled(spec: ViTSpec, tensors: Mapping[str, Tensor]) -> tuple[ViT, str]:
    """A model in eval mode with these weights as float32, and the dtype they had, if one."""
    with torch.device("meta"):
        model = ViT(spec)
    floats = {name: tensor.float() for name, tensor in tensors.items()}
    model.load_state_dict(floats, assign=True)
    found = {str(tensor.dtype).removeprefix("torch.") for tensor in tensors.values()}
    return model.eval(), found.pop() if len(found) == 1 else "float32"


def formats() -> set[str]:
    """The names of the formats that can be read and written."""
    return {"vitkit", *FORMATS}


def read(source: Source, overrides: Mapping[str, Any], entry: Entry | None = None) -> Checkpoint:
    """The checkpoint in an open file of a foreign format; errors as for `load`."""
    path = source.header.path
    form, source, inferred = recognise(source, overrides, entry)
    try:
        tensors, aside = read_tensors(form.table(inferred.spec), inferred.spec, source)
    except CheckpointError as error:
        reason = str(error).removeprefix(f"{path}: ")
        raise CheckpointError(f"{path}: as {form.name}: {reason}") from None
    model, dtype = _filled(inferred.spec, tensors)
    metadata: dict[str, Any] = {"catalogue": entry.name, "licence": entry.licence} if entry else {}
    metadata |= {
        "sure": dict(inferred.sure),
        "warnings": list(inferred.warnings),
        "notes": [*source.header.notes, *aside],
    }
    return Checkpoint(
        model, inferred.preprocess, inferred.classes, form.name, metadata, path, dtype
    )


def recognise(
    source: Source, overrides: Mapping[str, Any], entry: Entry | None = None
) -> tuple[Format, Source, Inferred]:
    """Whose file it is, the file with that format's names, and what it says of the model."""
    source = without_prefix(source)
    path = source.header.path
    form = next((form for form in FORMATS.values() if form.detect(source.header)), None)
    if form is None:
        some = ", ".join(list(source)[:3])
        raise CheckpointError(
            f"{path}: {len(source)} tensors ({some}, ...) of no known format; known are "
            f"vitkit, {', '.join(FORMATS)}"
        )
    told = own.description(source.header, own.ABOUT)
    said = {"image_size": told.spec.image_size} if told else entry.fields if entry else {}
    try:
        source = form.prepare(source)
        found = form.infer(source.header, {**said, **overrides})
        check_size(found.spec, source.header.shapes)
        if told is not None:
            found = _completed(found, told)
        elif entry is not None:
            found = _as_published(found, entry)
        return form, source, found
    except (SpecError, CheckpointError) as error:
        raise CheckpointError(f"{path}: as {form.name}: {error}") from None
    except (LookupError, TypeError, ValueError, ArithmeticError, AttributeError,
            RuntimeError) as error:  # fmt: skip
        raise CheckpointError(
            f"{path}: as {form.name}: not what such a file holds ({type(error).__name__}: {error})"
        ) from None


def _completed(inferred: Inferred, told: own.Description) -> Inferred:
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
    """What pictures become, where the file does not say it and its publisher does."""
    if entry.preprocess is None or inferred.sure.get("preprocess") != "usual":
        return inferred
    return replace(
        inferred,
        preprocess=entry.preprocess.replace(image_size=inferred.spec.image_size),
        sure={**inferred.sure, "preprocess": "stored"},
    )
