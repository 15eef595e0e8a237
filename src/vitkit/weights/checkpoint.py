"""vitkit's own file: one `.safetensors` with the weights and everything needed to use them.

The tensors have timm's names, so timm loads them as they are. The header's metadata has one JSON
document under the key `vitkit`: format version, spec, preprocessing, class names, and whatever the
writer adds (recipe, metrics, data fingerprint, licence, versions).
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from vitkit.errors import CheckpointError, SpecError
from vitkit.models.vit import ViT
from vitkit.spec import Preprocess, ViTSpec
from vitkit.weights.files import write_bytes
from vitkit.weights.sources import check_file

FORMAT_VERSION = 1


@dataclass(frozen=True)
class Checkpoint:
    """A model with everything it needs to be used.

    Attributes:
        model: the ViT in eval mode, weights as stored.
        preprocess: what its pictures become.
        classes: the K class names in the order of the logits; empty where they are not known.
        format: which format the file has; `vitkit` for our own.
        metadata: the whole JSON document of the file.
        path: where it came from, or `None`.
    """

    model: ViT
    preprocess: Preprocess
    classes: tuple[str, ...]
    format: str = "vitkit"
    metadata: dict[str, Any] = field(default_factory=dict)
    path: Path | None = None


def save(
    path: str | Path,
    model: ViT,
    *,
    preprocess: Preprocess,
    classes: Sequence[str] = (),
    **metadata: Any,
) -> Path:
    """Write a model as one self-describing file, all of it or nothing.

    Args:
        path: a file ending in `.safetensors`; an older one is replaced only when the new is whole.
        model: the model; its spec goes into the file.
        preprocess: what its pictures must become.
        classes: the K class names in the order of the logits.
        **metadata: further JSON values, such as `metrics` or `recipe`.

    Returns:
        The path.

    Raises:
        CheckpointError: another ending, a `backbone` that no spec describes, class names that do
            not fit the head, or metadata that JSON cannot hold (NaN among them).
        OutputError: the file cannot be written; what was there is untouched.
    """
    path = Path(path)
    if path.suffix != ".safetensors":
        raise CheckpointError(f"{path}: vitkit writes .safetensors files; name it so")
    if model.spec.stem == "backbone":
        raise CheckpointError(
            f"{path}: the file could not describe the model's backbone; save its state_dict() "
            "beside the code that makes the backbone, or take stem 'resnet'"
        )
    if classes and len(classes) != model.spec.num_classes:
        raise CheckpointError(
            f"{path}: {len(classes)} class names for a head of {model.spec.num_classes}"
        )
    document = {
        "format_version": FORMAT_VERSION,
        "spec": model.spec.to_json(),
        "preprocess": preprocess.to_json(),
        "classes": list(classes),
        "versions": {"vitkit": version("vitkit"), "torch": torch.__version__},
        **metadata,
    }
    tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in _tensors(model).items()}
    try:
        header = {"format": "pt", "vitkit": json.dumps(document, allow_nan=False)}
    except (TypeError, ValueError) as error:
        raise CheckpointError(f"{path}: the metadata are not JSON: {error}") from None
    write_bytes(path, safetensors.torch.save(tensors, header))
    return path


def load(path: str | Path) -> Checkpoint:
    """Read a file that `save` wrote.

    Raises:
        CheckpointError: no such file, not a vitkit checkpoint, damaged, or weights that do not fit
            the spec the file declares.
    """
    path = Path(path)
    document, tensors = read(path)
    try:
        spec = ViTSpec.from_json(document["spec"])
        preprocess = Preprocess.from_json(document["preprocess"])
    except (SpecError, KeyError, TypeError) as error:
        raise CheckpointError(f"{path}: its description cannot be read: {error}") from None
    with torch.device("meta"):
        model = ViT(spec)
    _check_fit(path, _tensors(model), tensors)
    floats = {name: tensor.float() for name, tensor in tensors.items()}  # half precision is widened
    model.load_state_dict(floats, assign=True)
    classes = tuple(str(name) for name in document.get("classes", ()))
    return Checkpoint(model.eval(), preprocess, classes, metadata=document, path=path)


def read(path: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """The JSON document and the tensors of a vitkit file; errors as for `load`."""
    check_file(path)
    try:
        with safe_open(path, framework="pt") as file:
            header = file.metadata() or {}
            if "vitkit" not in header:
                raise CheckpointError(
                    f"{path}: a safetensors file without vitkit's description; it holds weights "
                    f"({', '.join(list(file.keys())[:3])} ...) but not what model they are of"
                )
            document = json.loads(header["vitkit"])
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except (SafetensorError, json.JSONDecodeError, RecursionError) as error:
        raise CheckpointError(f"{path}: not a whole safetensors file: {error}") from None
    if not isinstance(document, dict):
        raise CheckpointError(f"{path}: its description is no JSON object")
    found = document.get("format_version")
    if not isinstance(found, int) or found > FORMAT_VERSION:
        raise CheckpointError(
            f"{path}: format version {found}; this vitkit reads up to {FORMAT_VERSION}; upgrade it"
        )
    return document, tensors


def _tensors(model: ViT) -> dict[str, Tensor]:
    return dict(model.state_dict())


def _check_fit(path: Path, ours: Mapping[str, Tensor], theirs: Mapping[str, Tensor]) -> None:
    """Every key there, none too many, every shape as the spec says."""
    missing, extra = sorted(ours.keys() - theirs.keys()), sorted(theirs.keys() - ours.keys())
    if missing or extra:
        raise CheckpointError(
            f"{path}: {len(missing)} tensors missing ({', '.join(missing[:5]) or 'none'}), "
            f"{len(extra)} unknown ({', '.join(extra[:5]) or 'none'}) for the spec in the file"
        )
    for name, tensor in theirs.items():
        if tensor.shape != ours[name].shape:
            raise CheckpointError(
                f"{path}: {name} has shape {tuple(tensor.shape)}, "
                f"the spec in the file needs {tuple(ours[name].shape)}"
            )
