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
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from vitkit.errors import CheckpointError, SpecError
from vitkit.io.atomic import FileWriter, replacing
from vitkit.io.digests import tensor_digests
from vitkit.io.strict_json import parse_json
from vitkit.messages import plural
from vitkit.spec import Preprocess, ViTSpec
from vitkit.weights.files.safetensors_file import safetensors_writer
from vitkit.weights.files.source import Header, Source
from vitkit.weights.formats.key_table import tensor_shapes
from vitkit.weights.formats.model_tensors import as_saved, refuse_unusable

OWN_FORMAT = "vitkit"
OWN_VERSION = 1
"""Version of the format, written into every file."""
METADATA_KEY = "vitkit"
"""The entry of the header's metadata with the description."""
FOREIGN_METADATA_KEY = "vitkit_about"
"""That entry in files of another format: everything that the format has no place for."""
DESCRIBED = ("format_version", "spec", "preprocess", "classes", "versions", "sha256")
"""Keys of the description that `save` writes itself."""
LONGEST_REASON = 300
"""Characters of an error about a description, as that error may quote all of it."""


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
        preprocess: how images are resized and normalised for it; needed, since no model has it.
        classes: the K class names in the order of the logits.
        **metadata: further JSON values, such as `metrics`, `recipe` or `licence`.

    Returns:
        The path.

    Raises:
        CheckpointError: another ending; no `ViT`; a model with a `backbone`, adapters, pruning or
            parametrizations, which no spec describes; weights that are not finite; class names that
            are no texts or do not fit the head; images of other channels than the model's;
            metadata that JSON cannot hold (NaN among them), or more than 25 MB of them.
        OutputError: the file cannot be written; an older file is untouched.
    """
    if not isinstance(path, str | os.PathLike):
        raise CheckpointError(
            f"the first argument is a {type(path).__name__}, no path; write "
            f"vitkit.save('model.safetensors', model, preprocess=checkpoint.preprocess)"
        )
    path = Path(path)
    if path.suffix != ".safetensors":
        raise CheckpointError(f"{path}: vitkit writes .safetensors files; name it so")
    if not isinstance(preprocess, Preprocess):
        raise CheckpointError(
            f"{path}: preprocess= is missing, what images become before the model sees them; "
            f"pass checkpoint.preprocess of the weights it began with, or a vitkit.Preprocess"
        )
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
        dtype: of the tensors in the file; default as in the model.
        path: the file, for messages.

    Raises:
        CheckpointError: as for `save`.
    """
    spec, state = as_saved(model, path)
    tensors = {name: tensor.to(dtype or tensor.dtype) for name, tensor in state.items()}
    refuse_unusable(tensors, path)
    # Our own entries come last, so that metadata of an older file never replace them.
    document = {
        **metadata,
        "format_version": OWN_VERSION,
        **model_description(spec, preprocess, _class_names(classes, path)),
        "versions": {"vitkit": version("vitkit"), "torch": torch.__version__},
        "sha256": tensor_digests(tensors),
    }
    try:
        text = json.dumps(document, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise CheckpointError(
            f"{path}: the metadata are not JSON: {error}; give plain values"
        ) from None
    # Parsed as reading the file will parse it, so that errors appear before it is written.
    read_description(Header(path, {}, {}, {METADATA_KEY: text}))
    return safetensors_writer(tensors, {METADATA_KEY: text}, path)


def _class_names(classes: object, path: Path) -> list[str]:
    """Return the names as a list.

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
                f"{path}: classes has {name!r}; give a list with a text for each class, such as "
                f"['cat', 'dog']"
            )
        names.append(name)
    return names


def model_description(
    spec: ViTSpec, preprocess: Preprocess, classes: Sequence[str]
) -> dict[str, Any]:
    """Return spec, preprocessing and class names as JSON values."""
    return {
        "spec": spec.to_json(),
        "preprocess": preprocess.to_json(),
        "classes": list(classes),
    }


@dataclass(frozen=True)
class Description:
    """The description in a file of ours, or in one that vitkit wrote in another format.

    Attributes:
        spec: the architecture.
        preprocess: how images are resized and normalised.
        classes: the class names, or none.
        document: all of the JSON.
    """

    spec: ViTSpec
    preprocess: Preprocess
    classes: tuple[str, ...]
    document: dict[str, Any]


def read_description(header: Header, entry: str = METADATA_KEY) -> Description | None:
    """Return the description in a header, or None where it has none.

    Args:
        header: of the file.
        entry: key of the header's metadata: `METADATA_KEY` or `FOREIGN_METADATA_KEY`.

    Raises:
        CheckpointError: a description that cannot be read, or that contradicts itself.
    """
    if entry not in header.metadata:
        return None
    try:
        document = parse_json(header.metadata[entry])
        spec = ViTSpec.from_json(document["spec"])
        preprocess = Preprocess.from_json(document["preprocess"])
        classes = document.get("classes", [])
    except (SpecError, LookupError, TypeError, ValueError, RecursionError, AttributeError) as error:
        reason = " ".join(str(error)[:LONGEST_REASON].split())
        raise CheckpointError(f"{header.path}: its description cannot be read: {reason}") from None
    if not isinstance(classes, list) or not all(isinstance(name, str) for name in classes):
        raise CheckpointError(f"{header.path}: its class names are no list of texts")
    if classes and len(classes) != spec.num_classes:
        raise CheckpointError(
            f"{header.path}: {len(classes)} class names for a head of {spec.num_classes}"
        )
    if preprocess.channels != spec.in_channels:
        raise CheckpointError(
            f"{header.path}: its images become {preprocess.channels} channels, its model has "
            f"{spec.in_channels}"
        )
    return Description(spec, preprocess, tuple(classes), document)


def read_own(source: Source, description: Description) -> dict[str, Tensor]:
    """Read the tensors of a file of ours, checked against its description and its digests.

    Raises:
        CheckpointError: weights that do not fit the spec in the file, or are damaged.
    """
    check_description(source.header, description)
    tensors = {name: source[name] for name in source}
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
            f"{OWN_VERSION}; upgrade it"
        )
    # Checked before `tensor_shapes` builds the model: a file may declare a million blocks.
    blocks = description.spec.depth + sum(description.spec.resnet_layers)
    if blocks > len(header.shapes):
        raise CheckpointError(
            f"{header.path}: {blocks} blocks in a file of {len(header.shapes)} tensors"
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
        raise CheckpointError(f"{path}: its sha256 are not of the groups of tensors it holds")
    for group, digest in actual.items():
        if expected[group] != digest:
            raise CheckpointError(
                f"{path}: {group} is damaged: its sha256 is {digest}, the file says "
                f"{expected[group]}; take the file from where it came again"
            )
