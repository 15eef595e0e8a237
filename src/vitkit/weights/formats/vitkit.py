"""vitkit's own file: one `.safetensors` with the weights and everything needed to use them.

The tensors have timm's names, so timm loads them as they are. The header's metadata has one JSON
document under the key `vitkit`: format version, spec, preprocessing, class names, versions, a
sha256 for each group of tensors, and whatever the writer adds (recipe, metrics, data fingerprint,
licence). Reading holds all of it against the header's shapes before any tensor is touched.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from safetensors import SafetensorError
from torch import Tensor, nn

from vitkit.errors import CheckpointError, SpecError, plural
from vitkit.io.atomic import FileWriter, replacing
from vitkit.io.digests import digests
from vitkit.io.strict_json import parse
from vitkit.spec import Preprocess, ViTSpec
from vitkit.weights.files.open import LONGEST_HEADER, Header, Source
from vitkit.weights.formats.key_table import shapes
from vitkit.weights.formats.model_tensors import as_saved, refuse_unusable

FORMAT_VERSION = 1
OWN = "vitkit"
"""The entry of the header's metadata with the description."""
DESCRIBED = ("format_version", "spec", "preprocess", "classes", "versions", "sha256")
"""What `save` says by itself."""
ENTRY = 200
"""Bytes that a tensor's entry in a header takes beside its name, at most."""
LONGEST_REASON = 300
"""Characters of what is wrong with a description, which may quote all of it."""
ABOUT = "vitkit_about"
"""The entry of files that are written in another format: what that format has no place for."""


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
        path: a file ending in `.safetensors`; an older one is replaced only when the new is whole.
        model: a `ViT`, also one that is compiled or wrapped for data parallelism. Its spec goes
            into the file; a linear layer put in place of `head` counts as the model's head.
        preprocess: what its images must become; needed, since no model can say it.
        classes: the K class names in the order of the logits.
        **metadata: further JSON values, such as `metrics`, `recipe` or `licence`.

    Returns:
        The path.

    Raises:
        CheckpointError: another ending; no `ViT`; a model with a `backbone`, adapters, pruning or
            parametrizations, which no spec describes; weights that are not finite; class names that
            are no texts or do not fit the head; images of other channels than the model's;
            metadata that JSON cannot hold (NaN among them), or more than 25 MB of them.
        OutputError: the file cannot be written; what was there is untouched.
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
    own = content(model, preprocess, classes, metadata, place=path)
    with replacing(path, needed=own.size) as temporary:
        own.write(temporary)
    return path


def content(
    model: nn.Module,
    preprocess: Preprocess,
    classes: Sequence[str],
    metadata: Mapping[str, Any],
    dtype: torch.dtype | None = None,
    *,
    place: Path,
) -> FileWriter:
    """The file that `save` writes, on its way; in another dtype if one is given.

    `place` is the file to be written, for messages; errors as for `save`.
    """
    spec, state = as_saved(model, place)
    tensors = {name: tensor.to(dtype or tensor.dtype) for name, tensor in state.items()}
    refuse_unusable(tensors, place)
    document = {
        **metadata,
        "format_version": FORMAT_VERSION,
        **about(spec, preprocess, _class_names(classes, place)),
        "versions": {"vitkit": version("vitkit"), "torch": torch.__version__},
        "sha256": digests(tensors),
    }
    try:
        text = json.dumps(document, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise CheckpointError(
            f"{place}: the metadata are not JSON: {error}; give plain values"
        ) from None
    description(Header(place, {}, {}, {OWN: text}))  # what reading the file will demand of it
    return safetensors_writer(tensors, {OWN: text}, place)


def _class_names(classes: object, place: Path) -> list[str]:
    """The names as a list; `CheckpointError` for anything but several texts."""
    wrong: object = classes
    if isinstance(classes, Iterable) and not isinstance(classes, str):
        given = list(classes)
        names = [name for name in given if isinstance(name, str)]
        if len(names) == len(given):
            return names
        wrong = next(name for name in given if not isinstance(name, str))
    raise CheckpointError(
        f"{place}: classes has {wrong!r}; give a list with a text for each class, such as "
        f"['cat', 'dog']"
    )


def about(spec: ViTSpec, preprocess: Preprocess, classes: Sequence[str]) -> dict[str, Any]:
    """What a model is, as JSON values."""
    return {
        "spec": spec.to_json(), "preprocess": preprocess.to_json(), "classes": list(classes),
    }  # fmt: skip


def safetensors_writer(
    tensors: Mapping[str, Tensor], metadata: Mapping[str, str], place: Path | str = "weights"
) -> FileWriter:
    """Tensors as a safetensors file, on its way.

    Raises:
        CheckpointError: a longer header than `load` reads, because of its metadata.
    """
    whole = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    taken: set[int] = set()
    for name, tensor in whole.items():  # the library refuses blocks that share their weights
        if tensor.data_ptr() in taken:
            whole[name] = tensor.clone()
        taken.add(tensor.data_ptr())
    size = sum(tensor.nbytes for tensor in whole.values())
    header = {"format": "pt", **metadata}
    length = len(json.dumps(header)) + sum(len(name) + ENTRY for name in whole)
    if length > LONGEST_HEADER:
        raise CheckpointError(
            f"{place}: {length / 1e6:.1f} MB of metadata; a file of weights holds at most "
            f"{LONGEST_HEADER / 1e6:g} MB; keep them in a file of their own"
        )

    def write(path: Path) -> None:
        path.touch()
        mode = path.stat().st_mode  # as the umask has it; the library makes a file of mode 600
        try:
            safetensors.torch.save_file(whole, path, header)
        except SafetensorError as error:  # the library hides the system's error in its text
            if (number := re.search(r"os error (\d+)", str(error))) is None:
                raise
            raise OSError(int(number[1]), os.strerror(int(number[1]))) from error
        path.chmod(mode)

    return FileWriter(size, write)


@dataclass(frozen=True)
class Description:
    """What a file of ours, or one that vitkit wrote in another format, says of its model.

    Attributes:
        spec: the architecture.
        preprocess: what images become.
        classes: the class names, or none.
        document: all of the JSON.
    """

    spec: ViTSpec
    preprocess: Preprocess
    classes: tuple[str, ...]
    document: dict[str, Any]


def description(header: Header, entry: str = OWN) -> Description | None:
    """The description in a header, or None where it has none.

    Raises:
        CheckpointError: one that cannot be read, or that contradicts itself.
    """
    if entry not in header.metadata:
        return None
    try:
        document = parse(header.metadata[entry])
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


def read_own(source: Source, said: Description) -> dict[str, Tensor]:
    """The tensors of an open file of ours, after everything in it was held against the rest.

    Raises:
        CheckpointError: weights that do not fit the spec that the file declares, or are damaged.
    """
    check(source.header, said)
    tensors = {name: source[name] for name in source}
    if (sealed := said.document.get("sha256")) is not None:
        _check_digests(source.header.path, sealed, digests(tensors))
    return tensors


def check(header: Header, said: Description) -> None:
    """Hold a description against the header: version, names and shapes; no tensor is read.

    Raises:
        CheckpointError: a newer version; tensors missing, unknown, or of another shape.
    """
    found = said.document.get("format_version")
    if type(found) is not int or not 1 <= found <= FORMAT_VERSION:
        raise CheckpointError(
            f"{header.path}: format version {found!r}; this vitkit reads 1 to {FORMAT_VERSION}; "
            f"upgrade it"
        )
    blocks = said.spec.depth + sum(said.spec.resnet_layers)
    if blocks > len(header.shapes):
        raise CheckpointError(
            f"{header.path}: {blocks} blocks in a file of {len(header.shapes)} tensors"
        )
    ours, theirs = shapes(said.spec), header.shapes
    missing, extra = sorted(ours.keys() - theirs.keys()), sorted(theirs.keys() - ours.keys())
    if missing or extra:
        raise CheckpointError(
            f"{header.path}: {plural(len(missing), 'tensor')} missing "
            f"({', '.join(missing[:5]) or 'none'}), {len(extra)} unknown "
            f"({', '.join(extra[:5]) or 'none'}) for the spec in the file"
        )
    for name, shape in theirs.items():
        if shape != ours[name]:
            raise CheckpointError(
                f"{header.path}: {name} has shape {shape}, the spec in the file needs {ours[name]}"
            )


def _check_digests(path: Path, sealed: object, found: Mapping[str, str]) -> None:
    if not isinstance(sealed, dict) or sealed.keys() != found.keys():
        raise CheckpointError(f"{path}: its sha256 are not of the groups of tensors it holds")
    for group, digest in found.items():
        if sealed[group] != digest:
            raise CheckpointError(
                f"{path}: {group} is damaged: its sha256 is {digest}, the file says "
                f"{sealed[group]}; take the file from where it came again"
            )
