"""Any published checkpoint in, whatever its format: opened, recognised, understood, read."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from vitkit.errors import CheckpointError, SpecError
from vitkit.models.vit import ViT
from vitkit.weights import checkpoint as own
from vitkit.weights.checkpoint import Checkpoint
from vitkit.weights.format import Format, Inferred
from vitkit.weights.formats import FORMATS
from vitkit.weights.rules import read_tensors
from vitkit.weights.sources import Source, open_source, without_prefix


def load(path: str | Path, *, trust_pickle: bool = False, **overrides: Any) -> Checkpoint:
    """Read a checkpoint of any known format; the model is inferred from the file.

    Args:
        path: a vitkit, `.safetensors`, `.npz` or (with `trust_pickle`) `.pth` file, a folder, or an
            address on the Hub: `hf://owner/name`, `timm://name`.
        trust_pickle: read a pickle at all, by torch's `weights_only` reader.
        **overrides: fields of `ViTSpec` that the file cannot say, such as `num_heads=6` where heads
            are not 64 wide.

    Returns:
        The model in eval mode in float32, with preprocessing and class names as far as the file
        has them; `.metadata["sure"]` says how each field of the spec is known.

    Raises:
        CheckpointError: what is wrong with the file, in one line.
    """
    source = open_source(path, trust_pickle=trust_pickle)
    with source:
        if "vitkit" in source.header.metadata:
            if overrides:
                raise CheckpointError(f"{path}: describes itself; leave {', '.join(overrides)} out")
            return own.load(source.header.path)
        return read(source, overrides)


def formats() -> set[str]:
    """The names of the formats that can be read and written."""
    return {"vitkit", *FORMATS}


def read(source: Source, overrides: Mapping[str, Any]) -> Checkpoint:
    """The checkpoint in an open file of a foreign format; errors as for `load`."""
    path = source.header.path
    form, source, inferred = recognise(source, overrides)
    try:
        tensors, aside = read_tensors(form.table(inferred.spec), inferred.spec, source)
    except CheckpointError as error:
        raise CheckpointError(f"{path}: as {form.name}: {error}") from None
    with torch.device("meta"):
        model = ViT(inferred.spec)
    floats = {name: tensor.float().contiguous() for name, tensor in tensors.items()}
    model.load_state_dict(floats, assign=True)
    metadata = {
        "sure": dict(inferred.sure),
        "warnings": list(inferred.warnings),
        "notes": [*source.header.notes, *aside],
    }
    return Checkpoint(
        model.eval(), inferred.preprocess, inferred.classes, form.name, metadata, path
    )


def recognise(source: Source, overrides: Mapping[str, Any]) -> tuple[Format, Source, Inferred]:
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
    try:
        source = form.prepare(source)
        return form, source, form.infer(source.header, overrides)
    except (SpecError, CheckpointError) as error:
        raise CheckpointError(f"{path}: as {form.name}: {error}") from None
    except (LookupError, TypeError, ValueError, ArithmeticError, AttributeError) as error:
        raise CheckpointError(
            f"{path}: as {form.name}: not what such a file holds ({type(error).__name__}: {error})"
        ) from None
