"""vitkit's own file: one `.safetensors` with the weights and everything needed to use them.

The tensors have timm's names, so timm loads them as they are. The header's metadata has one JSON
document under the key `vitkit`: format version, spec, preprocessing, class names, versions, a
sha256 for each group of tensors, and whatever the writer adds (recipe, metrics, data fingerprint,
licence). Reading checks all of it against the header's shapes before any tensor is read.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from vitkit.errors import CheckpointError
from vitkit.io.atomic import FileWriter, replacing
from vitkit.io.caches import tensor_digests
from vitkit.messages import plural
from vitkit.spec import Preprocess
from vitkit.weights.array_files import safetensors_writer
from vitkit.weights.catalogue import with_assumption
from vitkit.weights.checkpoint import tensor_shapes
from vitkit.weights.formats.format import (
    METADATA_KEY,
    Description,
    model_description,
    read_description,
)
from vitkit.weights.formats.saved_model import as_saved, refuse_unusable, unwrapped
from vitkit.weights.tensor_file import Header, Source

OWN_VERSION = 1
"""Version of the format, written into every file."""
DESCRIBED = ("format_version", "spec", "preprocess", "classes", "versions", "sha256")
"""Keys of the description that `save` writes itself."""
_version = cache(version)  # each call parses a file of metadata


def save(
    path: str | Path,
    model: nn.Module,
    *,
    preprocess: Preprocess | None = None,
    classes: Sequence[str] = (),
    **metadata: Any,
) -> Path:
    """Write a model as one self-describing file, all of it or nothing.

    A file that `load` could not read is never written.

    Args:
        path: a file ending in `.safetensors`; an older one is replaced only when the new is
            complete.
        model: a `ViT`, also one that is compiled or wrapped for data parallelism. Its spec goes
            into the file; a linear layer put in place of `head` counts as the model's head.
        preprocess: how images are resized and normalised for it; needed, unless the model comes
            from pretrained weights, whose preprocessing is the default.
        classes: the K class names in the order of the logits; default those of the pretrained
            weights, unless the model has another number of classes, or a new head.
        **metadata: further JSON values, such as `metrics`, `recipe` or `licence`.

    Returns:
        The path.

    Raises:
        CheckpointError: another ending; no `ViT`; a model with a `backbone`, adapters, pruning or
            parametrizations, which no spec describes, or with hooks or layers that change its
            logits; weights that are not finite; class names that are no texts or do not fit the
            head; images of other channels than the model's; metadata that JSON cannot hold (NaN
            among them), or more than 25 MB of them.
        OutputError: the file cannot be written; an older file is untouched.
    """
    if not isinstance(path, str | os.PathLike):
        raise CheckpointError(
            f"the first argument is a {type(path).__name__}, not a path; write "
            "vitkit.save('model.safetensors', model, preprocess=checkpoint.preprocess)"
        )
    path = Path(path)
    if path.suffix != ".safetensors":
        raise CheckpointError(f"{path}: expected a name that ends in .safetensors")
    vit = unwrapped(model, path)
    if vit.origin is not None:
        preprocess = preprocess or vit.origin.preprocess
        classes = () if classes is None else class_names(classes, path)
        if not classes and len(vit.origin.classes) == vit.spec.num_classes:
            classes = vit.origin.classes
            metadata = with_assumption(metadata) if vit.origin.classes_assumed else metadata
    if not isinstance(preprocess, Preprocess):
        raise CheckpointError(
            f"{path}: preprocess= is missing (how images are resized and normalised for the "
            "model); pass checkpoint.preprocess of the weights that you started from, or a "
            "vitkit.Preprocess"
        )
    # All checks of the model are made before the file on disk is touched.
    writer = own_file_writer(model, preprocess, classes, metadata, path=path)
    with replacing(path, needed=writer.size) as temporary:
        writer.write(temporary)
    return path


def own_file_writer(
    model: nn.Module,
    preprocess: Preprocess,
    classes: Sequence[str],
    metadata: Mapping[str, Any],
    dtype: torch.dtype | None = None,
    *,
    path: Path,
) -> FileWriter:
    """Return the writer of the file that `save` writes.

    Args:
        model: as for `save`.
        preprocess: as for `save`.
        classes: as for `save`.
        metadata: as for `save`.
        dtype: dtype of the tensors in the file; default as in the model.
        path: the file, for messages.

    Raises:
        CheckpointError: as for `save`.
    """
    spec, state = as_saved(model, path)
    # Cast before the checks: a number may be finite in float32 and not in float16.
    tensors = {name: tensor.to(dtype or tensor.dtype) for name, tensor in state.items()}
    refuse_unusable(tensors, path)
    # Our own entries come last, so that metadata of an older file never replace them.
    document = {
        **metadata,
        "format_version": OWN_VERSION,
        **model_description(spec, preprocess, class_names(classes, path)),
        "versions": {"vitkit": _version("vitkit"), "torch": torch.__version__},
        "sha256": tensor_digests(tensors),
    }
    try:
        text = json.dumps(document, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise CheckpointError(
            f"{path}: the metadata are not JSON: {error}; pass plain values"
        ) from None
    # Parsed as reading the file will parse it, so that errors appear before it is written.
    read_description(Header(path, {}, {}, {METADATA_KEY: text}))
    return safetensors_writer(tensors, {METADATA_KEY: text}, path)


def class_names(classes: object, path: Path) -> tuple[str, ...]:
    """Return the class names of any iterable, such as an array of numpy.

    Raises:
        CheckpointError: anything but several texts.
    """
    values = [classes]  # a single text is a mistake, though it could be iterated
    if isinstance(classes, Iterable) and not isinstance(classes, str):
        values = list(classes)
    names: list[str] = []
    for name in values:
        if not isinstance(name, str) or isinstance(classes, str):
            raise CheckpointError(
                f"{path}: classes contains {name!r}; pass a list of class names, such as ['cat', "
                "'dog']"
            )
        names.append(str(name))  # JSON has no texts of numpy
    return tuple(names)


def read_own(source: Source, description: Description) -> dict[str, Tensor]:
    """Read the tensors of a file of ours, checked against its description and its digests.

    Raises:
        CheckpointError: weights that do not fit the spec in the file, or are damaged.
    """
    check_description(source.header, description)
    tensors = {name: source[name] for name in source}
    # A file without digests is read, too; where there are some, each group must have its own.
    expected = description.document.get("sha256")
    if expected is not None:
        _check_digests(source.header.path, expected, tensor_digests(tensors))
    return tensors


def check_description(header: Header, description: Description) -> None:
    """Check a description against the header: version, names and shapes; no tensor is read.

    Raises:
        CheckpointError: a newer version; tensors missing, unknown, or of another shape.
    """
    file_version = description.document.get("format_version")
    if type(file_version) is not int or not 1 <= file_version <= OWN_VERSION:
        raise CheckpointError(
            f"{header.path}: format version {file_version!r}; this vitkit reads 1 to "
            f"{OWN_VERSION}; upgrade vitkit"
        )
    # Checked before `tensor_shapes` builds the model: a file may declare a million blocks.
    blocks = description.spec.depth + sum(description.spec.resnet_layers)
    if blocks > len(header.shapes):
        raise CheckpointError(
            f"{header.path}: a spec of {blocks} blocks in a file of {len(header.shapes)} tensors"
        )
    expected = tensor_shapes(description.spec)
    missing = sorted(expected.keys() - header.shapes.keys())
    extra = sorted(header.shapes.keys() - expected.keys())
    if missing or extra:
        raise CheckpointError(
            f"{header.path}: {plural(len(missing), 'tensor')} missing "
            f"({', '.join(missing[:5]) or 'none'}), {len(extra)} unknown "
            f"({', '.join(extra[:5]) or 'none'}) for the spec in the file"
        )
    for name, shape in header.shapes.items():
        if shape != expected[name]:
            raise CheckpointError(
                f"{header.path}: {name} has shape {shape}, the spec in the file needs "
                f"{expected[name]}"
            )


def _check_digests(path: Path, expected: object, actual: Mapping[str, str]) -> None:
    if not isinstance(expected, dict) or expected.keys() != actual.keys():
        raise CheckpointError(f"{path}: its sha256 values do not belong to its groups of tensors")
    for group, digest in actual.items():
        if expected[group] != digest:
            raise CheckpointError(
                f"{path}: {group} is damaged: its sha256 is {digest}, expected "
                f"{expected[group]}; download or copy the file again"
            )
